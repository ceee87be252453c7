"""What a driver needs from whoever owns the process tree.

The one rule: a driver starts no process by itself. CRIU and the CUDA helper must be children of the tree's keeper, in
the tree's namespaces, so that pids mean the same to everyone and a restored root has the keeper for its parent.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

__all__ = ["Process", "Spawner", "TreeKeeper", "end_process"]


class Process(Protocol):
    """One process of the tree, pids as the tree sees them."""

    @property
    def pid(self) -> int:
        """Its pid."""
        ...

    @property
    def ppid(self) -> int:
        """Its parent's."""
        ...

    @property
    def state(self) -> str:
        """The letter of ``/proc/<pid>/stat``: T is stopped, t traced, Z a zombie."""
        ...

    @property
    def comm(self) -> str:
        """Its name."""
        ...


class Spawner(Protocol):
    """Starts helpers, CRIU for one, beside the tree."""

    @property
    def proc_fd(self) -> int:
        """A directory descriptor of the tree's ``/proc``."""
        ...

    def spawn_helper(self, argv: Sequence[str], *, env: Mapping[str, str], name: str, fds: Mapping[int, int]) -> int:
        """Start a helper.

        Args:
            argv: Its command.
            env: Its whole environment.
            name: Names its log.
            fds: Descriptor number in the helper → descriptor here.

        Returns:
            Its pid, in the tree's pid namespace.
        """
        ...

    def wait_helper(self, pid: int, *, timeout_s: float) -> int:
        """Wait for a helper's end and return its exit status, negative for a signal.

        Raises:
            TimeoutError: It still runs.
        """
        ...


class TreeKeeper(Spawner, Protocol):
    """Owns a process tree: what ``coldsnap.keeper`` offers its drivers."""

    @property
    def root_fd(self) -> int:
        """A directory descriptor of the tree's ``/``."""
        ...

    @property
    def private(self) -> bool:
        """Whether the tree has pid, mount and ipc namespaces of its own."""
        ...

    @property
    def keeper_pid(self) -> int:
        """The keeper's pid on the host."""
        ...

    @property
    def guard_pid(self) -> int:
        """The pid of the keeper's guard, which inherits orphans where there is no pid namespace."""
        ...

    @property
    def work_dir(self) -> Path:
        """Where helpers leave their logs."""
        ...

    @property
    def rank_dir(self) -> Path:
        """The directory shared with the tree, which sees it as ``tree_dir``."""
        ...

    @property
    def tree_dir(self) -> str:
        """The run directory as the tree sees it; it belongs to no capsule."""
        ...

    @property
    def tmp_dir(self) -> str:
        """The tree's TMPDIR."""
        ...

    def tree(self) -> Sequence[Process]:
        """Return every process of the tree, the root first."""
        ...

    def adopt(self, pid: int) -> None:
        """Take a restored root, already a child of the keeper, as the engine."""
        ...

    def signal(self, number: int, *, whom: str) -> None:
        """Signal the ``root`` or the whole ``tree``."""
        ...


def end_process(proc_fd: int, pid: int) -> None:
    """Kill one process of the tree's pid namespace; one that is gone already is fine.

    Args:
        proc_fd: The tree's ``/proc``.
        pid: As the tree sees it.
    """
    try:
        directory = os.open(str(pid), os.O_DIRECTORY | os.O_RDONLY, dir_fd=proc_fd)
    except FileNotFoundError:
        return
    try:
        # A descriptor of /proc/<pid> serves as a pidfd (pidfd_send_signal(2)): the pid of another namespace is
        # reached without knowing its number in ours, and a reused pid cannot be hit.
        signal.pidfd_send_signal(directory, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(directory)
