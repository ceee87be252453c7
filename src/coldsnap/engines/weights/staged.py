"""Copies that torch does: conversions, strides, and what copies before them wrote.

The one rule: torch sees host memory alone, the slab on one side and a copy of the destination's bytes on the other, so
that the same bytes come out on every device and for every memory provider.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch

from coldsnap.artifact.replay import Elements, ReplayCopy
from coldsnap.engines.weights.storages import DTYPES
from coldsnap.errors import IntegrityError
from coldsnap.transfer.memory import PreservedMemory

__all__ = ["deliver", "source_in_file", "source_in_slab"]

Read = Callable[[ReplayCopy], Any]


def source_in_slab(slab: memoryview, at: int, source: Elements) -> Any:
    """Return a copy's source, which was read to a place in the slab, as a tensor."""
    flat = torch.frombuffer(slab[at : at + source.span], dtype=DTYPES[source.dtype])
    return flat.as_strided(source.shape, source.stride)


def source_in_file(path: str, copy: ReplayCopy) -> Any:
    """Return a copy's source as safetensors' own reader gives it.

    Raises:
        IntegrityError: The file has another tensor under the name.
    """
    from safetensors import safe_open  # noqa: PLC0415  only the loader backend torch needs it

    with safe_open(path, framework="pt") as file:
        tensor = file.get_tensor(copy.tensor)
    whole = tensor.reshape(-1).view(torch.uint8)
    if len(whole) != copy.length:
        raise IntegrityError(
            f"the tensor {copy.tensor} is not the captured one (rule manifest.6)",
            path=path,
            expected=f"{copy.length} bytes",
            actual=f"{len(whole)} bytes",
        )
    part = whole[copy.source.offset : copy.source.end]
    if part.data_ptr() % copy.source.width:
        part = part.clone()  # a view that begins between elements of another type
    elements = part.view(DTYPES[copy.source.dtype])
    return elements.as_strided(copy.source.shape, copy.source.stride, elements.storage_offset())


def deliver(copy: ReplayCopy, source: Any, *, memory: PreservedMemory, base: int) -> int:
    """Write a copy's source to its target, converted where the types differ; return the CRC-32 of an unbroken one.

    Args:
        copy: Which.
        source: Its elements, in host memory.
        memory: Whose bytes are written.
        base: Address of the allocation.
    """
    target, dtype = copy.target, DTYPES[copy.target.dtype]
    if target.in_order:
        dense = torch.empty(target.shape, dtype=dtype)
        dense.copy_(source)
        data = memoryview(dense.reshape(-1).view(torch.uint8).numpy())
        memory.copy_from_host(base + target.offset, data)
        return zlib.crc32(data) if copy.is_unbroken else 0
    span = bytearray(target.span)  # what lies between the elements is written back as it was
    memory.copy_to_host(base + target.offset, memoryview(span))
    torch.frombuffer(span, dtype=dtype).as_strided(target.shape, target.stride).copy_(source)
    memory.copy_from_host(base + target.offset, memoryview(span))
    return 0
