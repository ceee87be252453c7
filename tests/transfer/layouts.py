"""Layouts of extents, from friendly to hostile, with the bytes they should deliver."""

import hashlib
import random
import zlib

from attrs import frozen
from hypothesis import strategies as st

from coldsnap.transfer.backend import FileExtent

PAGE = 4096


@frozen
class Layout:
    """Pieces of a file, ``(offset, length)``, and distances between their places in memory."""

    size: int
    pieces: tuple[tuple[int, int], ...]
    gaps: tuple[int, ...]
    verification: str = "crc32"

    def destination_bytes(self) -> int:
        return sum(length for _, length in self.pieces) + sum(self.gaps) + PAGE

    def addresses(self, base: int) -> list[int]:
        at, found = base, []
        for (_, length), gap in zip(self.pieces, self.gaps, strict=True):
            found.append(at + gap)
            at += gap + length
        return found

    def extents(self, base: int, data: bytes, *, hole: int = 0) -> list[FileExtent]:
        result = []
        for (offset, length), address in zip(self.pieces, self.addresses(base), strict=True):
            piece = data[offset : offset + length]
            result.append(
                FileExtent(
                    file_offset=hole + offset,
                    address=address,
                    length=length,
                    crc32=None if self.verification == "none" else zlib.crc32(piece),
                    sha256=hashlib.sha256(piece).digest() if self.verification == "crc32+sha256" else None,
                )
            )
        return result


def content(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


@st.composite
def layouts(draw, *, max_size: int = 600_000) -> Layout:
    size = draw(st.integers(1, max_size))
    aligned = draw(st.booleans())
    pieces = []
    for _ in range(draw(st.integers(1, 12))):
        offset = draw(st.integers(0, size - 1))
        length = draw(st.one_of(st.just(0), st.integers(1, 64), st.integers(0, size)))
        if aligned:
            offset -= offset % PAGE
        pieces.append((offset, min(length, size - offset)))
    gaps = draw(st.lists(st.integers(0, 5000), min_size=len(pieces), max_size=len(pieces)))
    if draw(st.booleans()):
        gaps = [0] * len(pieces)
    verification = draw(st.sampled_from(["none", "crc32", "crc32+sha256"]))
    return Layout(size, tuple(pieces), tuple(gaps), verification)
