"""Volatile files: what the tree keeps in /dev/shm, carried in the capsule because CRIU opens it by path.

The one rule: nothing foreign is ever overwritten or followed. Every file is made with ``O_EXCL`` below a directory
descriptor, and no component of a path may be a symbolic link.
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from coldsnap.artifact.private import require_private
from coldsnap.drivers.volatile_index import BLOB, INDEX, Kind, VolatileEntry, VolatileFiles, encode_index
from coldsnap.errors import DriverError, FormatError

__all__ = ["ROOT", "put_back", "remove_volatile", "save_volatile"]

ROOT = "/dev/shm"  # noqa: S108  (the kernel's place for POSIX shared memory, not a temporary file)
COPY_BYTES = 1 << 30


@contextmanager
def _opened(path: str, flags: int, dir_fd: int, mode: int = 0o600) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _parent(root_fd: int, path: str) -> Iterator[tuple[int, str]]:
    """Open the directory above a path, component by component; a symbolic link on the way is refused (ELOOP)."""
    *above, name = path.strip("/").split("/")
    fd = os.dup(root_fd)
    try:
        for component in above:
            deeper = os.open(component, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            os.close(fd)
            fd = deeper
        yield fd, name
    finally:
        os.close(fd)


def _data_extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
    at = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole is left
                return
            raise
        at = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, at - start


def _copy(source: int, target: int, offset: int, count: int) -> None:
    # sendfile(2) between files stays in the kernel, and unlike copy_file_range(2) crosses filesystems.
    while count:
        sent = os.sendfile(target, source, offset, min(count, COPY_BYTES))
        if sent == 0:
            raise DriverError(f"a volatile file shrank while it was copied, {count} bytes short", command="volatile")
        offset += sent
        count -= sent


class _Saver:
    """Walks what is to be saved and appends to the blob."""

    def __init__(self, blob_fd: int, skip: frozenset[str]) -> None:
        self._blob, self._skip = blob_fd, skip
        self._taken: set[str] = set()
        self._names: dict[tuple[int, int], str] = {}
        self.entries: list[VolatileEntry] = []

    def take_above(self, root_fd: int, path: str) -> None:
        """Save the directories between ``ROOT`` and a path, without what else they hold."""
        above = posixpath.dirname(path)
        if not above.startswith(f"{ROOT}/"):
            return
        self.take_above(root_fd, above)
        with _parent(root_fd, above) as (parent, name):
            self._add("dir", above, os.stat(name, dir_fd=parent, follow_symlinks=False))

    def _add(self, kind: Kind, path: str, info: os.stat_result, **more: Any) -> None:
        if path not in self._taken:
            self._taken.add(path)
            mode = stat.S_IMODE(info.st_mode)
            entry = VolatileEntry(path=path, kind=kind, mode=mode, uid=info.st_uid, gid=info.st_gid, **more)
            self.entries.append(entry)

    def take(self, dir_fd: int, name: str, path: str) -> None:
        """Save one name, and what is below it."""
        if path in self._skip or path in self._taken:
            return
        info = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        if stat.S_ISDIR(info.st_mode):
            self._add("dir", path, info)
            self.take_below(dir_fd, name, path)
        elif stat.S_ISLNK(info.st_mode):
            self._add("symlink", path, info, target=os.readlink(name, dir_fd=dir_fd))
        elif stat.S_ISREG(info.st_mode):
            self._take_file(dir_fd, name, path, info)
        # Sockets and fifos are left: CRIU makes them again itself.

    def _take_file(self, dir_fd: int, name: str, path: str, info: os.stat_result) -> None:
        # A semaphore has its own name and the one CRIU gave it: one file, or who opens it later gets another one.
        first = self._names.setdefault((info.st_dev, info.st_ino), path)
        if first != path:
            self._add("hardlink", path, info, target=first)
            return
        with _opened(name, os.O_RDONLY, dir_fd) as fd:
            size = os.fstat(fd).st_size
            extents = tuple(_data_extents(fd, size))
            for offset, length in extents:
                _copy(fd, self._blob, offset, length)
        self._add("file", path, info, size_bytes=size, extents=extents)

    def take_below(self, dir_fd: int, name: str, path: str) -> None:
        """Save what a directory holds."""
        with _opened(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd) as fd:
            for below in sorted(os.listdir(fd)):
                self.take(fd, below, f"{path}/{below}")


def put_back(files: VolatileFiles, root_fd: int, capsule_fd: int) -> None:
    """Make every entry again; when one cannot be made, those made before are removed.

    Args:
        files: The capsule's index.
        root_fd: The tree's ``/``.
        capsule_fd: The directory with the blob.

    Raises:
        DriverError: A name is taken, or the memory is full.
        FormatError: The blob is not as long as its index says.
    """
    made: list[VolatileEntry] = []
    with _opened(BLOB, os.O_RDONLY, capsule_fd) as blob:
        require_private(os.fstat(blob), BLOB, "file")
        if (found := os.fstat(blob).st_size) != files.data_bytes:
            sentence = f"it holds {found} bytes, the index speaks of {files.data_bytes}"
            raise FormatError(sentence, path=BLOB, rule="volatile.4")
        try:
            _make_all(files, root_fd, blob, made)
        except BaseException:
            remove_volatile(root_fd, made)
            raise


def _make_all(files: VolatileFiles, root_fd: int, blob: int, made: list[VolatileEntry]) -> None:
    at = 0
    for entry in files.entries:
        try:
            if _make(root_fd, entry, blob, at):
                made.append(entry)
        except OSError as error:
            raise DriverError(
                f"{entry.path} cannot be put back: {error.strerror}; it must not exist before a restore, and its "
                f"filesystem needs {files.data_bytes} free bytes",
                command="put back volatile files",
            ) from error
        at += entry.data_bytes


def _make(root_fd: int, entry: VolatileEntry, blob: int, at: int) -> bool:
    """Make one entry and say whether it is new: a directory may be there already."""
    with _parent(root_fd, entry.path) as (parent, name):
        match entry.kind:
            case "dir":
                return _make_directory(parent, name, entry)
            case "symlink":
                os.symlink(entry.target, name, dir_fd=parent)
                os.chown(name, entry.uid, entry.gid, dir_fd=parent, follow_symlinks=False)
            case "hardlink":
                with _parent(root_fd, entry.target) as (first_parent, first):
                    os.link(first, name, src_dir_fd=first_parent, dst_dir_fd=parent, follow_symlinks=False)
            case "file":
                with _opened(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, parent) as fd:
                    try:
                        _fill(fd, entry, blob, at)
                    except OSError:
                        os.unlink(name, dir_fd=parent)
                        raise
    return True


def _make_directory(parent: int, name: str, entry: VolatileEntry) -> bool:
    try:
        os.mkdir(name, dir_fd=parent)
    except FileExistsError:
        if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise
        return False
    os.chown(name, entry.uid, entry.gid, dir_fd=parent, follow_symlinks=False)
    with _opened(name, os.O_RDONLY | os.O_DIRECTORY, parent) as fd:
        os.fchmod(fd, entry.mode)
    return True


def _fill(fd: int, entry: VolatileEntry, blob: int, at: int) -> None:
    os.ftruncate(fd, entry.size_bytes)
    for offset, length in entry.extents:
        os.lseek(fd, offset, os.SEEK_SET)
        _copy(blob, fd, at, length)
        at += length
    os.fchown(fd, entry.uid, entry.gid)
    os.fchmod(fd, entry.mode)


def remove_volatile(root_fd: int, entries: Iterable[VolatileEntry]) -> None:
    """Remove what was put back, last first; what is gone or in use by others is left.

    Args:
        root_fd: The tree's ``/``.
        entries: As they were made.
    """
    for entry in reversed(list(entries)):
        try:
            with _parent(root_fd, entry.path) as (parent, name):
                (os.rmdir if entry.kind == "dir" else os.unlink)(name, dir_fd=parent)
        except OSError:
            continue  # cleanup goes on: a file that is gone, or a directory that others use, is no reason to stop


def save_volatile(root_fd: int, capsule_fd: int, paths: Iterable[str], *, skip: Iterable[str] = ()) -> VolatileFiles:
    """Copy volatile files into a capsule. The tree must stand still.

    Args:
        root_fd: The tree's ``/``.
        capsule_fd: The capsule's directory; ``volatile.json`` and ``volatile.blob`` must not exist.
        paths: Absolute paths as the tree sees them. ``ROOT`` itself stands for everything in it; for others, the
            directories between ``ROOT`` and them are saved too.
        skip: Paths left out, with what is below them.

    Returns:
        What was saved.
    """
    with _opened(BLOB, os.O_WRONLY | os.O_CREAT | os.O_EXCL, capsule_fd) as blob:
        saver = _Saver(blob, frozenset(skip))
        for path in sorted(set(paths)):
            with _parent(root_fd, path) as (parent, name):
                if path == ROOT:
                    saver.take_below(parent, name, path)
                    continue
                saver.take_above(root_fd, path)
                saver.take(parent, name, path)
    saved = VolatileFiles(entries=tuple(saver.entries))
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(INDEX, flags, 0o600, dir_fd=capsule_fd), "wb") as index:
        index.write(encode_index(saved))
    return saved
