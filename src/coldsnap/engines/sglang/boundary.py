"""SGLang's own release and resume of memory, in each scheduler: what is done there beside what SGLang does.

Both are entered by every tensor-parallel rank in the same pass. SGLang alone ends its server when it is asked to resume
what is not released, or to release while it works; here the first does nothing and the second is refused.

The one rule: SGLang's own part runs in all ranks or in none, and what goes wrong in it ends the process: a rank that
may have lost its memory must not serve.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from attrs import define, field

from coldsnap.engines.rank import Busy
from coldsnap.engines.sglang.agreement import Agreement, Exchange
from coldsnap.engines.sglang.live import Live
from coldsnap.engines.sglang.memory import KV_CACHE, WEIGHTS
from coldsnap.engines.sglang.worker import Job, Resident
from coldsnap.errors import EngineError

__all__ = ["Boundary"]

TAGS = (WEIGHTS, KV_CACHE, "cuda_graph")

Step = Callable[[], None]


class Boundary:
    """The hooks on ``SchedulerWeightUpdaterManager``.

    Args:
        resident: Whose memory.
        live: What becomes of the weights when a user asks SGLang itself.
        exchange: How the ranks of a manager talk.
        before: Done when it is certain that SGLang will take memory away: graphs go.
        leave: Done after it has, before anyone is answered: communicators end.
        enter: Done before SGLang brings memory back: communicators begin.
        after: Done when all of it is back, and filled: graphs are captured.
        abort: Ends the process.
    """

    def __init__(
        self,
        resident: Resident,
        live: Live,
        *,
        exchange: Callable[[Any], Exchange],
        before: Step,
        leave: Step,
        enter: Step,
        after: Step,
        abort: Callable[[BaseException], Any],
    ) -> None:
        self._resident = resident
        self._live = live
        self._exchange = exchange
        self._before = before
        self._leave = leave
        self._enter = enter
        self._after = after
        self._abort = abort
        self._pass: _Pass | None = None
        self._manager: Any = None

    @property
    def asleep(self) -> frozenset[str]:
        """Return the tags that SGLang has paused."""
        return frozenset(self._manager.offload_tags) if self._manager is not None else frozenset()

    # Hooks

    def release(self, original: Any, manager: Any, request: Any) -> Any:
        """Take memory away (around ``release_memory_occupation``)."""
        self._make("release", original, manager, request, self._released)
        return _messages(request).ReleaseMemoryOccupationReqOutput()

    def resume(self, original: Any, manager: Any, request: Any) -> Any:
        """Bring memory back (around ``resume_memory_occupation``)."""
        self._make("resume", original, manager, request, self._resumed)
        return _messages(request).ResumeMemoryOccupationReqOutput()

    def _make(self, kind: str, original: Any, manager: Any, request: Any, act: Callable[[_Pass], Any]) -> None:
        job = self._resident.take(kind)
        asked = _asked(kind, request, job)
        tags = [tag for tag in asked if (tag in manager.offload_tags) == (kind == "resume")]
        agreement = Agreement(self._exchange(manager))
        this = _Pass(
            original=original,
            manager=manager,
            request_class=type(request),
            tags=tuple(tags),
            job=job,
            agreement=agreement,
        )
        self._pass, self._manager = this, manager
        try:
            agreement.reached(f"{kind}: begin", (bool(job), *this.tags))
            reply = act(this)
            agreement.reached(f"{kind}: end")
        except Exception as error:  # noqa: BLE001  SGLang ends its server for anything that gets out of here
            agreement.failed(error)
            self._resident.last_error = f"{type(error).__name__}: {error}"
            if job is not None:
                job.end(None, error)
            return
        finally:
            self._pass = None
        self._resident.last_error = ""
        if job is not None:
            job.end(reply or {})

    # Away

    def _released(self, this: _Pass) -> Any:
        if this.tags:
            _require_idle(this.manager)
        if this.job is not None:
            return self._memory().release(this.job.request)
        if WEIGHTS in this.tags and self._resident.memory is not None:
            self._live.release(this.tags)
        if this.left:
            self.pause(this.left)
        return None

    def pause(self, _tags: Sequence[str]) -> None:
        """Have SGLang take away everything that this pass is about; called when a generation is written."""
        this = self._here()
        if not this.left:
            return
        this.agreement.reached(f"pause {' '.join(this.left)}")
        with self._fatal():
            self._before()
            this.run(this.left)
            self._leave()

    # Back

    def _resumed(self, this: _Pass) -> Any:
        reply = None
        if this.job is not None:
            reply = self._memory().hydrate(this.job.request)
        elif self._resident.memory is not None:
            self._live.resume(this.tags)
        if this.left:
            self.resume_tags(this.left)
        if this.entered and not this.manager.offload_tags:
            this.agreement.reached("filled")
            with self._fatal():
                self._after()
        return reply

    def resume_tags(self, tags: Sequence[str]) -> None:
        """Have SGLang bring tags back; called before they are filled."""
        this = self._here()
        wanted = [tag for tag in tags if tag in this.manager.offload_tags]
        if not wanted:
            return
        this.agreement.reached(f"resume {' '.join(wanted)}")
        with self._fatal():
            if this.entered:
                this.run(wanted)
                return
            this.entered = True
            self._enter()
            this.run(wanted)

    def _memory(self) -> Any:
        if self._resident.memory is None:
            raise Busy("the worker is still loading its model")
        return self._resident.memory

    def _here(self) -> _Pass:
        if self._pass is None:
            raise EngineError("memory changes hands in SGLang's own pass only; this is none")
        return self._pass

    def _fatal(self) -> _Fatal:
        return _Fatal(self._abort)


@define(kw_only=True, eq=False)
class _Pass:
    """One release or resume, in one rank."""

    original: Any
    manager: Any
    request_class: Any
    tags: tuple[str, ...]
    job: Job | None
    agreement: Agreement
    entered: bool = False
    done: set[str] = field(factory=set)

    @property
    def left(self) -> list[str]:
        """Return the tags that SGLang has not moved yet."""
        return [tag for tag in self.tags if tag not in self.done]

    def run(self, tags: Sequence[str]) -> None:
        """Have SGLang move tags."""
        self.original(self.manager, self.request_class(tags=list(tags)))
        self.done.update(tags)


class _Fatal:
    """Ends the process for whatever goes wrong inside."""

    def __init__(self, abort: Callable[[BaseException], Any]) -> None:
        self._abort = abort

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            self._abort(error)


def _asked(kind: str, request: Any, job: Job | None) -> Sequence[str]:
    """Return the tags that a pass is about: those of the operation, if there is one, else those of the request."""
    if job is None:
        return tuple(request.tags) if request.tags else TAGS
    if kind == "release":
        discarded = job.request.get("discard", (KV_CACHE,))
        return tuple(tag for tag in TAGS if tag != KV_CACHE or KV_CACHE in discarded)
    wanted = job.request.get("tags")
    # Graphs come back with the last of the memory.
    return TAGS if wanted is None or KV_CACHE in wanted else tuple(wanted)


def _messages(request: Any) -> Any:
    """Return SGLang's module of messages, which is where its requests are."""
    return sys.modules[type(request).__module__]


def _require_idle(manager: Any) -> None:
    """Demand what SGLang's own release demands, which ends the server when it is not so."""
    paused = bool(getattr(manager.scheduler, "_engine_paused", False))
    knows = "ignore_waiting" in inspect.signature(manager.is_fully_idle).parameters
    if not (manager.is_fully_idle(ignore_waiting=paused) if knows else manager.is_fully_idle()):
        raise Busy("the engine still has requests; quiesce it, or pause it and wait, before its memory is released")
