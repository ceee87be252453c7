"""Which ranks of an engine there have been, and which of them have died.

The one rule: a rank is known by the name of its control socket; it lives while the process that was first seen under
that name does. A name that is left over, or a pid that went to another process, is a death and never a life.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from coldsnap.keeper import layout

_NAME = re.compile(r"(?P<role>[a-z]+)\.(?P<pid>[1-9][0-9]*)\.sock")
# Fields of /proc/<pid>/stat behind the name, proc(5): state is the third of all, start time the 22nd, exit the 52nd.
_STATE, _START, _EXIT = 0, 19, 49


class Lost(NamedTuple):
    """A rank that died: ``exit`` is an exit code, or minus a signal, None when nobody can tell."""

    role: str
    pid: int
    exit: int | None


class Roster:
    """The ranks below one run directory.

    Args:
        tree_fd: The directory that holds ``control``, in the pid namespace that its names speak of.
    """

    def __init__(self, tree_fd: int) -> None:
        self._tree_fd = tree_fd
        self._born: dict[str, str] = {}

    def lost(self, ended: Mapping[int, int]) -> list[Lost]:
        """Return the ranks that have died, by role and pid.

        Args:
            ended: How processes that this one reaped have ended.
        """
        found = (_NAME.fullmatch(name) for name in self._names())
        ranks = sorted((match["role"], int(match["pid"]), match[0]) for match in found if match)
        return [Lost(role, pid, end) for role, pid, name in ranks for end in self._end(name, pid, ended)]

    def _names(self) -> list[str]:
        fd = os.open(layout.CONTROL, layout.DIRECTORY, dir_fd=self._tree_fd)
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def _end(self, name: str, pid: int, ended: Mapping[int, int]) -> list[int | None]:
        """Return nothing of a rank that lives, else how it ended."""
        try:
            with open(f"/proc/{pid}/stat", "rb") as stream:
                words = stream.read().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return [ended.get(pid)]
        if words[_STATE] in {b"Z", b"X"}:  # its parent does not look; to root the kernel tells how it ended
            return [os.waitstatus_to_exitcode(int(words[_EXIT]))]
        start = words[_START].decode()
        return [] if self._born.setdefault(name, start) == start else [ended.get(pid)]
