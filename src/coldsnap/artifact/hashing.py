"""SHA-256 of files at the speed of the processor.

The one rule: the bytes are hashed where the page cache holds them, without a copy, and no failure of the medium or of
another process can turn into a fatal signal. A copy costs 15 % of the time on one core, and more on two, where both
share the memory.

A mapping is dangerous in two ways, and both are closed here: a bad sector would raise SIGBUS, so that every window is
populated with MADV_POPULATE_READ first, which reports the failure as an errno instead; and a truncation by someone
else would raise it too, so that a read lease is held, which makes the kernel stop whoever opens the file for writing
until the window is done (fcntl(2)). Where either is refused, plain reads do the same work.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

from attrs import frozen

from coldsnap.artifact.lanes import Lanes, sha256_streams

__all__ = ["WINDOW_BYTES", "pieces_of", "sha256_fd", "sha256_spans"]

WINDOW_BYTES = 16 << 20
_SMALL_BYTES = 1 << 20
_READ_BYTES = 256 << 10
_MADV_POPULATE_READ = 22
_Pieces: TypeAlias = Callable[[int, int], Iterator[memoryview]]


def sha256_fd(fd: int, size_bytes: int) -> str:
    """Return ``sha256:<hex>`` of the first ``size_bytes`` of a file.

    Raises:
        OSError: The file is shorter, the medium failed, or another process began to write the file.
    """
    return sha256_spans(fd, size_bytes, [(0, size_bytes)])[0]


def sha256_spans(
    fd: int,
    size_bytes: int,
    spans: Sequence[tuple[int, int]],
    *,
    threads: int | None = 1,
    lanes: Lanes | None = None,
) -> list[str]:
    """Return ``sha256:<hex>`` of each span ``(offset, size)`` of a file of ``size_bytes``.

    Args:
        fd: Open for reading only (a lease wants that).
        size_bytes: The size of the file.
        spans: Inside the file.
        threads: None: all cores.
        lanes: Who hashes several spans at once on each core; None: hashlib, one.
    """
    with pieces_of(fd, size_bytes) as pieces:
        # Starting threads costs more than a small file.
        count = threads if size_bytes >= _SMALL_BYTES else 1
        streams = [_Span(offset=offset, size=size, of=pieces) for offset, size in spans]
        return sha256_streams(streams, threads=count, lanes=lanes)


@frozen(kw_only=True)
class _Span:
    offset: int
    size: int
    of: _Pieces

    def pieces(self) -> Iterator[memoryview]:
        return self.of(self.offset, self.size)


@contextlib.contextmanager
def pieces_of(fd: int, size_bytes: int) -> Iterator[_Pieces]:
    """Reach the bytes of a file: by a mapping where it is safe, else by plain reads.

    Yields:
        What gives the bytes of a span ``(offset, size)`` in pieces; a piece is valid until the next one is asked for.
    """
    if size_bytes < _SMALL_BYTES or not _lease(fd):
        yield partial(_read_pieces, fd)
        return
    try:
        pages = _populated(fd, size_bytes)
        if pages is None:
            yield partial(_read_pieces, fd)
            return
        with pages:
            yield partial(_mapped_pieces, fd, pages)
    finally:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def _lease(fd: int) -> bool:
    try:
        # The signal that asks for the lease back would end the process by default; SIGURG is ignored by default.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        return False  # a writer has it open, or the filesystem (NFS) has no leases
    return True


def _populated(fd: int, size_bytes: int) -> mmap.mmap | None:
    try:
        pages = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)
    except ValueError as error:
        raise OSError("the file became shorter before it was read") from error
    with contextlib.suppress(OSError):  # a kernel without them
        # What is not in the page cache is read into huge pages there, of which 512 pages are mapped at once.
        pages.madvise(mmap.MADV_HUGEPAGE)
    try:
        pages.madvise(_MADV_POPULATE_READ, 0, mmap.PAGESIZE)
    except OSError as error:
        pages.close()
        if error.errno != errno.EINVAL:
            raise
        return None  # Linux before 5.14
    return pages


def _mapped_pieces(fd: int, pages: mmap.mmap, offset: int, size: int) -> Iterator[memoryview]:
    end = offset + size
    with memoryview(pages) as whole:
        while offset < end:
            if fcntl.fcntl(fd, fcntl.F_GETLEASE) != fcntl.F_RDLCK:
                raise OSError("another process opened the file for writing while it was read")
            until = min(offset + WINDOW_BYTES, end)
            begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
            pages.madvise(_MADV_POPULATE_READ, begin, until - begin)
            with whole[offset:until] as piece:
                yield piece
            offset = until


def _read_pieces(fd: int, offset: int, size: int) -> Iterator[memoryview]:
    # A mapping of its own: freed blocks of the heap keep what they held, and weights that a rank reads here must not be
    # in its process image later.
    buffer = mmap.mmap(-1, min(_READ_BYTES, max(size, 1)))
    try:
        with memoryview(buffer) as whole:
            while size:
                count = os.preadv(fd, [whole[:size]], offset)
                if not count:
                    raise OSError("the file became shorter while it was read")
                with whole[:count] as piece:
                    yield piece
                offset, size = offset + count, size - count
    finally:
        buffer.madvise(mmap.MADV_DONTNEED)  # at once, even if a traceback still holds a view and keeps the mapping
        with contextlib.suppress(BufferError):
            buffer.close()
