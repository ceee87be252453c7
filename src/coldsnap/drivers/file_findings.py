"""What is wrong with descriptors and mapped files: devices, terminals, unlinked, written and watched files, pipes.

The one rule: a file is judged by what the kernel says of the open descriptor, not by looking its path up again, which
may lead elsewhere by now.
"""

from __future__ import annotations

import os
import re
import select
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

from coldsnap.drivers.criu import GHOST_LIMIT_BYTES
from coldsnap.drivers.findings import Finding
from coldsnap.drivers.handles import can_be_found
from coldsnap.drivers.subject import Subject
from coldsnap.drivers.volatile import ROOT

__all__ = ["file_findings", "file_sizes", "growing", "pipe_findings"]

DELETED = " (deleted)"
IN_MEMORY = (f"{ROOT}/", "/memfd:", "/SYSV", "/dmabuf:", "/dev/zero", "/anon_hugepage", "/[aio]")
"""What looks like a path and is memory, or travels with the volatile files."""

_MEMORY_DEVICES = 1  # major number of null, zero, full, random and urandom
_NVIDIA = "/dev/nvidia"
_TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/ptmx", "/dev/console")
_KNOWN = frozenset(
    f"anon_inode:{name}"
    for name in ("[eventfd]", "[eventpoll]", "[signalfd]", "[timerfd]", "inotify", "[fanotify]", "[pidfd]")
)
_NAMED = {
    "anon_inode:[io_uring]": ("io-uring", "an io_uring ring"),
    "anon_inode:[userfaultfd]": ("userfaultfd", "a userfaultfd"),
}
_WATCH = re.compile(
    r"inotify wd:\w+ ino:\w+ sdev:(\w+) .*fhandle-bytes:(\w+) fhandle-type:(\w+) f_handle:(\w*)", re.ASCII
)


def file_findings(subject: Subject, pids: Sequence[int], own: Sequence[str]) -> Iterator[Finding]:
    """Yield what is wrong with the files of one process.

    Args:
        subject: The process.
        pids: Every process of the tree.
        own: Directories of the tree's own, whose files travel with it.
    """
    for fd, link in subject.links.items():
        if link.startswith(_TERMINALS):
            yield subject.finding("terminal", fd=fd, path=link)
        elif link.startswith(("anon_inode:", "pidfd:")):
            yield from _anonymous(subject, fd, link, pids)
        elif link.startswith("/memfd:"):
            yield from _pooled(subject, fd, link)
        elif link.startswith("/") and not link.startswith(("/SYSV", "/dmabuf:", _NVIDIA)):
            yield from _opened(subject, fd, link, own)
    yield from _mapped(subject, own)


def _anonymous(subject: Subject, fd: int, link: str, pids: Sequence[int]) -> Iterator[Finding]:
    if link in _NAMED:
        kind, what = _NAMED[link]
        yield subject.finding(kind, what, fd=fd)
    elif "pidfd" in link:
        match = re.search(r"^Pid:\s*(-?\d+)", subject.descriptor_info(fd), re.MULTILINE)
        if match is not None and int(match[1]) not in (-1, *pids):  # -1: a process that has ended, which CRIU can do
            yield subject.finding("pidfd", f"a pidfd of process {match[1]}, outside the tree", fd=fd)
    elif link not in _KNOWN:
        yield subject.finding("anonymous-file", f"an anonymous file that CRIU does not know, {link}", fd=fd)
    elif link == "anon_inode:inotify":
        for sdev, size, kind, handle in _WATCH.findall(subject.descriptor_info(fd)):
            if not _watchable(subject, int(sdev, 16), int(kind, 16), bytes.fromhex(handle)[: int(size, 16)]):
                yield subject.finding("inotify", "a watch (inotify) of a file that has no usable handle", fd=fd)
                break


def _watchable(subject: Subject, device: int, kind: int, handle: bytes) -> bool:
    """Open a watched file as CRIU does, by its handle below any mount of its device."""
    for line in subject.read("mountinfo").splitlines():
        fields = line.split()
        major, _, minor = fields[2].partition(":")
        if int(major) << 20 | int(minor) == device:
            return can_be_found(subject.path(f"root{fields[4]}"), kind, handle)
    return False


@cache
def _memory_mount() -> str:
    """Return the number of the kernel's own mount of anonymous shared memory: the same for every process."""
    fd = os.memfd_create("probe")
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as info:
            return _mount_number(info.read())
    finally:
        os.close(fd)


def _mount_number(info: str) -> str:
    match = re.search(r"^mnt_id:\s*(\d+)", info, re.MULTILINE)
    return match[1] if match else ""


def _pooled(subject: Subject, fd: int, link: str) -> Iterator[Finding]:
    if _mount_number(subject.descriptor_info(fd)) not in ("", _memory_mount()):
        yield subject.finding("hugetlb", f"{link}: memory in huge pages of the reserved pool", fd=fd, path=link)


def _opened(subject: Subject, fd: int, link: str, own: Sequence[str]) -> Iterator[Finding]:
    info = subject.stat(f"fd/{fd}")
    if info is None:
        return
    told = subject.descriptor_info(fd)
    if stat.S_ISBLK(info.st_mode) or (stat.S_ISCHR(info.st_mode) and os.major(info.st_rdev) != _MEMORY_DEVICES):
        yield subject.finding("device", f"the device {link}", fd=fd, path=link)
    mounts = {mount.number for mount in subject.mounts}
    if mounts and _mount_number(told) not in {"", *mounts}:
        what = f"a file opened outside the tree's mount namespace, {link}"
        yield subject.finding("outside-file", what, fd=fd, path=link)
    if re.search(r"^lock:", told, re.MULTILINE):
        yield subject.finding("lock", f"a lock on {link}", fd=fd, path=link)
    if stat.S_ISREG(info.st_mode):
        yield from _unlinked(subject, info, link, fd)
        if info.st_nlink and not link.startswith((*IN_MEMORY, *own)):
            yield from _regular(subject, fd, link)


def _unlinked(subject: Subject, info: os.stat_result, link: str, fd: int | None) -> Iterator[Finding]:
    if info.st_nlink == 0 and info.st_size > GHOST_LIMIT_BYTES:
        what = f"an unlinked file of {info.st_size} bytes, {link}, above the limit of {GHOST_LIMIT_BYTES}"
        yield subject.finding("huge-unlinked", what, fd=fd, path=link)
    elif info.st_nlink == 0 and not link.startswith(IN_MEMORY):
        yield subject.finding("deleted-file", f"an unlinked file of {info.st_size} bytes, {link}", fd=fd, path=link)


def _regular(subject: Subject, fd: int, link: str) -> Iterator[Finding]:
    if (subject.flags(fd) or 0) & os.O_ACCMODE != os.O_RDONLY:
        yield subject.finding("written-file", f"{link}, open for writing", fd=fd, path=link)
    if (mount := _in_memory(subject, link)) is not None:
        yield subject.finding("memory-mount", f"{link}, on a {mount} in memory", fd=fd, path=link)


def _in_memory(subject: Subject, path: str) -> str | None:
    """Return the kind of the filesystem in memory below which a path lies."""
    above = [mount for mount in subject.mounts if path.startswith(f"{mount.path.rstrip('/')}/")]
    nearest = max(above, key=lambda mount: len(mount.path), default=None)
    return nearest.type if nearest is not None and nearest.type in ("tmpfs", "ramfs") else None


def _mapped(subject: Subject, own: Sequence[str]) -> Iterator[Finding]:
    told = set(subject.links.values())
    memory = any(mount.type in ("tmpfs", "ramfs") for mount in subject.mounts)
    for mapping in subject.mapped:
        path = mapping.path
        if path in told or not path.startswith("/") or path.startswith((*IN_MEMORY, *own, "/dev/")):
            continue
        told.add(path)
        if path.endswith(DELETED):
            info = subject.stat(f"map_files/{mapping.addresses}")
            if info is not None and stat.S_ISREG(info.st_mode):
                yield from _unlinked(subject, info, f"{path}, mapped", None)
        elif memory and (kind := _in_memory(subject, path)) is not None:
            yield subject.finding("memory-mount", f"{path}, mapped, on a {kind} in memory", path=path)


def file_sizes(subjects: Iterable[Subject]) -> Mapping[tuple[Subject, int], int]:
    """Return the sizes of the files that are open for writing, to compare with :func:`growing` a moment later."""
    sizes = {}
    for subject in subjects:
        for fd, link in subject.links.items():
            if link.startswith("/") and not link.startswith(IN_MEMORY) and (subject.flags(fd) or 0) & os.O_ACCMODE:
                info = subject.stat(f"fd/{fd}")
                if info is not None and stat.S_ISREG(info.st_mode):
                    sizes[subject, fd] = info.st_size
    return sizes


def growing(sizes: Mapping[tuple[Subject, int], int], own: Sequence[str]) -> Iterator[Finding]:
    """Yield the files that have grown since their sizes were taken."""
    for (subject, fd), size in sizes.items():
        info, link = subject.stat(f"fd/{fd}"), subject.links[fd]
        if info is not None and info.st_size > size and not link.startswith(tuple(own)):
            what = f"{link}, which grew by {info.st_size - size} bytes while we looked"
            yield subject.finding("growing-file", what, fd=fd, path=link)


def pipe_findings(subjects: Iterable[Subject]) -> Iterator[Finding]:
    """Yield the pipes of which the tree holds one end and somebody else the other."""
    ends: dict[str, dict[bool, tuple[Subject, int]]] = {}
    for subject in subjects:
        for fd, link in subject.links.items():
            if link.startswith("pipe:") and (flags := subject.flags(fd)) is not None:
                mode = flags & os.O_ACCMODE
                for writes in {os.O_RDONLY: (False,), os.O_WRONLY: (True,)}.get(mode, (False, True)):
                    ends.setdefault(link, {}).setdefault(writes, (subject, fd))
    for link, found in ends.items():
        if len(found) == 1:
            ((writes, (subject, fd)),) = found.items()
            if _other_end_is_open(subject.path(f"fd/{fd}"), writes=writes):
                yield subject.finding("pipe", f"{link}, whose other end is outside the tree", fd=fd)


def _other_end_is_open(path: str, *, writes: bool) -> bool:
    """Ask a second descriptor of the end that the tree has: without readers it is in error, without writers hung up."""
    try:
        fd = os.open(path, (os.O_WRONLY if writes else os.O_RDONLY) | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False  # gone in the meantime
    try:
        poll = select.poll()
        poll.register(fd, 0)  # both are always told
        return not any(event & (select.POLLERR if writes else select.POLLHUP) for _, event in poll.poll(0))
    finally:
        os.close(fd)
