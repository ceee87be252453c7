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

from coldsnap.artifact.lanes import Lanes, sha256_streams
from coldsnap.artifact.pack import PackEntry, layout
from coldsnap.transfer.memory import PreservedMemory

__all__ = ["MemorySource", "Staging", "digests_of"]

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
