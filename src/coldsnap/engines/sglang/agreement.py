"""What the tensor-parallel ranks of a server tell each other while they change hands of memory.

A rank that fails must not leave the others waiting in a collective, and none may answer for a group that is half way.
So each says before every step that it got there, and what it failed at, to all.

The one rule: whoever failed says so exactly once and is out; whoever hears of a failure is out, too. So all ranks
exchange the same number of times, whatever happens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import frozen

from coldsnap.errors import EngineError

__all__ = ["Agreement", "Exchange", "over_group"]

Exchange = Callable[[Any], list[Any]]
"""Tells every rank one value, and returns those of all, in their order."""


@frozen
class _Said:
    stage: str
    error: str
    detail: object = None


class Agreement:
    """One transition, seen from one rank.

    Args:
        exchange: How ranks talk.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._out = False

    def reached(self, stage: str, detail: object = None) -> None:
        """Say that this rank got to a stage, and wait until all have.

        Args:
            stage: Its name.
            detail: What must be the same in every rank.

        Raises:
            EngineError: A rank failed before it, or is somewhere else.
        """
        self._hear(_Said(stage, "", detail))

    def failed(self, error: BaseException) -> None:
        """Tell the others that this rank failed; nothing, if they know or failed themselves."""
        if not self._out:
            self._out = True
            self._exchange(_Said("", f"{type(error).__name__}: {error}"))

    def _hear(self, own: _Said) -> None:
        said = self._exchange(own)
        failures = [f"rank {rank}: {one.error}" for rank, one in enumerate(said) if one.error]
        if failures:
            self._out = True
            raise EngineError(
                f"another rank of the group failed, so that this one did not go on: {'; '.join(failures)}"
            )
        if any(one != own for one in said):
            self._out = True
            places = ", ".join(f"{one.stage} {one.detail or ''}".strip() for one in said)
            raise EngineError(f"the ranks of the group are not at the same point ({places}); nothing was done")


def over_group(group: Any) -> Exchange:
    """Return how the ranks of a torch process group talk: a CPU group, objects, in the thread that calls.

    Args:
        group: SGLang's ``tp_cpu_group``.
    """
    import torch.distributed as dist  # noqa: PLC0415  only the engine's environment has it

    size = dist.get_world_size(group=group)

    def exchange(value: Any) -> list[Any]:
        if size == 1:
            return [value]
        values: list[Any] = [None] * size
        dist.all_gather_object(values, value, group=group)
        return values

    return exchange
