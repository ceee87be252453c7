"""What happened: receipts, spans and the report of an executed plan.

A receipt says what was requested, what was done instead and why, how many bytes moved and how long it took. Times come
from one monotonic clock; wall-clock time is kept once, as the origin.
"""

from __future__ import annotations

import html
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from attrs import asdict, define, field, frozen

from coldsnap.errors import ColdSnapError

if TYPE_CHECKING:
    from coldsnap.keeper.handle import Engine
    from coldsnap.plan import Plan

__all__ = ["Event", "Receipt", "Report", "Span", "Timeline"]

SpanStatus = Literal["ok", "error", "running"]


@frozen(kw_only=True)
class Receipt:
    """The outcome of one step, or of one choice inside it.

    Attributes:
        step: The step's id.
        requested: What the policy or the operation asked for, ``""`` when there was nothing to choose.
        effective: What was done.
        reason: Why that, in words.
        bytes: Bytes read, written or mapped; 0 when none.
        seconds: Duration, s.
        details: Further figures by name, for example ``{"criu_s": 0.4}``.
    """

    step: str
    requested: str = ""
    effective: str = ""
    reason: str = ""
    bytes: int = 0
    seconds: float = 0.0
    details: Mapping[str, float | int | str] = field(factory=dict)


@frozen(kw_only=True)
class Span:
    """A named stretch of time on the timeline.

    Attributes:
        name: The step's id, or a part of it after a slash.
        parent: The enclosing span's name, or ``None``.
        start_ns: Start after the timeline's origin, ns.
        end_ns: End after the timeline's origin, ns; equal to the start while running.
        status: ok, error or running.
    """

    name: str
    parent: str | None
    start_ns: int
    end_ns: int
    status: SpanStatus = "ok"

    @property
    def seconds(self) -> float:
        """Return the duration in seconds."""
        return (self.end_ns - self.start_ns) / 1e9


@frozen(kw_only=True)
class Event:
    """What ``on_event`` is called with; losing one never fails an operation.

    Attributes:
        kind: plan, start, end, note or done.
        step: The step's id, ``""`` for plan and done.
        at_ns: Time after the timeline's origin, ns.
        text: A line for people.
        status: ok or error, for end and done.
        number: The step's position, from 1.
        total: How many steps the plan has.
    """

    kind: Literal["plan", "start", "end", "note", "done"]
    step: str = ""
    at_ns: int = 0
    text: str = ""
    status: SpanStatus = "ok"
    number: int = 0
    total: int = 0


@define
class Timeline:
    """Spans of one execution, on one monotonic clock.

    Attributes:
        origin_unix_ns: Wall-clock time at the origin, ns.
    """

    origin_unix_ns: int = field(factory=time.time_ns)
    _origin_ns: int = field(factory=time.monotonic_ns, repr=False)
    # Steps end in several threads: only single operations on the list, which the interpreter keeps whole. A lock could
    # not be pickled, and a report travels inside errors.
    _spans: list[Span] = field(factory=list, repr=False)

    def now_ns(self) -> int:
        """Return the time after the origin, ns."""
        return time.monotonic_ns() - self._origin_ns

    @property
    def spans(self) -> tuple[Span, ...]:
        """Return the finished spans by start."""
        return tuple(sorted(self._spans, key=lambda span: (span.start_ns, -span.end_ns)))

    @property
    def seconds(self) -> float:
        """Return the time from the origin to the last span's end, s."""
        return max((span.end_ns for span in self.spans), default=0) / 1e9

    def between(self, name: str) -> float:
        """Return the duration of the span ``name``, s, or 0 when there is none."""
        return next((span.seconds for span in self.spans if span.name == name), 0.0)

    @contextmanager
    def span(self, name: str, parent: str | None = None) -> Iterator[None]:
        """Record what the block takes, also when it raises."""
        start = self.now_ns()
        status: SpanStatus = "error"
        try:
            yield
            status = "ok"
        finally:
            self._spans.append(Span(name=name, parent=parent, start_ns=start, end_ns=self.now_ns(), status=status))

    def __str__(self) -> str:
        width, total = 40, max(self.seconds, 1e-9)
        lines = []
        for span in self.spans:
            left = int(span.start_ns / 1e9 / total * width)
            bar = max(1, round(span.seconds / total * width))
            mark = "█" if span.status == "ok" else "!"
            indent = "  " if span.parent else ""
            lines.append(
                f"{indent + span.name:<28} {span.start_ns / 1e9:8.3f} s {span.seconds:8.3f} s  {' ' * left}{mark * bar}"
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        total = max(self.seconds, 1e-9)
        rows = []
        for span in self.spans:
            left, width = 100 * span.start_ns / 1e9 / total, max(0.3, 100 * span.seconds / total)
            colour = "#3b7dd8" if span.status == "ok" else "#c0392b"
            bar = f'<div style="margin-left:{left:.2f}%;width:{width:.2f}%;background:{colour};height:0.8em"></div>'
            name = html.escape(span.name)
            rows.append(f'<tr><td>{name}</td><td>{span.seconds:.3f} s</td><td style="width:60%">{bar}</td></tr>')
        return f'<table style="width:100%"><tr><th>span</th><th>time</th><th></th></tr>{"".join(rows)}</table>'

    def plot(self) -> object:
        """Draw the spans with matplotlib; return the figure.

        Raises:
            ImportError: matplotlib is not installed (extra ``notebook``).
        """
        from matplotlib.figure import Figure  # noqa: PLC0415 - an optional extra

        spans = self.spans
        figure = Figure(figsize=(9, 0.32 * len(spans) + 1), layout="constrained")
        axes = figure.subplots()
        for row, span in enumerate(spans):
            colour = "tab:blue" if span.status == "ok" else "tab:red"
            axes.barh(row, span.seconds, left=span.start_ns / 1e9, color=colour)
        axes.set_yticks(range(len(spans)), [span.name for span in spans])
        axes.invert_yaxis()
        axes.set_xlabel("seconds")
        return figure


def _part(receipt: Receipt) -> Mapping[str, float]:
    """Return which part of a restore a receipt is about, with its time, s."""
    match receipt.step:
        case "thaw":
            return {"criu": receipt.seconds}
        case "restore-cuda" | "unlock-cuda":
            return {"cuda": receipt.seconds}
        case "hydrate":
            kv = float(receipt.details.get("kv_cache_s", 0.0))
            return {"hydrate": receipt.seconds - kv, "kv": kv}
        case "answer":
            return {"request": receipt.seconds}
        case _:
            return {}


@define(kw_only=True, repr=False)
class Report:
    """What ``execute`` returns, and what a StepError carries.

    Attributes:
        operation: capture, restore, launch, stop, sleep, wake, status, verify, delete or publish.
        plan: The plan that ran.
        state: succeeded, failed or running.
        receipts: One for each finished step, and one for each choice.
        timeline: When everything happened.
        engine: The handle of the engine that runs now, if one does.
        artifact: The directory of the artifact written or read, if one was.
        answer_s: Restore: from the call of ``execute`` to the first correct token (admission included), s.
        workload: What became of the workload, in one sentence.
        error: The error's sentence when it failed.
    """

    operation: str
    plan: Plan
    state: Literal["running", "succeeded", "failed"] = "running"
    receipts: list[Receipt] = field(factory=list)
    timeline: Timeline = field(factory=Timeline)
    engine: Engine | None = None
    artifact: Path | None = None
    answer_s: float | None = None
    workload: str = ""
    error: str = ""

    @property
    def serving(self) -> Engine:
        """Return the handle of the engine that runs now.

        Raises:
            ColdSnapError: None does: it was stopped, or never started.
        """
        if self.engine is None:
            raise ColdSnapError(f"no engine runs after this {self.operation}: {self.workload or 'it has not ended'}")
        return self.engine

    def receipt(self, step: str) -> Receipt:
        """Return the first receipt of a step.

        Raises:
            KeyError: The step left no receipt.
        """
        for receipt in self.receipts:
            if receipt.step == step:
                return receipt
        raise KeyError(step)

    @property
    def split(self) -> Mapping[str, float]:
        """Where the time of a restore went, s: ``criu``, ``cuda``, ``hydrate``, ``kv``, ``request``; what it had.

        They do not add up to ``answer_s``: admission and staging are in none of them, and some ran beside others.
        """
        parts: dict[str, float] = {}
        for receipt in self.receipts:
            for part, seconds in _part(receipt).items():
                parts[part] = parts.get(part, 0.0) + seconds
        return parts if self.operation == "restore" else {}

    def to_json(self) -> str:
        """Return everything but the engine handle as JSON text."""
        data = {
            "operation": self.operation,
            "plan_digest": self.plan.digest,
            "state": self.state,
            "seconds": self.timeline.seconds,
            "answer_s": self.answer_s,
            "split": dict(self.split),
            "artifact": None if self.artifact is None else str(self.artifact),
            "engine": None if self.engine is None else str(self.engine.run_dir),
            "workload": self.workload,
            "error": self.error,
            "receipts": [asdict(receipt) for receipt in self.receipts],
            "spans": [asdict(span) for span in self.timeline.spans],
        }
        return json.dumps(data, indent=2)

    def __repr__(self) -> str:
        return f"<Report of a {self.operation}: {self.state} in {self.timeline.seconds:.2f} s>"

    def _rows(self) -> list[tuple[str, str, str, str]]:
        rows = []
        for receipt in self.receipts:
            size = f"{receipt.bytes / 1e6:,.1f} MB" if receipt.bytes else ""
            effective = f"{receipt.requested} → {receipt.effective}" if receipt.requested else receipt.effective
            text = ": ".join(part for part in (effective, receipt.reason) if part)
            rows.append((receipt.step, f"{receipt.seconds:.3f} s", size, text))
        return rows

    def __str__(self) -> str:
        head = f"{self.operation} {self.state} in {self.timeline.seconds:.2f} s"
        if self.answer_s is not None:
            head += f", first correct token after {self.answer_s:.2f} s"
        lines = [f"  {step:<20} {seconds:>10} {size:>12}  {text}" for step, seconds, size, text in self._rows()]
        tail = [f"  {text}" for text in (self.workload, self.error) if text]
        return "\n".join([head, *lines, *tail])

    def _repr_html_(self) -> str:
        cells = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in self._rows())
        head = html.escape(str(self).splitlines()[0])
        table = f"<table><tr><th>step</th><th>time</th><th>bytes</th><th>outcome</th></tr>{cells}</table>"
        return f"<b>{head}</b>{table}{self.timeline._repr_html_()}"


EventSink = Callable[[Event], None]
