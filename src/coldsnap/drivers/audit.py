"""The audit before a dump: what in the tree CRIU cannot dump, found while everything still runs.

The one rule: it is a gate. A dump that is going to fail costs the engine a freeze, and CRIU's reason for it speaks of
inodes; so each obstacle is named here with process, descriptor and remedy, all at once, before anything is frozen.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

from attrs import define, field, frozen

from coldsnap.drivers.base import Process, TreeKeeper
from coldsnap.drivers.criu import GHOST_LIMIT_BYTES
from coldsnap.drivers.sockets import TcpSocket, read_tcp, read_unix
from coldsnap.errors import AdmissionError, DriverError

__all__ = ["Audit", "Obstacle", "audit_tree"]

_SOCKET = re.compile(r"socket:\[(\d+)\]")
_MEMORY_DEVICES = 1  # major number of null, zero, full, random and urandom
_NVIDIA = "/dev/nvidia"

PATIENCE_S = 2.0
"""How long a server may take to notice that a client has closed its connection, s."""

POLL_S = 0.02

_ANONYMOUS = {
    "anon_inode:[io_uring]": ("an io_uring ring", "start the engine under the keeper, which denies io_uring to it"),
    "anon_inode:[userfaultfd]": ("a userfaultfd", "switch off the feature that uses it"),
    "anon_inode:[perf_event]": ("a performance counter", "end the profiler"),
}
_TERMINAL = ("a terminal", "start the engine with stdin from /dev/null and output to a file")
_OUTSIDE = (
    "a file opened outside the tree's mount namespace",
    "start the engine under the keeper, which closes inherited descriptors",
)


@frozen(kw_only=True)
class Obstacle:
    """One thing that a dump would fail on.

    Attributes:
        pid: The process, in the tree's pid namespace.
        comm: Its name.
        fd: The descriptor; ``None`` when it is not about one.
        what: What was found.
        remedy: What to do about it.
        passing: Whether it may go by itself soon: a connection whose client has just gone.
    """

    pid: int
    comm: str
    fd: int | None
    what: str
    remedy: str
    passing: bool = False

    def __str__(self) -> str:
        """Say it in one line."""
        where = "" if self.fd is None else f", descriptor {self.fd}"
        return f"process {self.pid} ({self.comm}){where}: {self.what}; {self.remedy}"


@frozen(kw_only=True)
class Audit:
    """What was found.

    Attributes:
        pids: Every process of the tree, the root first.
        nvidia_pids: Those that hold the NVIDIA driver open, children before their parents.
        listeners: TCP sockets that accept connections.
        obstacles: Empty when a dump can be tried.
    """

    pids: tuple[int, ...]
    nvidia_pids: tuple[int, ...]
    listeners: tuple[TcpSocket, ...]
    obstacles: tuple[Obstacle, ...]

    def require(self) -> None:
        """Refuse to go on when there are obstacles.

        Raises:
            AdmissionError: Every obstacle.
        """
        if self.obstacles:
            raise AdmissionError(
                f"the process tree of {self.pids[0]} cannot be dumped; it was left running",
                [str(obstacle) for obstacle in self.obstacles],
            )


@define
class _Subject:
    """One process under audit."""

    process: Process
    proc_fd: int
    links: dict[int, str] = field(factory=dict)

    def read(self, name: str) -> str:
        """Read a file of its ``/proc`` entry; empty when the process is gone."""
        try:
            fd = os.open(f"{self.process.pid}/{name}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.proc_fd)
            with os.fdopen(fd, encoding="utf-8", errors="replace") as file:
                return file.read()
        except (FileNotFoundError, ProcessLookupError):
            return ""

    def list(self, name: str) -> list[str]:
        """List a directory of its ``/proc`` entry; empty when the process is gone."""
        try:
            fd = os.open(f"{self.process.pid}/{name}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.proc_fd)
        except (FileNotFoundError, ProcessLookupError):
            return []
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def read_links(self) -> None:
        """Learn what its descriptors are."""
        for number in self.list("fd"):
            try:
                self.links[int(number)] = os.readlink(f"{self.process.pid}/fd/{number}", dir_fd=self.proc_fd)
            except FileNotFoundError:
                continue  # closed in the meantime

    def obstacle(self, fd: int | None, what: str, remedy: str, *, passing: bool = False) -> Obstacle:
        """Name an obstacle in this process."""
        process = self.process
        return Obstacle(pid=process.pid, comm=process.comm, fd=fd, what=what, remedy=remedy, passing=passing)

    @cached_property
    def status(self) -> Mapping[str, str]:
        """The lines of its status file."""
        pairs = (line.partition(":") for line in self.read("status").splitlines())
        return {name: value.strip() for name, _, value in pairs}


def _process_obstacles(subject: _Subject) -> Iterator[Obstacle]:
    tracer = subject.status.get("TracerPid", "0")
    if tracer != "0":
        yield subject.obstacle(None, f"it is traced by process {tracer}", "detach the debugger or profiler")
    for thread in subject.list("task"):
        if (name := subject.read(f"task/{thread}/comm").strip()).startswith("iou-"):
            what, remedy = _ANONYMOUS["anon_inode:[io_uring]"]
            yield subject.obstacle(None, f"{what} (thread {name})", remedy)
    mapped = {line.split(None, 5)[5].strip() for line in subject.read("maps").splitlines() if "anon_inode:" in line}
    for link in sorted(mapped - set(subject.links.values())):
        if link in _ANONYMOUS:
            yield subject.obstacle(None, f"{_ANONYMOUS[link][0]}, mapped", _ANONYMOUS[link][1])


def _descriptor_obstacles(subject: _Subject, mounts: frozenset[str]) -> Iterator[Obstacle]:
    for fd, link in subject.links.items():
        if link in _ANONYMOUS:
            yield subject.obstacle(fd, *_ANONYMOUS[link])
        elif link.startswith(("/dev/pts/", "/dev/tty", "/dev/ptmx", "/dev/console")):
            yield subject.obstacle(fd, *_TERMINAL)
        elif link.startswith("/") and not link.startswith(("/memfd:", "/SYSV", "/dmabuf:", _NVIDIA)):
            yield from _path_obstacles(subject, fd, link, mounts)


def _path_obstacles(subject: _Subject, fd: int, link: str, mounts: frozenset[str]) -> Iterator[Obstacle]:
    try:
        info = os.stat(f"{subject.process.pid}/fd/{fd}", dir_fd=subject.proc_fd)
    except FileNotFoundError:
        return  # closed in the meantime
    if stat.S_ISCHR(info.st_mode) and os.major(info.st_rdev) != _MEMORY_DEVICES:
        yield subject.obstacle(fd, f"the device {link}", "switch off the feature that opens it")
    elif stat.S_ISREG(info.st_mode) and info.st_nlink == 0 and info.st_size > GHOST_LIMIT_BYTES:
        limit = f"an unlinked file of {info.st_size} bytes, {link}, above the limit of {GHOST_LIMIT_BYTES}"
        yield subject.obstacle(fd, limit, "let the engine keep such data in memory")
    mount = re.search(r"^mnt_id:\s*(\d+)", subject.read(f"fdinfo/{fd}"), re.MULTILINE)
    if mounts and mount is not None and mount[1] not in mounts:
        yield subject.obstacle(fd, f"{_OUTSIDE[0]}, {link}", _OUTSIDE[1])


def _inodes(subjects: Iterable[_Subject]) -> dict[int, tuple[_Subject, int]]:
    found: dict[int, tuple[_Subject, int]] = {}
    for subject in subjects:
        for fd, link in subject.links.items():
            if (match := _SOCKET.fullmatch(link)) is not None:
                found.setdefault(int(match[1]), (subject, fd))
    return found


def _tcp_obstacles(ours: Mapping[int, tuple[_Subject, int]], sockets: Iterable[TcpSocket]) -> Iterator[Obstacle]:
    connections = [found for found in sockets if found.connected and found.inode in ours]
    ends = {found.ends for found in connections}
    for found in connections:
        (address, port), (peer, peer_port) = found.ends
        if ((peer, peer_port), (address, port)) not in ends:
            subject, fd = ours[found.inode]
            what = f"a TCP connection of {address}:{port} with {peer}:{peer_port}, outside the tree"
            remedy = "close it: let clients finish and drop kept-alive connections"
            yield subject.obstacle(fd, what, remedy, passing=True)


def _unix_obstacles(ours: Mapping[int, tuple[_Subject, int]]) -> Iterator[Obstacle]:
    sockets = {inode: found for inode, found in read_unix().items() if inode in ours}
    waiting = {inode for found in sockets.values() for inode in found.pending}
    remedy = "close it before the capture"
    for inode, found in sockets.items():
        subject, fd = ours[inode]
        # A peer of 0 waits to be accepted: by a listener of the tree, which knows it, or by one outside.
        inside = found.peer in ours or (found.peer == 0 and inode in waiting)
        if found.peer is not None and not inside:
            yield subject.obstacle(fd, "a Unix socket connected to one outside the tree", remedy, passing=True)
        if set(found.pending) - ours.keys():
            what = "a Unix socket on which a process outside the tree waits to be accepted"
            yield subject.obstacle(fd, what, "let it accept, or end the other process", passing=True)


def _children_first(subjects: Iterable[_Subject]) -> list[int]:
    parents = {subject.process.pid: subject.process.ppid for subject in subjects}

    def depth(pid: int) -> int:
        return 0 if pid not in parents else 1 + depth(parents[pid])

    return sorted(parents, key=lambda pid: (-depth(pid), pid))


def audit_tree(keeper: TreeKeeper) -> Audit:
    """Look at every process of a tree that runs; connections that are just closing get a moment to do so.

    Args:
        keeper: The tree's.

    Raises:
        DriverError: There is no tree, or it lives in a network namespace that cannot be seen from here.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        audit = _look(keeper)
        lasting = [obstacle for obstacle in audit.obstacles if not obstacle.passing]
        if lasting or not audit.obstacles or time.monotonic() > deadline:
            return audit
        time.sleep(POLL_S)


def _look(keeper: TreeKeeper) -> Audit:
    subjects = [_Subject(process, keeper.proc_fd) for process in keeper.tree() if process.state != "Z"]
    if not subjects:
        raise DriverError("there is no process to dump: the engine has ended", command="audit")
    root = subjects[0]
    if os.readlink(f"{root.process.pid}/ns/net", dir_fd=keeper.proc_fd) != os.readlink("/proc/self/ns/net"):
        raise DriverError(
            "the engine lives in another network namespace, where its connections cannot be seen: run this beside it",
            command="audit",
        )
    for subject in subjects:
        subject.read_links()
    mounts = frozenset(line.split()[0] for line in root.read("mountinfo").splitlines())
    sockets, ours = read_tcp(keeper.proc_fd, root.process.pid), _inodes(subjects)
    obstacles: list[Obstacle] = []
    for subject in subjects:
        obstacles += [*_process_obstacles(subject), *_descriptor_obstacles(subject, mounts)]
    obstacles += [*_tcp_obstacles(ours, sockets), *_unix_obstacles(ours)]
    holders = {subject.process.pid for subject in subjects if any(map(_is_nvidia, subject.links.values()))}
    return Audit(
        pids=tuple(subject.process.pid for subject in subjects),
        nvidia_pids=tuple(pid for pid in _children_first(subjects) if pid in holders),
        listeners=tuple(found for found in sockets if found.listening and found.inode in ours),
        obstacles=tuple(obstacles),
    )


def _is_nvidia(link: str) -> bool:
    return link.startswith(_NVIDIA)
