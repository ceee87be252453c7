"""The scheduler of this process: its models, and its memory as something that is released and hydrated.

SGLang's scheduler does one thing at a time, and all ranks of a server do the same one. So an operation that arrives on
a thread of the rank is kept, the front end is asked for SGLang's own request once every worker has one (``meeting``),
and the scheduler's own thread does it when that request arrives (``boundary``).

The one rule: memory changes hands on the scheduler's thread, inside SGLang's own release or resume, and nowhere else.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attrs import define, evolve, field

from coldsnap.artifact.extents import Allocation
from coldsnap.engines.rank import Busy, Operation
from coldsnap.engines.sglang.memory import WEIGHTS, AtBoundary, Move
from coldsnap.engines.weights.copies import Placed
from coldsnap.engines.weights.settled import Settled
from coldsnap.engines.weights.split import Split, Written, split
from coldsnap.engines.weights.worker import Hooks, WorkerMemory
from coldsnap.errors import UnsupportedError
from coldsnap.transfer.memory import PreservedMemory

__all__ = ["CHUNK_BYTES", "QUEUE_DEPTH", "Job", "Resident", "Settled"]

Reply = Mapping[str, Any]
Meet = Callable[[str, str], None]
"""Meets the other workers: kind, own name."""

Vacant = Callable[[str], Iterable[tuple[int, int]]]


def nowhere(_tag: str) -> Iterable[tuple[int, int]]:
    """Return no vacancy: every byte is preserved."""
    return ()


CHUNK_BYTES = 256 << 20
QUEUE_DEPTH = 4
_TRANSFER = {"chunk_bytes": CHUNK_BYTES, "queue_depth": QUEUE_DEPTH}
_LATE_S = 60.0  # after the front end was answered, until this rank's own reply is there


@define(eq=False)
class Job:
    """An operation that waits for the scheduler's thread.

    Attributes:
        kind: ``release`` or ``resume``.
        request: What was asked.
        reply: What was answered.
        error: What it failed with.
        done: Set when one of both is there.
    """

    kind: str
    request: Reply
    reply: Reply | None = None
    error: BaseException | None = None
    done: threading.Event = field(factory=threading.Event)

    def end(self, reply: Reply | None, error: BaseException | None = None) -> None:
        """Answer it."""
        self.reply, self.error = reply, error
        self.done.set()


class Resident:
    """The models and the memory that live here, once they do.

    Args:
        meet: Meets the other workers; returns when SGLang has made its pass.
        settle: Says what a model's load wrote.

    Attributes:
        memory: The worker's memory; None before a model is there.
    """

    memory: WorkerMemory | None = None

    def __init__(self, *, meet: Meet, settle: Callable[[Any], Settled]) -> None:
        self._meet = meet
        self._settle = settle
        self._models: dict[str, Any] = {}
        self._paths: dict[str, str] = {}
        self._at_boundary: AtBoundary | None = None
        self._vacant: Vacant = nowhere
        self._job: Job | None = None
        self._lock = threading.Lock()
        self._one_at_a_time = threading.Lock()
        self.rank = 0
        self.last_error = ""

    # Models

    @property
    def models(self) -> Mapping[str, Any]:
        """Return the models by role: ``target``, ``draft``, ``draft-1`` and so on."""
        return self._models

    def draft_path(self, model: Any) -> str | None:
        """Return where a draft model was loaded from, None for the target and for one that is not here."""
        drafts = ((role, known) for role, known in self._models.items() if role != "target")
        return next((self._paths[role] for role, known in drafts if known is model), None)

    def add_model(self, model: Any, *, draft: bool, path: str) -> str:
        """Take a model whose memory is final, and return its role.

        Args:
            model: The module.
            draft: Whether it only guesses what the target confirms.
            path: Where its checkpoint is.
        """
        role = "target"
        if draft:
            drafts = sum(name.startswith("draft") for name in self._models)
            role = f"draft-{drafts}" if drafts else "draft"
        self._models[role] = model
        self._paths[role] = path
        return role

    def settle_in(
        self,
        saver: PreservedMemory,
        *,
        rank: int,
        pause: Move,
        resume: Move,
        hooks: Hooks,
        vacant: Vacant = nowhere,
    ) -> None:
        """Take the memory of this process.

        Args:
            saver: The memory saver's allocations.
            rank: This worker's number among all of its server.
            pause: Has SGLang pause tags.
            resume: Has SGLang resume tags.
            hooks: What is done around it.
            vacant: Returns where nothing lives in the allocations with a tag: address and size.
        """
        self.rank, self._vacant = rank, vacant
        self._at_boundary = AtBoundary(saver, pause=pause, resume=resume)
        self.memory = WorkerMemory(self._at_boundary, split=self._split, hooks=hooks)

    def require_mapped(self) -> None:
        """Demand that the weights have backing.

        Raises:
            Busy: SGLang was asked to take it away by someone else.
        """
        memory = self.allocations()
        if not all(memory.is_mapped(region) for region in memory.regions(WEIGHTS)):
            raise Busy("the weights of this worker sleep, and nobody here put them to sleep; wake the engine first")

    def allocations(self) -> AtBoundary:
        """Return the memory of this process.

        Raises:
            Busy: No model was loaded yet.
        """
        if self._at_boundary is None:
            raise Busy("no model was loaded yet")
        return self._at_boundary

    @property
    def name(self) -> str:
        """Return what the worker is called where nobody said."""
        return f"worker-{self.rank}"

    def _split(self) -> Split:
        memory = self.allocations()
        written: list[Written] = []
        copies: list[Placed] = []
        kept: Counter[str] = Counter()
        derived: dict[str, int] = {}
        for role, model in self._models.items():
            settled = self._settle(model)
            written += [evolve(one, semantic=_named(one.semantic, role)) for one in settled.written]
            copies += [_placed(one, role) for one in settled.copies]
            kept.update(settled.kept)
            derived |= {_named(name, role): size for name, size in settled.derived.items()}
        allocations = [
            Allocation(address=one.address, size=one.size_bytes, region=one.tag, device=memory.device)
            for one in memory.regions(WEIGHTS)
        ]
        return split(allocations, written, dict(kept), self._vacant(WEIGHTS), copies=copies, derived=derived)

    # Operations

    def operations(self) -> Mapping[str, Operation]:
        """Return what a rank answers for its worker."""
        return {
            "release": lambda request: self._do("release", request),
            "hydrate": lambda request: self._do("resume", request),
            "memory": self._status,
            "transition": lambda _: {"error": self.last_error},
            "materialize": self._materialize,
        }

    def _materialize(self, _request: Reply) -> Reply:
        raise UnsupportedError(
            "SGLang's memory is not read while it serves: it changes hands in the scheduler's own pass alone",
            field="weights.native.materialize",
            works='"off": a pack that is staged in the store is used',
        )

    def _do(self, kind: str, request: Reply) -> Reply:
        if self.memory is None:
            return {"skipped": True}
        with self._one_at_a_time:
            job = Job(kind, {**request, **_TRANSFER})
            with self._lock:
                self._job = job
            try:
                self._meet(kind, f"worker.{os.getpid()}")
            finally:
                with self._lock:
                    self._job = None
            if not job.done.wait(_LATE_S):
                raise Busy(f"SGLang answered, but its scheduler did not come to the {kind} that was asked for")
            if job.error is not None:
                raise job.error
            return job.reply or {}

    def take(self, kind: str) -> Job | None:
        """Return the operation that waits for this kind of pass, once."""
        with self._lock:
            job = self._job
            if job is None or job.kind != kind:
                return None
            self._job = None
            return job

    def _status(self, request: Reply) -> Reply:
        if self.memory is None:
            return {"skipped": True}
        reply = self.memory.memory_status(request)
        # Before its first release a worker has not been told its name; its number is one that all of them agree on.
        return {**reply, "worker": reply["worker"] or self.name}


def _named(name: str, role: str) -> str:
    return name if role == "target" else f"{role}:{name}"


def _placed(placed: Placed, role: str) -> Placed:
    copy = placed.copy
    return evolve(placed, copy=evolve(copy, destination_name=_named(copy.destination_name, role)))
