"""``model-weights.pack``: the model bytes of one worker, as one content-addressed file.

The one rule: the bytes of a pack are a function of the set of its extents. Order of allocation, addresses and names
cannot change one of them (rules pack.1 to pack.5, ``docs/format/pack.md``).
"""

from __future__ import annotations

import hashlib
import mmap
import os
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Protocol, Self

from attrs import frozen

from coldsnap.artifact.durable import StagedFile
from coldsnap.artifact.extents import PAGE_BYTES, padded
from coldsnap.artifact.hashing import sha256_spans
from coldsnap.artifact.lanes import Lanes, sha256_streams
from coldsnap.errors import FormatError, IntegrityError

__all__ = ["Bytes", "Pack", "PackEntry", "Source", "layout", "verify_extents", "write_pack"]

CHUNK_BYTES = 16 << 20
_FIRST_BYTES = 1 << 20
_CHUNKS = 3  # one being filled, one being hashed, one being written
_ZEROS = bytes(PAGE_BYTES)


class Source(Protocol):
    """Where the bytes of one extent come from; read twice, so that memory stays bounded."""

    @property
    def size(self) -> int:
        """Bytes."""

    def pieces(self) -> Iterator[memoryview]:
        """Yield all bytes in order; a piece is valid until the next one is asked for."""


@frozen
class Bytes:
    """Bytes that lie in memory already."""

    data: memoryview | bytes | bytearray

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.data)

    def pieces(self) -> Iterator[memoryview]:
        """Yield the one piece."""
        yield memoryview(self.data)


@frozen(kw_only=True)
class PackEntry:
    """One extent in a pack.

    Attributes:
        offset: First byte in the pack, a multiple of 4096.
        size: Bytes.
        sha256: ``sha256:<hex>`` of its bytes.
        crc32: CRC-32 of its bytes, for checks on the way to a device.
    """

    offset: int
    size: int
    sha256: str
    crc32: int


@frozen(kw_only=True)
class Pack:
    """What :func:`write_pack` wrote.

    Attributes:
        sha256: Identity.
        bytes: Size of the file.
        entries: One for each source, in the order of the sources.
    """

    sha256: str
    bytes: int
    entries: tuple[PackEntry, ...]


def layout(extents: Sequence[tuple[str, int]]) -> tuple[list[int], list[int], int]:
    """Lay out extents ``(sha256, size)``.

    Returns:
        The order (indices into ``extents``), the offset of each extent (by its index), and the size of the file.
    """
    order = sorted(range(len(extents)), key=lambda index: extents[index])
    offsets = [0] * len(extents)
    position = 0
    for index in order:
        offsets[index] = position
        position = padded(position + extents[index][1])
    return order, offsets, position


def write_pack(
    staged: StagedFile,
    sources: Sequence[Source],
    *,
    digests: Sequence[str] | None = None,
    threads: int | None = None,
    lanes: Lanes | None = None,
) -> Pack:
    """Write a pack into a staged file; the caller publishes it under its digest.

    Args:
        staged: Empty.
        sources: The extents, in any order; none of them empty.
        digests: ``sha256:<hex>`` of each, from a caller that made the first pass itself.
        threads: Hashing threads of the first pass; None: all cores.
        lanes: Who hashes and sums faster than Python's own; None: nobody.

    Raises:
        FormatError: There is no source, or one is empty (pack.3).
        OSError: The medium is full or failed.
    """
    if not sources or not all(source.size for source in sources):
        raise FormatError("a pack has at least one extent, and no empty one", path=str(staged.path), rule="pack.3")
    if digests is None:
        digests = sha256_streams(sources, threads=threads, lanes=lanes)
    order, offsets, size = layout([(digest, source.size) for digest, source in zip(digests, sources, strict=True)])
    os.posix_fallocate(staged.stream.fileno(), 0, size)
    checksums = [0] * len(sources)
    with _Spool(staged, size, lanes) as spool:
        for index in order:
            checksums[index] = spool.append(sources[index])
        identity = spool.finish()
    entries = (
        PackEntry(offset=offset, size=source.size, sha256=digest, crc32=checksum)
        for offset, source, digest, checksum in zip(offsets, sources, digests, checksums, strict=True)
    )
    return Pack(sha256=identity, bytes=size, entries=tuple(entries))


class _Spool:
    """A stream of bytes to a file that is filled, hashed and written at the same time, in aligned chunks.

    The hash of the file is what all wait for: it begins with a small chunk while the next ones, each twice as long, are
    being filled.
    """

    def __init__(self, staged: StagedFile, size: int, lanes: Lanes | None) -> None:
        self._lanes = lanes
        self._fd = _open_for_chunks(staged)
        self._size = size
        self._state = hashlib.sha256()
        self._stack = ExitStack()
        self._free = deque(self._stack.enter_context(_chunk()) for _ in range(_CHUNKS))
        self._busy: deque[tuple[mmap.mmap, list[Future[None]]]] = deque()
        self._hasher = self._stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="coldsnap-pack-hash"))
        self._writer = self._stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="coldsnap-pack-write"))
        self._used = 0
        self._limit = _FIRST_BYTES
        self._written = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._hasher.shutdown(cancel_futures=True)
        self._writer.shutdown(cancel_futures=True)
        self._stack.close()
        os.close(self._fd)

    def append(self, source: Source) -> int:
        """Add one extent and its padding, and return its CRC-32."""
        checksum, size = 0, 0
        for piece in source.pieces():
            size += len(piece)
            checksum = self._fill(piece, checksum)
        if size != source.size:
            raise OSError(f"a source of {source.size} bytes gave {size}")
        self._fill(memoryview(_ZEROS)[: padded(size) - size], 0)
        return checksum

    def finish(self) -> str:
        """Wait for everything, and return the digest of the file."""
        self._flush()
        while self._busy:
            self._settle()
        if self._written != self._size:
            raise OSError(f"{self._written} bytes were written where the layout has {self._size}")
        return f"sha256:{self._state.hexdigest()}"

    def _fill(self, piece: memoryview, checksum: int) -> int:
        done = 0
        while done < len(piece):
            if not self._free:
                self._settle()
            count = min(len(piece) - done, self._limit - self._used)
            with memoryview(self._free[0]) as whole, whole[self._used :] as room, piece[done : done + count] as part:
                checksum = self._copy(checksum, room, part)
            self._used += count
            done += count
            if self._used == self._limit:
                self._flush()
                self._limit = min(self._limit * 2, CHUNK_BYTES)
        return checksum

    def _copy(self, checksum: int, room: memoryview, part: memoryview) -> int:
        if self._lanes is not None:
            return self._lanes.crc32_copy(checksum, room, part)
        room[: len(part)] = part
        return zlib.crc32(part, checksum)

    def _flush(self) -> None:
        if not self._used:
            return
        chunk, used = self._free.popleft(), self._used
        tasks = [
            self._hasher.submit(self._hash, chunk, used),
            self._writer.submit(_write_all, self._fd, chunk, used, self._written),
        ]
        self._busy.append((chunk, tasks))
        self._written += used
        self._used = 0

    def _hash(self, chunk: mmap.mmap, used: int) -> None:
        with memoryview(chunk) as whole, whole[:used] as view:
            self._state.update(view)

    def _settle(self) -> None:
        chunk, tasks = self._busy.popleft()
        for task in tasks:
            task.result()
        self._free.append(chunk)


def _chunk() -> mmap.mmap:
    # Pages of an anonymous mapping are aligned as direct I/O wants them. Huge ones, which shared mappings do not get:
    # a request out of scattered 4 KiB pages has as many segments, and devices take few of them at a time.
    chunk = mmap.mmap(-1, CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    chunk.madvise(mmap.MADV_HUGEPAGE)
    return chunk


def _open_for_chunks(staged: StagedFile) -> int:
    # Direct writes do not leave gigabytes of dirty pages for the fsync; a filesystem without them gets plain ones.
    try:
        return os.open(staged.path, os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return os.open(staged.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _write_all(fd: int, chunk: mmap.mmap, used: int, offset: int) -> None:
    with memoryview(chunk) as whole:
        done = 0
        while done < used:
            with whole[done:used] as view:
                done += os.pwrite(fd, view, offset + done)


def verify_extents(
    fd: int,
    size_bytes: int,
    entries: Sequence[PackEntry],
    *,
    path: str,
    threads: int | None = None,
    lanes: Lanes | None = None,
) -> None:
    """Verify every byte of a pack by its index: order, extents on all cores, padding.

    Args:
        fd: Open for reading only.
        size_bytes: Of the file.
        entries: The index, in any order.
        path: For errors.
        threads: None: all cores.
        lanes: Who hashes several extents at once on each core; None: nobody.

    Raises:
        FormatError: The index is not that of a pack (pack.1 to pack.3).
        IntegrityError: An extent or the padding is wrong (pack.3, pack.5).
    """
    order, offsets, size = layout([(entry.sha256, entry.size) for entry in entries])
    if offsets != [entry.offset for entry in entries] or not entries:
        raise FormatError("the index does not have the order and the offsets of a pack", path=path, rule="pack.2")
    if size != size_bytes:
        raise IntegrityError(
            "wrong size (rule pack.3)", path=path, expected=f"{size} bytes", actual=f"{size_bytes} bytes"
        )
    spans = [(entry.offset, entry.size) for entry in entries]
    try:
        found = sha256_spans(fd, size_bytes, spans, threads=threads, lanes=lanes)
        _require_zeros(fd, (entries[index] for index in order), path)
    except OSError as error:
        raise IntegrityError(f"cannot be read ({error})", path=path, expected="its bytes", actual="an error") from error
    for entry, digest in zip(entries, found, strict=True):
        if entry.sha256 != digest:
            at = f"the extent at {entry.offset:#x} has wrong content (rule pack.5)"
            raise IntegrityError(at, path=path, expected=entry.sha256, actual=digest)


def _require_zeros(fd: int, ordered: Iterable[PackEntry], path: str) -> None:
    for entry in ordered:
        end = entry.offset + entry.size
        pad = os.pread(fd, padded(end) - end, end)
        if pad != _ZEROS[: padded(end) - end]:
            raise IntegrityError(
                f"the padding at {end:#x} is not zero (rule pack.3)", path=path, expected="zeros", actual="other bytes"
            )
