"""Samples of a file, and where else their bytes lie: whether weights are really out of a process image.

The one rule: a sample is telling. Bytes that a process may hold without holding the weights (zeros, one value over and
over, a count) are never drawn, so that one that is found accuses.

The search finds every sample at every byte of every file. The native library does it at the speed of the memory;
without it Python does the same, slower.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise, takewhile

from attrs import field, frozen

from coldsnap.artifact.cores import in_threads
from coldsnap.transfer.native import NativeLibrary, packaged

__all__ = ["Found", "Sample", "draw", "equal_around", "search"]

MIN_BYTES = 64
MAX_BYTES = 4096
MAX_COUNT = 1024
_TRIES = 64
_RANGE_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_STRIDE, _WORD = 32, 8


@frozen(kw_only=True)
class Sample:
    """Some bytes of a file.

    Attributes:
        data: The bytes.
        offset: Of the first, in the file they were drawn from.
    """

    data: bytes = field(repr=False)
    offset: int


@frozen(kw_only=True)
class Found:
    """A sample in another file.

    Attributes:
        path: Of the file.
        offset: Of the first byte, in that file.
        sample: Which one.
    """

    path: str
    offset: int
    sample: Sample


def draw(
    path: str | os.PathLike[str],
    extents: Sequence[tuple[int, int]],
    count: int = 100,
    size: int = MIN_BYTES,
    *,
    seed: int | str,
) -> tuple[Sample, ...]:
    """Draw random samples of a file, each byte of the extents as likely as any other.

    Args:
        path: The file, a pack.
        extents: Offset and size of the stretches to draw from, in bytes.
        count: How many, at most 1024.
        size: Bytes of each, 64 to 4096.
        seed: The same seed, file and extents give the same samples.

    Returns:
        Different samples in file order; fewer than ``count``, down to none, when so few of those tried were telling.

    Raises:
        OSError: The file cannot be read, or ends before an extent does.
        ValueError: Count or size are out of their range.
    """
    if not (MIN_BYTES <= size <= MAX_BYTES and 0 <= count <= MAX_COUNT):
        raise ValueError(f"{count} samples of {size} bytes: at most 1024 of 64 to 4096 bytes can be drawn")
    starts = [(offset, length - size + 1) for offset, length in sorted(extents) if length >= size]
    generator = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
    drawn: dict[bytes, int] = {}
    tried: set[int] = set()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for _ in range(count * _TRIES if starts else 0):
            if len(drawn) == count:
                break
            offset = _place(generator.randrange(sum(places for _, places in starts)), starts)
            if offset in tried:
                continue
            tried.add(offset)
            if _telling(data := _read(fd, str(path), offset, size)):
                drawn.setdefault(data, offset)
    finally:
        os.close(fd)
    return tuple(Sample(data=data, offset=offset) for data, offset in sorted(drawn.items(), key=lambda item: item[1]))


def _place(number: int, starts: Sequence[tuple[int, int]]) -> int:
    for offset, places in starts:
        if number < places:
            return offset + number
        number -= places
    raise AssertionError("a number beyond all places")


def _telling(data: bytes) -> bool:
    """Whether bytes identify what they were taken from."""
    if len(set(data)) < MIN_BYTES // 4:
        return False
    if any(data[at : at + 4] == data[at : at + 1] * 4 for at in range(len(data) - 3)):
        return False
    if any(data[period:] == data[:-period] for period in range(1, len(data) // 2 + 1)):
        return False
    return not any(_counts(data, width, phase) for width in (1, 2, 4, 8) for phase in range(width))


def _counts(data: bytes, width: int, phase: int) -> bool:
    """Whether the bytes are integers that grow by the same amount each: positions, indices, tables of them."""
    words = [data[at : at + width] for at in range(phase, len(data) - width + 1, width)]
    return _even([int.from_bytes(word, "little") for word in words], width) or _even(
        [int.from_bytes(word, "big") for word in words], width
    )


def _even(numbers: Sequence[int], width: int) -> bool:
    return len({(after - before) % (1 << 8 * width) for before, after in pairwise(numbers)}) == 1


def search(
    paths: Sequence[str | os.PathLike[str]],
    samples: Sequence[Sample],
    threads: int | None = None,
    *,
    library: NativeLibrary | None = None,
) -> tuple[Found, ...]:
    """Find samples in files, at any byte.

    Args:
        paths: Regular files at rest.
        samples: At most 1024 different ones of one size.
        threads: How many; None: as many as there are cores.
        library: ``None``: that of this installation; where it has none, Python searches.

    Returns:
        Every occurrence, ordered by place in ``paths``, then offset.

    Raises:
        OSError: A file cannot be opened or read, or became shorter meanwhile.
        NativeError: The same, by the library.
        ValueError: There are too many samples, equal ones, or ones of different sizes.
    """
    patterns = [sample.data for sample in samples]
    _require_searchable(patterns)
    pieces = [piece for path in paths if patterns for piece in _ranges(os.fspath(path))]
    chosen = library or packaged()
    work = partial(_by_python if chosen is None else partial(_by_library, chosen), patterns)
    found = in_threads(work, pieces, threads=threads)
    return tuple(
        Found(path=path, offset=offset, sample=samples[index])
        for (path, *_), matches in zip(pieces, found, strict=True)
        for offset, index in matches
    )


def equal_around(found: Found, source: str | os.PathLike[str], limit_bytes: int) -> int:
    """Return how many bytes in a row are the same where a sample was found and where it was drawn, itself included.

    Args:
        found: The place.
        source: The file it was drawn from.
        limit_bytes: How far is looked in each direction.

    Raises:
        OSError: A file cannot be read.
    """
    sample = found.sample
    before = min(limit_bytes, found.offset, sample.offset)
    pieces = []
    for path, offset in ((found.path, found.offset), (source, sample.offset)):
        with open(path, "rb", buffering=0) as file:
            pieces.append(os.pread(file.fileno(), before + len(sample.data) + limit_bytes, offset - before))
    here, there = pieces
    back = zip(reversed(here[:before]), reversed(there[:before]), strict=True)
    return _same(back) + _same(zip(here[before:], there[before:], strict=False))


def _same(pairs: Iterable[tuple[int, int]]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _require_searchable(patterns: Sequence[bytes]) -> None:
    sizes = {len(pattern) for pattern in patterns}
    if len(set(patterns)) != len(patterns) or len(patterns) > MAX_COUNT or len(sizes) > 1:
        raise ValueError(f"{len(patterns)} samples: at most 1024 different ones of one size can be searched for")
    if not all(MIN_BYTES <= size <= MAX_BYTES for size in sizes):
        raise ValueError(f"samples of {sizes} bytes: those of 64 to 4096 bytes can be searched for")


_Range = tuple[str, int, int]
_Matches = Sequence[tuple[int, int]]


def _ranges(path: str) -> list[_Range]:
    size = os.stat(path).st_size
    return [(path, at, min(_RANGE_BYTES, size - at)) for at in range(0, size, _RANGE_BYTES)]


def _by_library(library: NativeLibrary, patterns: Sequence[bytes], piece: _Range) -> _Matches:
    path, offset, length = piece
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return library.search(fd, path, offset, length, patterns)
    finally:
        os.close(fd)


def _by_python(patterns: Sequence[bytes], piece: _Range) -> _Matches:
    # Wherever a pattern begins, it covers eight whole bytes from some multiple of 32: those of a chunk are compared
    # with all that can be there in one call, and only a chunk that has one is searched byte by byte.
    path, offset, length = piece
    words = {pattern[at : at + _WORD] for pattern in patterns for at in range(_STRIDE)}
    numbers = {int.from_bytes(word, sys.byteorder) for word in words}
    matches: list[tuple[int, int]] = []
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        for at in range(offset, offset + length, _CHUNK_BYTES):
            starts = min(_CHUNK_BYTES, offset + length - at)
            data = _read(fd, path, at, min(starts + len(patterns[0]) - 1, size - at))
            whole = memoryview(data)[: len(data) // _WORD * _WORD].cast("Q")
            if not numbers.isdisjoint(whole[:: _STRIDE // _WORD]):
                matches += [(at + place, index) for place, index in _occurrences(data, patterns) if place < starts]
    finally:
        os.close(fd)
    return matches


def _occurrences(data: bytes, patterns: Sequence[bytes]) -> list[tuple[int, int]]:
    return sorted((place, index) for index, pattern in enumerate(patterns) for place in _places(data, pattern))


def _places(data: bytes, pattern: bytes) -> Iterator[int]:
    place = data.find(pattern)
    while place >= 0:
        yield place
        place = data.find(pattern, place + 1)


def _read(fd: int, path: str, offset: int, size: int) -> bytes:
    data = os.pread(fd, size, offset)
    if len(data) != size:
        raise OSError(f"{path} ends {size - len(data)} bytes before the {size} at {offset} do; it must not change")
    return data
