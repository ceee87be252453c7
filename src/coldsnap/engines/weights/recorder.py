"""The operations of one load, turned into copy records, and into reasons why a destination has none.

The one rule: a write to a destination is either a copy of bound bytes, which is recorded, or it makes the destination
unsupported. Nothing that reached a destination goes by without one of the two.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from attrs import frozen

from coldsnap.engines.weights.copies import Copy
from coldsnap.engines.weights.destinations import Destinations, Place
from coldsnap.engines.weights.sources import Bound, Sources
from coldsnap.engines.weights.storages import Span, dtype_name, span_of, view_of
from coldsnap.transfer.safetensors import Stored

__all__ = ["Recorder", "Refused"]

_COPY = torch.ops.aten.copy_.default
_COPY_EACH = torch.ops.aten._foreach_copy_.default
_FILL = torch.ops.aten.fill_.Scalar
_FILL_TENSOR = torch.ops.aten.fill_.Tensor
_ZERO = torch.ops.aten.zero_.default
_ZEROS = frozenset({"0", "0.0", "False"})  # -0.0 is another byte


@frozen
class Refused:
    """A destination that is not in the record.

    Attributes:
        reason: The first one.
        bytes: Of the destination.
    """

    reason: str
    bytes: int


class Recorder:
    """What has been seen so far; one for all threads of a load.

    Attributes:
        sources: What is bound.
        destinations: What is looked at.
        copies: Records, in order, each with the place that it was for.
        refused: By name of the destination.
    """

    def __init__(self, model: Any) -> None:
        self.sources = Sources()
        self.destinations = Destinations(model)
        self.copies: list[tuple[Place, Copy]] = []
        self.refused: dict[str, Refused] = {}
        self._views: dict[str, list[Span]] = {}
        self._empty: dict[str, Place] = {}
        self._lock = threading.RLock()

    def bind(self, tensor: Any, stored: Stored | None) -> None:
        """Bind a tensor that a loader is about to get to its range of a file."""
        with self._lock:
            self.sources.bind(tensor, stored)

    def begins(self, tensor: Any) -> Place | None:
        """Note that the loader of a destination begins, and return the destination."""
        with self._lock:
            place, moved = self.destinations.current(tensor)
            if place is not None and moved and place.name in self._views:
                self.refuse(place, "replaced-in-load")
            return place

    def wrote(
        self, func: Any, args: tuple[Any, ...], targets: list[Any], loader: Place | None, scalar: tuple[Any, Any] | None
    ) -> None:
        """Look at an operation that has written.

        Args:
            func: The operation.
            args: What it was called with.
            targets: Tensors that it wrote to.
            loader: The destination whose loader called it, if one did.
            scalar: The number that this loader read last, and the tensor that it read it from.
        """
        with self._lock:
            if func in (_COPY, _FILL_TENSOR):
                self._copied(args[0], args[1], loader)
            elif func is _COPY_EACH:
                for target, source in zip(args[0], args[1], strict=True):
                    self._copied(target, source, loader)
            elif func is _FILL and scalar is not None and (type(scalar[0]), scalar[0]) == (type(args[1]), args[1]):
                self._copied(args[0], scalar[1], loader)
            else:
                zeros = func is _ZERO or (func is _FILL and str(args[1]) in _ZEROS)
                for target in targets:
                    self._mutated(func, target, loader, zeros=zeros)

    def finish(self) -> None:
        """Refuse what a loader copied nothing to, and what shares bytes with a refused destination.

        What was written last to shared bytes may be a copy that is not in the record.
        """
        for name, place in self._empty.items():
            if name not in self._views:
                self.refuse(place, "empty-copy")
        loaded = {place.name: place for place, _ in self.copies}
        open_places = [place for name, place in loaded.items() if name in self.refused]
        while open_places:
            refused = open_places.pop()
            for place in self.destinations.hit(refused.span) if refused.span else ():
                if place.name in loaded and place.name not in self.refused:
                    self.refuse(place, "shares-unsupported")
                    open_places.append(place)

    def refuse(self, place: Place, reason: str) -> None:
        """Make a destination unsupported, unless it is already."""
        self.refused.setdefault(place.name, Refused(reason, place.bytes))

    def _span(self, tensor: Any, loader: Place | None) -> Span | None:
        try:
            return span_of(tensor)
        except (RuntimeError, NotImplementedError):  # a subclass of Tensor without a storage
            if loader is not None:
                self.refuse(loader, "metadata-error")
            return None

    def _copied(self, target: Any, source: Any, loader: Place | None) -> None:
        span, read = self._span(target, loader), self._span(source, loader)
        if span is None:
            return
        if span.begin == span.end:
            if loader is not None:
                self._empty[loader.name] = loader
            return
        bound = None if read is None else self.sources.find(read)
        self.sources.mutated(span)
        places = list(self.destinations.hit(span))
        if not places:
            if loader is not None and bound is not None:
                self.refuse(loader, "destination-not-aliased")
            return
        within = [place for place in places if place.span is not None and place.span.holds(span)]
        if not within:
            for place in places:
                self.refuse(place, "destination-span")
            return
        # Of destinations that share these bytes: the one whose loader runs, else the first name.
        place = next((place for place in within if place is loader), within[0])
        if (reason := _objection(place, target, source, read, bound)) or bound is None:
            for one in places:
                self.refuse(one, reason)
        else:
            self.copies.append((place, _copy(place, target, source, bound)))
            self._views.setdefault(place.name, []).append(span)

    def _mutated(self, func: Any, target: Any, loader: Place | None, *, zeros: bool) -> None:
        span = self._span(target, loader)
        if span is None or span.begin == span.end:
            return
        self.sources.mutated(span)
        for place in self.destinations.hit(span):
            # A recovery clears a destination before it loads, so that zeros from before a copy need no record.
            if not zeros or any(span.overlaps(view) for view in self._views.get(place.name, ())):
                self.refuse(place, f"mutation:{func._schema.name}")  # noqa: SLF001  it has no other name


def _objection(place: Place, target: Any, source: Any, read: Span | None, bound: Bound | None) -> str:
    """Return why a copy cannot be recorded, empty when it can."""
    if bound is None or read is None:
        return "source-not-aliased"
    if bound.stored is None:
        return bound.reason
    if not bound.span.holds(read):
        return "source-span"
    if target.shape != source.shape and source.numel() != 1:  # one number for all elements is the same in a recovery
        return "shape-mismatch"
    if min((*target.stride(), *source.stride()), default=0) < 0:
        return "metadata-error"
    if None in (place.dtype, dtype_name(target.dtype), dtype_name(source.dtype)):
        return "metadata-error"
    return ""


def _copy(place: Place, target: Any, source: Any, bound: Bound) -> Copy:
    stored, span = bound.stored, place.span
    if stored is None or span is None:
        raise AssertionError(f"a copy to {place.name} without a source or a destination")
    return Copy(
        source_name=stored.name,
        source_path=stored.path,
        source_dtype=stored.dtype,
        source_shape=stored.shape,
        source_file_offset=stored.file_offset,
        source_length=stored.length,
        source_view=view_of(source, bound.span.begin),
        destination_name=place.name,
        destination_dtype=place.dtype or "",
        destination_shape=place.shape,
        destination_view=view_of(target, span.begin),
        copy_bytes=target.numel() * target.element_size(),
    )
