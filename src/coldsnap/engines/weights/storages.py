"""Tensors as ranges of bytes in storages.

A storage is known by the address of torch's own record of it. The one rule: whoever remembers such an address holds a
weak reference to the record too, because torch hands the address out again once nobody does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from attrs import frozen
from torch.multiprocessing.reductions import StorageWeakRef

from coldsnap.engines.weights.copies import View

__all__ = ["DTYPES", "Span", "StorageWeakRef", "dtype_name", "read_bytes", "span_of", "storage_of", "view_of"]

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@frozen
class Span:
    """Where the elements of a tensor lie: from the first one's first byte to the last one's last.

    Attributes:
        storage: Identity of the storage.
        begin: Byte in it.
        end: The byte after.
    """

    storage: int
    begin: int
    end: int

    def overlaps(self, other: Span) -> bool:
        """Tell whether both have a byte in common."""
        return self.storage == other.storage and self.begin < other.end and other.begin < self.end

    def holds(self, other: Span) -> bool:
        """Tell whether the other lies in this one."""
        return self.storage == other.storage and self.begin <= other.begin and other.end <= self.end


def dtype_name(dtype: Any) -> str | None:
    """Return what safetensors calls a type, None when it has no name for it."""
    return _NAMES.get(dtype)


def storage_of(tensor: Any) -> Any:
    """Return the storage of a plain tensor, None when it has none (meta, sparse, lazily conjugated or negated)."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.untyped_storage()


def span_of(tensor: Any) -> Span | None:
    """Return where a tensor lies, None when it is no plain memory."""
    storage = storage_of(tensor)
    if storage is None:
        return None
    width = tensor.element_size()
    begin = tensor.storage_offset() * width
    if not tensor.numel():
        return Span(storage._cdata, begin, begin)  # noqa: SLF001  what StorageWeakRef itself compares
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return Span(storage._cdata, begin, begin + (last + 1) * width)  # noqa: SLF001


def view_of(tensor: Any, base: int) -> View:
    """Describe a tensor whose type has a name, relative to byte ``base`` of its storage."""
    return View(
        dtype=_NAMES[tensor.dtype],
        offset_bytes=tensor.storage_offset() * tensor.element_size() - base,
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
    )


def read_bytes(storage: Any, ranges: Iterable[tuple[int, int]]) -> bytes:
    """Read some ranges (first byte, size) of a storage, in one transfer from its device."""
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    parts = [whole[begin : begin + size] for begin, size in ranges]
    return bytes(torch.cat(parts).cpu().numpy().data) if parts else b""
