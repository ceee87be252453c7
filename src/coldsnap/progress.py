"""Show what a running plan does: plain lines anywhere, a live table where ``rich`` is installed."""

from __future__ import annotations

import sys
from threading import Lock
from typing import Any, TextIO

from coldsnap.receipts import Event, EventSink

__all__ = ["progress"]


def progress(*, file: TextIO | None = None, rich: bool = False) -> EventSink:
    """Return a callback for ``execute(…, on_event=)`` that prints one line for each finished step.

    Args:
        file: Where to print; standard error when ``None``.
        rich: Use a live table instead; needs the package ``rich`` (extra ``notebook``).

    Raises:
        ImportError: ``rich=True`` without the package.
    """
    return _Live() if rich else _Lines(file or sys.stderr)


class _Lines:
    """One line a step, with the time since the plan began and the step's own duration."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._lock = file, Lock()
        self._started: dict[str, int] = {}

    def __call__(self, event: Event) -> None:
        with self._lock:
            if event.kind == "start":
                self._started[event.step] = event.at_ns
            elif event.kind == "end":
                seconds = (event.at_ns - self._started.pop(event.step, event.at_ns)) / 1e9
                mark = "ok" if event.status == "ok" else "FAILED"
                line = f"[{event.at_ns / 1e9:8.2f} s] {event.step:<18} {mark:<6} {seconds:7.2f} s  {event.text}"
                print(line.rstrip(), file=self._file, flush=True)


class _Live:
    """A table that is updated in place; works in terminals and notebooks."""

    def __init__(self) -> None:
        from rich.live import Live  # noqa: PLC0415 - an optional extra
        from rich.table import Table  # noqa: PLC0415

        self._table_class: Any = Table
        self._live: Any = Live(auto_refresh=False)
        self._rows: dict[str, tuple[str, str, str]] = {}
        self._started: dict[str, int] = {}
        self._lock = Lock()
        self._live.start()

    def __call__(self, event: Event) -> None:
        with self._lock:
            if event.kind == "start":
                self._started[event.step] = event.at_ns
                self._rows[event.step] = ("…", "", "")
            elif event.kind == "end":
                seconds = (event.at_ns - self._started[event.step]) / 1e9
                self._rows[event.step] = ("✓" if event.status == "ok" else "✗", f"{seconds:.2f} s", event.text)
            elif event.kind == "done":
                self._live.stop()
                return
            table = self._table_class("step", "", "time", "outcome")
            for step, cells in self._rows.items():
                table.add_row(step, *cells)
            self._live.update(table, refresh=True)
