"""Bytes out of a worker's memory, in bounded pieces, through buffers that leave nothing behind.

The one rule: a byte that came out of the memory is in the staging buffers or nowhere, and those are gone when the
staging ends. A process image made later is searched for weights, and freed heap memory still holds what it held.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import Self

from attrs import frozen

from coldsnap.artifact.cores import in_threads
from coldsnap.artifact.pack import PackEntry, layout
from coldsnap.transfer.memory import PreservedMemory

__all__ = ["MemorySource", "Staging", "digests_of"]

STAGE_BYTES = 8 << 20


class Staging:
    """One buffer for each thread that copies out of a memory; a context manager that gives them back.

    Args:
        memory: Who holds the bytes.
    """

    def __init__(self, memory: PreservedMemory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._buffers: dict[int, mmap.mmap] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for buffer in self._buffers.values():
            # The pages go now, even if a traceback still holds a view and keeps the mapping.
            buffer.madvise(mmap.MADV_DONTNEED)
            with contextlib.suppress(BufferError):
                buffer.close()
        self._buffers.clear()

    def source(self, address: int, size: int) -> MemorySource:
        """Return a stretch of the memory as a source for packs."""
        return MemorySource(staging=self, address=address, size=size)

    def pieces(self, address: int, size: int) -> Iterator[memoryview]:
        """Yield a stretch of the memory; a piece is valid until the thread asks for another."""
        with memoryview(self._buffer()) as whole:
            for done in range(0, size, STAGE_BYTES):
                with whole[: min(STAGE_BYTES, size - done)] as piece:
                    self._memory.copy_to_host(address + done, piece)
                    yield piece

    def _buffer(self) -> mmap.mmap:
        with self._lock:
            return self._buffers.setdefault(threading.get_ident(), mmap.mmap(-1, STAGE_BYTES))


@frozen(kw_only=True)
class MemorySource:
    """A stretch of a worker's memory; see :class:`coldsnap.artifact.pack.Source`."""

    staging: Staging
    address: int
    size: int

    def pieces(self) -> Iterator[memoryview]:
        """Yield all bytes in order; a piece is valid until the next one is asked for."""
        return self.staging.pieces(self.address, self.size)


def digests_of(sources: Sequence[MemorySource], *, threads: int) -> tuple[PackEntry, ...]:
    """Read every source once, and return the index of the pack that holds them."""
    # The longest first: all cores end together.
    order = sorted(range(len(sources)), key=lambda index: -sources[index].size)
    found = dict(zip(order, in_threads(_sums, (sources[index] for index in order), threads=threads), strict=True))
    sums = [found[index] for index in range(len(sources))]
    _, offsets, _ = layout([(digest, source.size) for (digest, _), source in zip(sums, sources, strict=True)])
    return tuple(
        PackEntry(offset=offset, size=source.size, sha256=digest, crc32=crc32)
        for offset, source, (digest, crc32) in zip(offsets, sources, sums, strict=True)
    )


def _sums(source: MemorySource) -> tuple[str, int]:
    state, crc32 = hashlib.sha256(), 0
    for piece in source.pieces():
        state.update(piece)
        crc32 = zlib.crc32(piece, crc32)
    return f"sha256:{state.hexdigest()}", crc32
