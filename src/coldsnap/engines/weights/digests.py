"""What every parameter and buffer of a rank holds, as digests: the proof that a restore brought back each of them.

The one rule: a digest is of type, shape and elements, in their order, and of nothing else: of no address, stride or
device, and of no padding; so that memory that was filled in another way is compared by what a model reads.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch
from attrs import field, frozen

from coldsnap.artifact import record
from coldsnap.engines.rank import Operation
from coldsnap.engines.weights.destinations import named_tensors
from coldsnap.engines.weights.requests import read_request
from coldsnap.engines.weights.storages import read_bytes, span_of, storage_of

__all__ = ["NO_MEMORY", "digest_of", "digests_of", "ends_of"]

NO_MEMORY = "no plain memory"
"""Instead of a digest: a tensor on the meta device, or a sparse one."""

_CHUNK_BYTES: Final = 64 << 20
_THREADS: Final = 8
# One page of the answer fits into a reply of a rank (64 KiB): each entry is its name, its digest, and punctuation.
_PAGE_BYTES: Final = 48 << 10
_ENTRY_BYTES: Final = 80


@frozen(kw_only=True)
class DigestsRequest:
    """``digests``.

    Attributes:
        first: Number of the tensor to begin with, in the order of names.
    """

    first: int = field(default=0, validator=record.at_least(0))


def digest_of(tensor: Any) -> str:
    """Return the SHA-256 of one tensor's type, shape and elements, as 64 hex digits.

    Args:
        tensor: On any device; it is read in pieces, so that a device needs no room for a second one.
    """
    if tensor.layout != torch.strided or tensor.is_meta:
        return NO_MEMORY
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = plain.reshape(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        found.update(flat.numpy())
    else:
        for piece in staged(flat):
            found.update(piece)
    return found.hexdigest()


def staged(flat: Any, chunk_bytes: int = _CHUNK_BYTES) -> Iterator[memoryview]:
    """Yield the bytes of a tensor through memory that is gone afterwards; a piece is valid until the next one.

    A copy on the heap would stay there after it was freed, 12 of 100 samples of a model were found so in an image.

    Args:
        flat: One dimension, of bytes.
        chunk_bytes: Most of a piece.
    """
    if not flat.numel():
        return
    pages = mmap.mmap(-1, min(flat.numel(), chunk_bytes))
    try:
        into = torch.frombuffer(pages, dtype=torch.uint8)
        for piece in flat.split(chunk_bytes):
            into[: piece.numel()].copy_(piece)
            with memoryview(pages) as whole, whole[: piece.numel()] as view:
                yield view
    finally:
        pages.madvise(mmap.MADV_DONTNEED)


def ends_of(model: Any, most_bytes: int) -> Mapping[str, str]:
    """Return a digest of both ends of every parameter and buffer, by name.

    Args:
        model: The module; its memory is there.
        most_bytes: Of each end.
    """
    found = {}
    for name, tensor in named_tensors(model).items():
        span = span_of(tensor)
        if span is None or span.begin == span.end:
            continue
        size = min(most_bytes, span.end - span.begin)
        ends = read_bytes(storage_of(tensor), [(span.begin, size), (span.end - size, size)])
        found[name] = hashlib.sha256(ends).hexdigest()
    return found


def digests_of(model: Callable[[], Any]) -> Operation:
    """Return the operation ``digests`` of a rank.

    It answers in pages, because a reply is small and a model has many tensors: each page hashes its own tensors only.
    It may be asked while the engine serves, but not while its memory is asleep.

    Args:
        model: Returns the module whose parameters and buffers are meant, or None before there is one.
    """

    def digests(request: Mapping[str, Any]) -> Mapping[str, Any]:
        asked = read_request(DigestsRequest, request)
        if (module := model()) is None:
            return {"skipped": True}
        tensors = list(named_tensors(module).items())
        page = _page(tensors[asked.first :])
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="coldsnap-digest") as pool:
            found = dict(zip((name for name, _ in page), pool.map(digest_of, (one for _, one in page)), strict=True))
        following = asked.first + len(page)
        return {
            "digests": found,
            "tensors": len(tensors),
            "next": following if following < len(tensors) else None,
            "bytes": sum(tensor.numel() * tensor.element_size() for _, tensor in page),
        }

    return digests


def _page(tensors: Sequence[tuple[str, Any]]) -> Sequence[tuple[str, Any]]:
    room = _PAGE_BYTES
    for number, (name, _) in enumerate(tensors):
        room -= len(name.encode()) + _ENTRY_BYTES
        if room < 0 and number:
            return tensors[:number]
    return tensors
