"""CUDA graphs of a scheduler: destroyed before its memory goes, captured again when it is back.

A graph has the addresses of NCCL's communicators in it, which do not survive; a server of one worker has none, and
keeps its graphs, because the memory saver keeps every address.

The one rule: what cannot be captured again is not destroyed; who has such graphs is refused before anything happens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from attrs import field, frozen

from coldsnap.errors import UnsupportedError

__all__ = ["Device", "Graphs"]

_DECODE, _PREFILL = "decode_cuda_graph_runner", "prefill_cuda_graph_runner"


class Device(Protocol):
    """What has to be told to torch and SGLang around it."""

    def synchronize(self) -> None:
        """Wait for the device."""

    def forget_pool(self) -> None:
        """Forget the memory pool that all graphs of the process share."""

    def collect(self) -> None:
        """Free what nobody refers to any more."""


@frozen
class _Captured:
    runner: Any
    phases: tuple[str, ...]


@frozen(kw_only=True)
class Graphs:
    """The graphs of one process.

    Attributes:
        runners: Returns SGLang's model runners by role.
        workers: How many schedulers the server has.
        device: The device.
    """

    runners: Callable[[], Mapping[str, Any]]
    workers: Callable[[], int]
    device: Device
    _discarded: list[_Captured] = field(factory=list, init=False)

    def require_replaceable(self) -> None:
        """Demand that every graph that would be destroyed can be captured again.

        Raises:
            UnsupportedError: A draft model has graphs, which its worker captures only at its start.
        """
        if self.workers() == 1:
            return
        drafts = [role for role, runner in self.runners().items() if role != "target" and _phases(runner)]
        if drafts:
            raise UnsupportedError(
                f"the graphs of {', '.join(drafts)} cannot be captured again in a server of {self.workers()} workers",
                field="graphs.policy",
                works="--disable-cuda-graph, or one worker",
            )

    def discard(self) -> None:
        """Destroy the graphs, unless there is one worker."""
        if self.workers() == 1:
            return
        captured = [_Captured(one, found) for one in self.runners().values() if (found := _phases(one))]
        if not captured:
            return
        self.device.synchronize()
        for one in captured:
            for phase in one.phases:
                _destroy(getattr(one.runner, phase).backend)
                setattr(one.runner, phase, None)
        self.device.synchronize()
        self.device.forget_pool()
        self.device.collect()
        self._discarded.extend(captured)

    def capture(self) -> None:
        """Capture again what was destroyed; every rank of the server at once, since a capture is collective."""
        for one in self._discarded:
            if _DECODE in one.phases:
                one.runner.init_decode_cuda_graph()
            if _PREFILL in one.phases:
                one.runner.init_prefill_cuda_graph()
        self._discarded.clear()


def _phases(runner: Any) -> tuple[str, ...]:
    """Return the attributes of a runner that hold graphs; the eager runner stands there where there are none."""
    eager = getattr(runner, "eager_runner", None)
    found = ((name, getattr(runner, name, None)) for name in (_DECODE, _PREFILL))
    return tuple(name for name, one in found if one is not None and one is not eager and _graphs(one))


def _graphs(graph_runner: Any) -> Collection[Any]:
    return getattr(getattr(graph_runner, "backend", None), "_graphs", None) or ()


def _destroy(backend: Any) -> None:
    for graph in list(backend._graphs.values()):  # noqa: SLF001  0.5.17 leaves this to the garbage collector
        graph.reset()
    backend.cleanup()
