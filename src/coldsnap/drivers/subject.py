"""One process under audit, read through a descriptor of ``/proc``.

The one rule: only look, and take a process or descriptor that has just gone for one that has nothing to tell. The
descriptor may be the tree's own ``/proc``, in another pid namespace; then pids are those of the tree.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import cached_property

from attrs import define, frozen

from coldsnap.drivers.base import Process
from coldsnap.drivers.findings import KINDS, Finding, Severity

__all__ = ["Mapped", "Mount", "Subject"]

GONE = (FileNotFoundError, ProcessLookupError)


@frozen
class Mapped:
    """A file in the memory of a process, one of its mappings.

    Attributes:
        addresses: First and last address, as ``/proc/<pid>/maps`` writes them.
        path: What it is, as written there.
        bytes: Its length.
        executable: Whether it holds code.
    """

    addresses: str
    path: str
    bytes: int
    executable: bool


@frozen
class Mount:
    """A mounted filesystem: its number, its path in the tree, its kind."""

    number: str
    path: str
    type: str


@define(slots=False, eq=False)
class Subject:
    """One process under audit."""

    process: Process
    proc_fd: int

    def path(self, name: str) -> str:
        """Return a path of a file of its ``/proc`` entry, good in this process."""
        return f"/proc/self/fd/{self.proc_fd}/{self.process.pid}/{name}"

    def read(self, name: str) -> str:
        """Read a file of its ``/proc`` entry; empty when it is gone."""
        try:
            fd = os.open(f"{self.process.pid}/{name}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.proc_fd)
            with os.fdopen(fd, encoding="utf-8", errors="replace") as file:
                return file.read()
        except GONE:
            return ""

    def list(self, name: str) -> list[str]:
        """List a directory of its ``/proc`` entry; empty when it is gone."""
        try:
            fd = os.open(f"{self.process.pid}/{name}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.proc_fd)
        except GONE:
            return []
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def link(self, name: str) -> str:
        """Read a link of its ``/proc`` entry; empty when it is gone."""
        try:
            return os.readlink(f"{self.process.pid}/{name}", dir_fd=self.proc_fd)
        except GONE:
            return ""

    def stat(self, name: str) -> os.stat_result | None:
        """Look at what a link of its ``/proc`` entry leads to; None when it is gone."""
        try:
            return os.stat(f"{self.process.pid}/{name}", dir_fd=self.proc_fd)
        except GONE:
            return None

    def finding(
        self,
        kind: str,
        what: str = "",
        *,
        fd: int | None = None,
        path: str = "",
        passing: bool = False,
        severity: Severity | None = None,
    ) -> Finding:
        """Name something that is wrong with this process."""
        row = KINDS[kind]
        return Finding(
            kind=kind,
            severity=severity or row.severity,
            pid=self.process.pid,
            comm=self.process.comm,
            fd=fd,
            path=path,
            what=what or row.found,
            why=row.why,
            remedy=row.remedy,
            passing=passing,
        )

    @cached_property
    def links(self) -> Mapping[int, str]:
        """What its descriptors are, as they were when first asked."""
        found = ((int(number), self.link(f"fd/{number}")) for number in self.list("fd"))
        return {number: link for number, link in found if link}

    @cached_property
    def status(self) -> Mapping[str, str]:
        """The lines of its status file."""
        pairs = (line.partition(":") for line in self.read("status").splitlines())
        return {name: value.strip() for name, _, value in pairs}

    @cached_property
    def session(self) -> int:
        """The session it belongs to."""
        fields = self.read("stat").rpartition(")")[2].split()  # a name may hold spaces and parentheses (proc(5))
        return int(fields[3]) if fields else 0

    @cached_property
    def environment_names(self) -> tuple[str, ...]:
        """The names of the environment it was started with; no value is kept."""
        return tuple(entry.partition("=")[0] for entry in self.read("environ").split("\0") if "=" in entry)

    @cached_property
    def mapped(self) -> tuple[Mapped, ...]:
        """Its mappings that have a name."""
        return tuple(self._mapped())

    def _mapped(self) -> Iterator[Mapped]:
        for line in self.read("maps").splitlines():
            fields = line.split(None, 5)
            if len(fields) == 6:
                first, _, last = fields[0].partition("-")
                size = int(last, 16) - int(first, 16)
                yield Mapped(fields[0], fields[5], size, "x" in fields[1])

    @cached_property
    def mounts(self) -> tuple[Mount, ...]:
        """The filesystems of its mount namespace."""
        lines = (line.split() for line in self.read("mountinfo").splitlines())
        return tuple(Mount(line[0], line[4], line[line.index("-") + 1]) for line in lines)

    def descriptor_info(self, fd: int) -> str:
        """Return what the kernel tells of a descriptor (proc_pid_fdinfo(5))."""
        return self.read(f"fdinfo/{fd}")

    def flags(self, fd: int) -> int | None:
        """Return the flags a descriptor was opened with; None when it is gone."""
        match = re.search(r"^flags:\s*([0-7]+)", self.descriptor_info(fd), re.MULTILINE)
        return int(match[1], 8) if match else None
