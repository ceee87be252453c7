"""Parameters and buffers, and where they lie.

The one rule: a destination has one name. A tensor that a model has under several (tied weights) goes by the first in
the order of names, so that two processes agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import define, field

from coldsnap.engines.weights.storages import Span, StorageWeakRef, dtype_name, span_of, storage_of

__all__ = ["Destinations", "Place", "named_tensors"]


@define(eq=False)
class Place:
    """Where a destination lay while it was written.

    Attributes:
        name: Of the parameter or buffer.
        span: Its bytes.
        dtype: Its type, as safetensors names it; None without one.
        shape: Its shape.
        bytes: Of its elements.
        storage: Holds the identity of the storage; None while there is no memory behind the destination.
    """

    name: str
    span: Span | None
    dtype: str | None
    shape: tuple[int, ...]
    bytes: int
    storage: StorageWeakRef | None = field(repr=False)


def named_tensors(model: Any) -> dict[str, Any]:
    """Return every parameter and buffer under each of its names, in the order of names."""
    both = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return dict(sorted(both))


class Destinations:
    """The parameters and buffers of one model, found by the bytes that are written."""

    def __init__(self, model: Any) -> None:
        self._names: dict[int, str] = {}
        self._places: dict[str, Place] = {}
        self._by_storage: dict[int, list[Place]] = {}
        self.tensors: list[Any] = []  # held: an identity in ``_names`` must not be handed out again
        for name, tensor in named_tensors(model).items():
            if id(tensor) not in self._names:
                self._names[id(tensor)] = name
                self.tensors.append(tensor)
                self._add(_place(name, tensor))

    def current(self, tensor: Any) -> tuple[Place | None, bool]:
        """Return the place of a destination that is about to be written, and whether it has moved since it was seen."""
        name = self._names.get(id(tensor))
        if name is None:
            return None, False
        known, found = self._places[name], _place(name, tensor)
        if found.span == known.span:
            return known, False
        if known.span is not None:
            self._by_storage[known.span.storage].remove(known)
        self._add(found)
        return found, known.span is not None

    def hit(self, span: Span) -> Iterator[Place]:
        """Yield the destinations that a write to a span may touch, in the order of names."""
        for place in self._by_storage.get(span.storage, ()):
            if place.span is not None and place.span.overlaps(span):
                yield place

    def _add(self, place: Place) -> None:
        self._places[place.name] = place
        if place.span is not None:
            there = self._by_storage.setdefault(place.span.storage, [])
            there.append(place)
            there.sort(key=lambda one: one.name)


def _place(name: str, tensor: Any) -> Place:
    span = span_of(tensor)
    return Place(
        name=name,
        span=span,
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        bytes=tensor.numel() * tensor.element_size(),
        storage=None if span is None else StorageWeakRef(storage_of(tensor)),
    )
