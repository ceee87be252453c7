"""The workers of a server meet before memory is taken away or brought back.

A control operation reaches each scheduler on a thread of its own, at a time of its own; memory changes hands in
SGLang's own pass, which all schedulers make together and which the front end asks for. So each worker that has a
request says so here, and when the last one has, the front end asks.

The one rule: nothing is asked for before everyone is there; whoever waited in vain is told who was missing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from coldsnap.engines.rank import Busy, Operation

__all__ = ["PATIENCE_S", "Meeting"]

PATIENCE_S = 30.0  # workers are asked at the same time


class _Round:
    """One meeting: who is there, and how it ended."""

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.ended = threading.Event()
        self.error: BaseException | None = None


class Meeting:
    """Where workers wait for each other.

    Args:
        workers: Returns the names of all of them.
        act: Asks SGLang, with the kind: ``release`` or ``resume``; returns when every rank has answered.
        patience_s: How long the first one waits for the last one, s.
    """

    def __init__(
        self, workers: Callable[[], set[str]], act: Callable[[str], None], *, patience_s: float = PATIENCE_S
    ) -> None:
        self._workers = workers
        self._act = act
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._rounds: dict[str, _Round] = {}

    def operations(self) -> Mapping[str, Operation]:
        """Return what the front end answers."""
        return {"meet": self.meet}

    def meet(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Wait for the other workers, and until SGLang has done what they met for.

        Raises:
            Busy: They did not all come in time; nothing was asked for.
        """
        kind, worker = str(request.get("kind")), str(request.get("worker"))
        with self._lock:
            this = self._rounds.setdefault(kind, _Round())
            this.there.add(worker)
            complete = this.there >= self._workers()
            if complete:
                del self._rounds[kind]
        if complete:
            self._hold(this, kind)
        elif not this.ended.wait(self._patience_s):
            self._give_up(this, kind)
            this.ended.wait()  # at once, if it was given up; else SGLang is at it
        if this.error is not None:
            raise this.error
        return {"met": sorted(this.there)}

    def _hold(self, this: _Round, kind: str) -> None:
        try:
            self._act(kind)
        except BaseException as error:  # noqa: BLE001  everyone who waits is told
            this.error = error
        finally:
            this.ended.set()

    def _give_up(self, this: _Round, kind: str) -> None:
        with self._lock:
            if self._rounds.get(kind) is not this:
                return  # the last one came just now
            del self._rounds[kind]
        missing = ", ".join(sorted(self._workers() - this.there))
        this.error = Busy(f"{missing} was not asked within {self._patience_s:g} s; a {kind} is asked of every worker")
        this.ended.set()
