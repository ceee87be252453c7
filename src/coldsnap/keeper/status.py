"""What a keeper says of its engine, as data.

The one rule: pids are those of the tree's own pid namespace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import frozen

from coldsnap.keeper.tree import describe

__all__ = ["Exit", "Interrupted", "LostRank", "Process", "Status", "read_status"]


@frozen(kw_only=True)
class Process:
    """One process of the tree, in the tree's pid namespace; ``state`` is the letter of ``/proc/<pid>/stat``."""

    pid: int
    ppid: int
    state: str
    comm: str


@frozen(kw_only=True)
class Exit:
    """How a process ended: one of the two is None."""

    code: int | None = None
    signal: int | None = None

    @classmethod
    def of(cls, end: int | None) -> Exit | None:
        """Read an exit code, or minus a signal."""
        if end is None:
            return None
        return cls(code=end) if end >= 0 else cls(signal=-end)

    def __str__(self) -> str:
        return describe(self.code if self.code is not None else -(self.signal or 0))


@frozen(kw_only=True)
class Interrupted:
    """An operation that was undone: why, and what was done, one sentence each."""

    operation: str
    why: str
    undone: tuple[str, ...]


@frozen(kw_only=True)
class LostRank:
    """A rank that died while the root of its engine runs on; ``exit`` is None when nobody saw how."""

    role: str
    pid: int
    exit: Exit | None

    def __str__(self) -> str:
        return f"its {self.role} (pid {self.pid}) has died{f' with {self.exit}' if self.exit else ''}"


@frozen(kw_only=True)
class Status:
    """What a keeper says of its engine.

    Attributes:
        state: ``empty`` before there is an engine, ``stopped`` when it is frozen.
        root_pid: In the tree's pid namespace.
        exit: How it ended.
        since_unix_ns: When it was started or restored.
        operation: What is in flight.
        interrupted: What was undone last.
        lost: Ranks that are dead although the root runs.
    """

    state: Literal["empty", "running", "stopped", "exited"]
    root_pid: int | None
    exit: Exit | None
    since_unix_ns: int | None
    operation: str | None
    interrupted: Interrupted | None
    lost: tuple[LostRank, ...] = ()

    @property
    def loss(self) -> str:
        """Say in a sentence which ranks are dead; empty while all live."""
        return "; ".join(map(str, self.lost))


def read_status(answer: Mapping[str, Any]) -> Status:
    """Read the answer to ``status``."""
    last = answer["interrupted"]
    return Status(
        state=answer["state"],
        root_pid=answer["root_pid"],
        exit=Exit.of(answer["exit"]),
        since_unix_ns=answer["since_unix_ns"],
        operation=answer["operation"],
        interrupted=last and Interrupted(operation=last["operation"], why=last["why"], undone=tuple(last["undone"])),
        # A keeper outlives the library that started it: one of an older version says nothing of its ranks.
        lost=tuple(LostRank(role=role, pid=pid, exit=Exit.of(end)) for role, pid, end in answer.get("lost", ())),
    )
