"""NCCL communicators of SGLang's groups: ended before a capture, made again after it.

A communicator has connections and memory of its own on every device, which no process image has. Each group of ranks
has two: torch's, in its device group, and SGLang's own beside it.

The one rule: all ranks go through the groups in one order, since ending and beginning are collective; and what a group
was made with is what it is made with again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from attrs import field, frozen

__all__ = ["Communicators", "Transport"]


class Transport(Protocol):
    """What torch does about process groups."""

    def synchronize(self) -> None:
        """Wait for the device."""

    def destroy(self, group: Any) -> None:
        """End a process group."""

    def make(self, ranks: Sequence[int]) -> Any:
        """Make a process group on devices."""


@frozen
class _Ended:
    group: Any
    own: bool
    disabled: bool


@frozen(kw_only=True)
class Communicators:
    """The communicators of one process.

    Attributes:
        groups: Returns SGLang's group coordinators, in the order in which they were made.
        transport: What torch does.
    """

    groups: Callable[[], Iterable[Any]]
    transport: Transport
    _ended: list[_Ended] = field(factory=list, init=False)

    def prepare(self) -> None:
        """End every communicator of a group of several ranks; ended ones are left alone."""
        if self._ended:
            return
        groups = [group for group in self.groups() if len(group.ranks) > 1]
        if groups:
            self.transport.synchronize()
        for group in groups:
            own = group.pynccl_comm
            has_own = own is not None and bool(own.available)
            self._ended.append(_Ended(group, has_own, bool(own.disabled) if has_own else True))
            if has_own:
                own.nccl.ncclCommDestroy(own.comm)
            self.transport.destroy(group.device_group)

    def restore(self) -> None:
        """Make them again, with new identifiers that the ranks agree on over their CPU groups."""
        for one in self._ended:
            one.group.device_group = self.transport.make(one.group.ranks)
            if one.own:
                own = one.group.pynccl_comm
                own.__init__(group=own.group, device=own.device)
                own.disabled = one.disabled
        self._ended.clear()
