"""SHA-256 of many streams: on all cores, and several on each of them.

The one rule: how the streams are spread changes the time and nothing else; every digest is that of its bytes.

A core works through one stream at the pace at which each step waits for the one before; it has the units for nearly
two. What can use them is the native library, a layer above, so that it is handed down by who has it. Without one, or
on a processor where it is no faster, hashlib hashes one stream a core.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, Self

from coldsnap.artifact.cores import available_cores, in_threads

__all__ = ["Lanes", "Stream", "sha256_streams"]

_SMALL_BYTES = 64 << 10
_BLOCK_BYTES = 64
_NOTHING = memoryview(b"")


class Lanes(Protocol):
    """What hashes several streams at once: :class:`coldsnap.transfer.native.NativeLibrary`."""

    @property
    def sha256_lanes(self) -> int:
        """How many streams a core hashes at once; below 2 it is no faster than hashlib."""

    def sha256_begin(self) -> Any:
        """Begin a stream."""

    def sha256_update(self, parts: Sequence[tuple[Any, memoryview]]) -> None:
        """Add bytes to each of several different streams."""

    def sha256_end(self, stream: Any) -> bytes:
        """Return the digest of a stream."""

    def crc32(self, data: memoryview, crc: int = 0) -> int:
        """Return the CRC-32 of bytes appended to ``crc``."""

    def crc32_copy(self, crc: int, target: memoryview, source: memoryview) -> int:
        """Copy bytes, and return their CRC-32 appended to ``crc``."""


class Stream(Protocol):
    """Bytes that come in pieces."""

    @property
    def size(self) -> int:
        """Bytes."""

    def pieces(self) -> Iterator[memoryview]:
        """Yield all bytes in order; a piece is valid until the next one is asked for."""


def sha256_streams(streams: Sequence[Stream], *, threads: int | None = None, lanes: Lanes | None = None) -> list[str]:
    """Return ``sha256:<hex>`` of every stream.

    Args:
        streams: In any order; the longest are begun first, so that all cores end together.
        threads: None: all cores.
        lanes: Who hashes several at once; None: hashlib, one a core.

    Raises:
        Exception: Whatever a stream raises; the others are abandoned.
    """
    threads = min(threads or available_cores(), len(streams))
    # Two streams are faster on two cores than side by side on one.
    width = max(1, min(lanes.sha256_lanes if lanes else 1, -(-len(streams) // max(threads, 1))))
    waiting = deque(sorted(range(len(streams)), key=lambda index: -streams[index].size))
    digests = [""] * len(streams)

    def work(_: int) -> None:
        with _Core(lanes if width > 1 else None) as core:
            try:
                while core.fill(streams, waiting, width, digests):
                    core.advance()
            except BaseException:
                waiting.clear()
                raise

    in_threads(work, range(threads), threads=threads)
    return digests


class _Core:
    """The streams that one thread works through at the moment."""

    def __init__(self, lanes: Lanes | None) -> None:
        self._lanes = lanes
        self._running: list[_Running] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._running:
            one.close()

    def fill(self, streams: Sequence[Stream], waiting: deque[int], width: int, digests: list[str]) -> bool:
        """Finish what has ended and take streams from those waiting until every lane has bytes.

        A lane that stays empty for one turn is paid twice: whatever runs beside it has no company either.

        Returns:
            Whether any lane has.
        """
        for one in tuple(self._running):
            self._finish_ended(one, digests)
        while len(self._running) < width:
            try:
                index = waiting.popleft()
            except IndexError:
                break
            lanes = self._lanes if streams[index].size >= _SMALL_BYTES else None
            self._running.append(_Running(index, streams[index].pieces(), lanes))
            self._finish_ended(self._running[-1], digests)
        return bool(self._running)

    def _finish_ended(self, one: _Running, digests: list[str]) -> None:
        if not one.more():
            digests[one.index] = f"sha256:{one.digest().hex()}"
            self._running.remove(one)

    def advance(self) -> None:
        """Hash as much of all as the shortest piece has."""
        left = min(len(one.piece) - one.done for one in self._running)
        count = left // _BLOCK_BYTES * _BLOCK_BYTES or left  # a stream that stays on its blocks is hashed in place
        with ExitStack() as views:
            parts = [(one, views.enter_context(one.piece[one.done : one.done + count])) for one in self._running]
            self._update(parts)
            for one in self._running:
                one.done += count

    def _update(self, parts: Iterable[tuple[_Running, memoryview]]) -> None:
        together = []
        for one, view in parts:
            if one.lanes is None:
                one.state.update(view)
            else:
                together.append((one.state, view))
        if together and self._lanes is not None:
            self._lanes.sha256_update(together)


class _Running:
    """One stream on its way."""

    def __init__(self, index: int, pieces: Iterator[memoryview], lanes: Lanes | None) -> None:
        self.index = index
        self.lanes = lanes
        self.state: Any = hashlib.sha256() if lanes is None else lanes.sha256_begin()
        self.piece = _NOTHING
        self.done = 0
        self._pieces = pieces

    def more(self) -> bool:
        """Whether there are bytes left; asks for the next piece when there are none of this."""
        while self.done == len(self.piece):
            self.piece, self.done = _NOTHING, 0  # what was mapped for it may go now
            try:
                self.piece = next(self._pieces)
            except StopIteration:
                return False
        return True

    def digest(self) -> bytes:
        """Return the digest."""
        return bytes(self.state.digest() if self.lanes is None else self.lanes.sha256_end(self.state))

    def close(self) -> None:
        """Let go of a piece that was not worked through to its end."""
        self.piece = _NOTHING
        if isinstance(self._pieces, Generator):
            self._pieces.close()
