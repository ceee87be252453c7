"""Tensors that a loader was given, bound to the bytes of the file that they are.

The one rule: a tensor is known by its storage and place, never by its name or its address alone. What was copied from a
binding's storage after someone wrote there is not from the file.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any

from attrs import frozen

from coldsnap.engines.weights.storages import Span, StorageWeakRef, dtype_name, span_of, storage_of
from coldsnap.transfer.safetensors import Stored

__all__ = ["Bound", "Sources"]


@frozen
class Bound:
    """A range of a storage, and what it holds.

    Attributes:
        span: The range.
        stored: The tensor of the file; None when the range holds something else.
        reason: Why it does.
    """

    span: Span
    stored: Stored | None
    reason: str = ""


class Sources:
    """What is bound at the moment."""

    def __init__(self) -> None:
        self._bound: dict[int, list[Bound]] = {}
        self._held: dict[int, StorageWeakRef] = {}

    def bind(self, tensor: Any, stored: Stored | None) -> None:
        """Bind a tensor that a loader is about to get.

        Args:
            tensor: It.
            stored: What the header says of its name; None when the files do not have the name.
        """
        span = span_of(tensor)
        if span is None or span.begin == span.end:
            return
        if span.storage not in self._held:
            self._held[span.storage] = StorageWeakRef(storage_of(tensor))
        self._drop(span)
        same = stored is not None and _is(tensor, span, stored)
        self._insert(Bound(span, stored if same else None, "" if same else "source-mismatch"))

    def find(self, span: Span) -> Bound | None:
        """Return what the first byte of a span is bound to."""
        bound = self._bound.get(span.storage, [])
        at = bisect_right(bound, span.begin, key=lambda one: one.span.begin)
        return bound[at - 1] if at and span.begin < bound[at - 1].span.end else None

    def mutated(self, span: Span) -> None:
        """Note that someone wrote into a span."""
        for one in self._drop(span):
            self._insert(Bound(one.span, None, "source-mutated"))

    def _insert(self, one: Bound) -> None:
        bound = self._bound.setdefault(one.span.storage, [])
        bound.insert(bisect_right(bound, one.span.begin, key=lambda other: other.span.begin), one)

    def _drop(self, span: Span) -> list[Bound]:
        bound = self._bound.get(span.storage, [])
        # Ranges are disjoint and in order, so that their ends are in order too.
        first = bisect_right(bound, span.begin, key=lambda one: one.span.end)
        last = bisect_left(bound, span.end, key=lambda one: one.span.begin)
        dropped = bound[first:last]
        del bound[first:last]
        return dropped


def _is(tensor: Any, span: Span, stored: Stored) -> bool:
    """Tell whether a tensor can be exactly the bytes that the header describes."""
    return (
        dtype_name(tensor.dtype) == stored.dtype
        and tuple(tensor.shape) == stored.shape
        and tensor.is_contiguous()
        and span.end - span.begin == stored.length
    )
