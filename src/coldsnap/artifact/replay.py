"""The copies of a load, as a recovery manifest lists them: from a range of a file to bytes of an allocation.

The one rule: a copy is complete in itself. Whoever has the file and the memory can do it again, without the loader, the
model or the process that did it first.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from attrs import field, frozen

from coldsnap.artifact import record
from coldsnap.artifact.extents import Extent

__all__ = ["DTYPE_BYTES", "Elements", "ReplayCopy", "SourceFile", "require_covering"]

DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "I16": 2,
    "U16": 2,
    "I32": 4,
    "U32": 4,
    "I64": 8,
    "U64": 8,
    "F16": 2,
    "BF16": 2,
    "F32": 4,
    "F64": 8,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
}
"""Bytes of an element, by the name that safetensors has for its type."""

_DTYPE = record.matching("|".join(DTYPE_BYTES), "a type of safetensors")
_RULE = "manifest.10"


@frozen(kw_only=True)
class SourceFile:
    """One safetensors file of the checkpoint.

    Attributes:
        path: As the engine opened it; links are followed.
        bytes: Size.
        header_sha256: Digest of its first 8 bytes and its header.
    """

    path: str = field(validator=record.matching(r"/[^\x00]*", "an absolute path"))
    bytes: int = field(validator=record.at_least(8))
    header_sha256: str = field(validator=record.sha256)


@frozen(kw_only=True)
class Elements:
    """Elements, as strides over bytes.

    Attributes:
        dtype: As safetensors names it.
        offset: Byte of the first element.
        shape: Elements of each dimension; none of them 0.
        stride: Distance of each dimension, in elements; 0 repeats one element.
    """

    dtype: str = field(validator=_DTYPE)
    offset: int = field(validator=record.at_least(0))
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __attrs_post_init__(self) -> None:
        """Check that shape and strides go together."""
        if len(self.shape) != len(self.stride) or min(self.shape, default=1) < 1 or min(self.stride, default=0) < 0:
            raise record.Broken(_RULE, f"shape {list(self.shape)} and stride {list(self.stride)} are no view")

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.width

    @property
    def span(self) -> int:
        """Bytes from the first element to the end of the last."""
        return (sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)) + 1) * self.width

    @property
    def end(self) -> int:
        """The byte after the last element."""
        return self.offset + self.span

    @property
    def in_order(self) -> bool:
        """Whether the elements fill their span in the order of their indices."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return False
            expected *= size
        return True

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield the unbroken runs of bytes (begin, end), in no particular order."""
        run, outer = 1, list[tuple[int, int]]()
        dimensions = ((size, step) for size, step in zip(self.shape, self.stride, strict=True) if size != 1)
        for size, step in sorted(dimensions, key=lambda dimension: dimension[1]):
            if step == run and not outer:
                run *= size
            else:
                outer.append((size, step))
        for index in itertools.product(*(range(size) for size, _ in outer)):
            at = sum(number * step for number, (_, step) in zip(index, outer, strict=True))
            yield self.offset + at * self.width, self.offset + (at + run) * self.width


@frozen(kw_only=True)
class ReplayCopy:
    """One copy; it converts where the types differ.

    Attributes:
        file: Index into ``files``.
        tensor: Its name in the checkpoint.
        file_offset: First byte of the tensor in the file.
        length: Bytes of the tensor.
        source: What of the tensor is read; offsets from its first byte.
        name: Parameter or buffer that is written.
        allocation: Index into ``allocations``.
        target: What of the allocation is written, shape as the source's; offsets from its base.
        crc32: Of the bytes, when the copy is plain: the same unbroken bytes in file and memory, written by it alone.
    """

    file: int = field(validator=record.at_least(0))
    tensor: str
    file_offset: int = field(validator=record.at_least(8))
    length: int = field(validator=record.at_least(1))
    source: Elements
    name: str
    allocation: int = field(validator=record.at_least(0))
    target: Elements
    crc32: int | None = None

    def __attrs_post_init__(self) -> None:
        """Check manifest.10, as far as one copy can tell."""
        if self.source.shape != self.target.shape:
            raise record.Broken(_RULE, f"the copy to {self.name} changes the shape")
        if self.source.end > self.length:
            raise record.Broken(_RULE, f"the copy to {self.name} reads beyond the tensor {self.tensor}")
        if self.crc32 is not None and not self.is_unbroken:
            raise record.Broken(_RULE, f"the copy to {self.name} is not plain, and has a checksum")

    @property
    def is_unbroken(self) -> bool:
        """Whether it moves one run of bytes as they are."""
        return self.source.dtype == self.target.dtype and self.source.in_order and self.target.in_order


def require_covering(copies: Sequence[ReplayCopy], extents: Sequence[Extent], files: Sequence[SourceFile]) -> None:
    """Check manifest.10: the copies write every byte of the extents, and nothing else, out of the files.

    Raises:
        Broken: They do not.
    """
    written: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for copy in copies:
        if copy.file >= len(files) or copy.file_offset + copy.length > files[copy.file].bytes:
            raise record.Broken(_RULE, f"the tensor {copy.tensor} does not lie in its file")
        written[copy.allocation] += copy.target.runs()
    found = {allocation: _merged(runs) for allocation, runs in written.items()}
    wanted: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for extent in extents:
        wanted[extent.allocation].append((extent.offset, extent.offset + extent.size))
    if found != {allocation: _merged(runs) for allocation, runs in wanted.items()}:
        raise record.Broken(_RULE, "the copies do not write exactly the model extents")


def _merged(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(runs):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged
