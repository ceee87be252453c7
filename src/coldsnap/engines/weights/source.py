"""Bytes out of a worker's memory, in bounded pieces, through buffers that leave nothing behind.

The one rule: a byte that came out of the memory is in the staging buffers or nowhere, and those are gone when the
staging ends. A process image made later is searched for weights, and freed heap memory still holds what it held.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Self

from attrs import frozen

from coldsnap.artifact.cores import in_threads
from coldsnap.artifact.extents import Extent
from coldsnap.artifact.lanes import Lanes, sha256_streams
from coldsnap.artifact.pack import PackEntry, layout
from coldsnap.engines.weights.split import Split
from coldsnap.transfer.memory import PreservedMemory

__all__ = ["Checksums", "MemorySource", "Staging", "digests_of"]

STAGE_BYTES = 8 << 20


class Staging:
    """One buffer for each stretch that is being copied out of a memory; a context manager that gives them back.

    Args:
        memory: Who holds the bytes.
    """

    def __init__(self, memory: PreservedMemory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._buffers: list[mmap.mmap] = []
        self._idle: list[mmap.mmap] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for buffer in self._buffers:
            # The pages go now, even if a traceback still holds a view and keeps the mapping.
            buffer.madvise(mmap.MADV_DONTNEED)
            with contextlib.suppress(BufferError):
                buffer.close()
        self._buffers.clear()
        self._idle.clear()

    def source(self, address: int, size: int) -> MemorySource:
        """Return a stretch of the memory as a source for packs."""
        return MemorySource(staging=self, address=address, size=size)

    def pieces(self, address: int, size: int) -> Iterator[memoryview]:
        """Yield a stretch of the memory; a piece is valid until the next one is asked for."""
        buffer = self._take()
        try:
            with memoryview(buffer) as whole:
                for done in range(0, size, STAGE_BYTES):
                    with whole[: min(STAGE_BYTES, size - done)] as piece:
                        self._memory.copy_to_host(address + done, piece)
                        yield piece
        finally:
            with self._lock:
                self._idle.append(buffer)

    def _take(self) -> mmap.mmap:
        with self._lock:
            if not self._idle:
                self._idle.append(mmap.mmap(-1, STAGE_BYTES))
                self._buffers.append(self._idle[-1])
            return self._idle.pop()


@frozen(kw_only=True)
class MemorySource:
    """A stretch of a worker's memory; see :class:`coldsnap.artifact.pack.Source`."""

    staging: Staging
    address: int
    size: int

    def pieces(self) -> Iterator[memoryview]:
        """Yield all bytes in order; a piece is valid until the next one is asked for."""
        return self.staging.pieces(self.address, self.size)


def digests_of(sources: Sequence[MemorySource], *, threads: int, lanes: Lanes | None = None) -> tuple[PackEntry, ...]:
    """Read every source once, and return the index of the pack that holds them."""
    summed = [_Summed(source, zlib.crc32 if lanes is None else lanes.crc32) for source in sources]
    digests = sha256_streams(summed, threads=threads, lanes=lanes)
    _, offsets, _ = layout([(digest, source.size) for digest, source in zip(digests, sources, strict=True)])
    return tuple(
        PackEntry(offset=offset, size=source.size, sha256=digest, crc32=source.crc32)
        for offset, source, digest in zip(offsets, summed, digests, strict=True)
    )


class Checksums:
    """CRC-32 of stretches of a worker's memory; those that are known already are not read again.

    Args:
        split: Whose allocations and model.
        staging: Reads them.
        entries: The index of the model's extents, in their order, as far as it is known.
        lanes: What sums fast, when there is one.
        threads: How many at once; None: all cores.
    """

    def __init__(
        self,
        split: Split,
        staging: Staging,
        entries: Sequence[PackEntry],
        *,
        lanes: Lanes | None = None,
        threads: int | None = None,
    ) -> None:
        self._split = split
        self._staging = staging
        self._threads = threads
        self._sum = zlib.crc32 if lanes is None else lanes.crc32
        known = zip(split.model.extents, entries, strict=True) if entries else ()
        self._known = {extent: entry.crc32 for extent, entry in known}

    def of(self, stretches: Sequence[Extent]) -> list[int]:
        """Return the CRC-32 of each."""
        return in_threads(self._one, stretches, threads=self._threads)

    def of_extents(self) -> list[int]:
        """Return the CRC-32 of each extent of the model, in order."""
        return self.of(self._split.model.extents)

    def _one(self, stretch: Extent) -> int:
        if stretch in self._known:
            return self._known[stretch]
        crc32 = 0
        address = self._split.allocations[stretch.allocation].address + stretch.offset
        for piece in self._staging.pieces(address, stretch.size):
            crc32 = self._sum(piece, crc32)
        return crc32


class _Summed:
    """A source whose CRC-32 is taken as its pieces pass."""

    def __init__(self, source: MemorySource, sum_of: Callable[[memoryview, int], int]) -> None:
        self.size = source.size
        self.crc32 = 0
        self._source = source
        self._sum_of = sum_of

    def pieces(self) -> Iterator[memoryview]:
        for piece in self._source.pieces():
            self.crc32 = self._sum_of(piece, self.crc32)
            yield piece
