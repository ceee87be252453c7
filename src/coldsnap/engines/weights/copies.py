"""What a load did, copy by copy: a range of a safetensors file, seen through a view, to a view of a destination.

The one rule: a record is enough to do the same copy again from the file alone, with nothing that knew the loader.
This is data: no torch, no address.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from attrs import field, frozen

from coldsnap.artifact import record
from coldsnap.transfer.safetensors import DTYPE_BYTES

__all__ = ["Copy", "Placed", "View"]


@frozen(kw_only=True)
class View:
    """Elements of a tensor, as strides over its bytes.

    Attributes:
        dtype: Of the elements, as safetensors names it.
        offset_bytes: Of the first element, from the first byte of what is viewed.
        shape: Elements of each dimension.
        stride: Distance of each dimension, in elements.
    """

    dtype: str
    offset_bytes: int = field(validator=record.at_least(0))
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def width(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.width

    @property
    def span_bytes(self) -> int:
        """Bytes from the first element to the end of the last; the elements need not fill them."""
        return (sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)) + 1) * self.width

    def dense(self) -> tuple[int, list[tuple[int, int]]]:
        """Return the bytes of one unbroken run, and the dimensions (size, stride in elements) that repeat it."""
        run = 1
        outer: list[tuple[int, int]] = []
        dimensions = ((size, step) for size, step in zip(self.shape, self.stride, strict=True) if size != 1)
        for size, step in sorted(dimensions, key=lambda dimension: dimension[1]):
            if step == run and not outer:
                run *= size
            else:
                outer.append((size, step))
        return run * self.width, outer

    def ends(self, most_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield (offset, size) of the bytes at both ends, none of them outside of the view."""
        run, _ = self.dense()
        size = min(run, most_bytes)
        yield self.offset_bytes, size
        yield self.offset_bytes + self.span_bytes - size, size


@frozen(kw_only=True)
class Copy:
    """One copy, converting where the types differ.

    Attributes:
        source_name: Tensor in the checkpoint.
        source_path: Its file.
        source_dtype: As the file has it.
        source_shape: As the file has it.
        source_file_offset: First byte of the tensor in the file.
        source_length: Bytes of the tensor.
        source_view: What of it was read, relative to the tensor.
        destination_name: Parameter or buffer.
        destination_dtype: Its type.
        destination_shape: Its shape at that moment.
        destination_view: What of it was written, relative to its first element.
        copy_bytes: Bytes written.
    """

    source_name: str
    source_path: str
    source_dtype: str
    source_shape: tuple[int, ...]
    source_file_offset: int = field(validator=record.at_least(0))
    source_length: int = field(validator=record.at_least(1))
    source_view: View
    destination_name: str
    destination_dtype: str
    destination_shape: tuple[int, ...]
    destination_view: View
    copy_bytes: int = field(validator=record.at_least(1))


@frozen(kw_only=True)
class Placed:
    """A copy whose destination is still what was loaded, and where that lies now.

    Attributes:
        copy: The copy.
        base: Address of the destination's first element.
    """

    copy: Copy
    base: int = field(validator=record.at_least(1))
