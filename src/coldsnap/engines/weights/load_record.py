"""The record of one load, and where the destinations are when the memory is to be divided.

The one rule: what is written is decided at the end. A destination that is not the memory that was loaded any more, or
that has other bytes, stays residual, with its reason.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

import torch
from attrs import evolve, field, frozen

from coldsnap.engines.weights.copies import Copy, Placed, View
from coldsnap.engines.weights.destinations import Place, named_tensors
from coldsnap.engines.weights.recorder import Refused
from coldsnap.engines.weights.split import Written
from coldsnap.engines.weights.storages import read_bytes, span_of, storage_of
from coldsnap.errors import ContractError

__all__ = ["CHANGED", "REPLACED", "STRETCHES", "LoadRecord", "Settled"]

REPLACED = "replaced-after-load"
CHANGED = "changed-after-load"
STRETCHES = "too-many-stretches"

T = TypeVar("T")

_MAX_STRETCHES = 1 << 16  # of one destination; each becomes an extent with a digest of its own
_SAMPLE_BYTES = 64


@frozen(kw_only=True)
class Settled:
    """What a load wrote, at its final addresses.

    Attributes:
        written: Stretches, one for each destination that was copied completely.
        kept: Reason → bytes of the destinations that were left out.
        unsupported: Name of each of them → reason.
        copies: The copies that wrote the stretches, in the order in which they were done.
        derived: Parameters and buffers that no such copy explains → bytes.
    """

    written: tuple[Written, ...]
    kept: Mapping[str, int]
    unsupported: Mapping[str, str]
    copies: tuple[Placed, ...] = ()
    derived: Mapping[str, int] = field(factory=dict)


@frozen(kw_only=True)
class LoadRecord:
    """What one load copied.

    Attributes:
        copies: In the order in which they were done; those to unsupported destinations are left out.
        unsupported: Name of a destination → why what it holds is not known.
    """

    copies: tuple[Copy, ...]
    unsupported: Mapping[str, str]
    _bytes: Mapping[str, int]
    _places: Mapping[str, Place] = field(repr=False)
    _samples: Mapping[str, bytes] = field(repr=False)
    _module: Any = field(repr=False)  # a weak reference

    @classmethod
    def of(cls, model: Any, copies: Sequence[tuple[Place, Copy]], refused: Mapping[str, Refused]) -> Self:
        """Make the record, while the memory holds what was just loaded."""
        good = [(place, copy) for place, copy in copies if place.name not in refused]
        places = {place.name: place for place, _ in good}
        tensors = named_tensors(model)
        by_name = _by_name(copy for _, copy in good)
        return cls(
            copies=tuple(copy for _, copy in good),
            unsupported={name: one.reason for name, one in sorted(refused.items())},
            bytes={name: one.bytes for name, one in refused.items()},
            places=places,
            samples={
                name: _sample(tensors[name], places[name], views)
                for name, views in by_name.items()
                if _is_there(tensors.get(name), places[name])
            },
            module=weakref.ref(model),
        )

    def rebased(self, outer: Any) -> LoadRecord:
        """Return the record with the names that its destinations have in a module around the one that was loaded.

        Raises:
            ContractError: ``outer`` does not have that module.
        """
        inner = self._module()
        prefix = next((name for name, module in outer.named_modules() if module is inner), None)
        if inner is None or prefix is None:
            raise ContractError("the model that was loaded is no part of the model whose memory is to be divided")
        if not prefix:
            return self
        return evolve(
            self,
            copies=tuple(evolve(copy, destination_name=f"{prefix}.{copy.destination_name}") for copy in self.copies),
            unsupported=_prefixed(prefix, self.unsupported),
            bytes=_prefixed(prefix, self._bytes),
            places=_prefixed(prefix, self._places),
            samples=_prefixed(prefix, self._samples),
            module=weakref.ref(outer),
        )

    def written(self, model: Any) -> Iterator[Written]:
        """Yield what was written, at the addresses that it has now; see :meth:`settle`."""
        yield from self.settle(model).written

    def settle(self, model: Any, *, compare: bool = True) -> Settled:
        """Look where the destinations are now, and which of them still hold what was copied.

        Each copy is sampled at both ends, 64 bytes each, and compared with what was there after the load.

        Args:
            model: The one that was loaded, or one around it; its memory is there and at rest.
            compare: Whether to look at the memory at all. Without, its addresses may have no backing.

        Raises:
            ContractError: It is another model.
        """
        record = self.rebased(model)
        tensors, kept, unsupported = named_tensors(model), Counter[str](), dict(record.unsupported)
        for name, reason in record.unsupported.items():
            kept[reason] += record._bytes[name]  # noqa: SLF001  of the same class
        written: list[Written] = []
        bases: dict[str, int] = {}
        for name, views in _by_name(record.copies).items():
            found = record._stretches(name, tensors.get(name), views, compare=compare)  # noqa: SLF001
            if isinstance(found, str):
                unsupported[name] = found
                kept[found] += record._places[name].bytes  # noqa: SLF001
            else:
                written += found
                bases[name] = found[0].base
        return Settled(
            written=tuple(written),
            kept=dict(kept),
            unsupported=unsupported,
            copies=tuple(
                Placed(copy=copy, base=bases[copy.destination_name])
                for copy in record.copies
                if copy.destination_name in bases
            ),
            derived=_derived(tensors, bases),
        )

    def _stretches(self, name: str, tensor: Any, views: Sequence[View], *, compare: bool) -> list[Written] | str:
        place = self._places[name]
        if not _is_there(tensor, place) or place.span is None:
            return REPLACED
        if compare and _sample(tensor, place, views) != self._samples.get(name):
            return CHANGED
        ranges = _ranges(views)
        if ranges is None:
            return STRETCHES
        base = storage_of(tensor).data_ptr() + place.span.begin
        return [Written(address=base + begin, size=end - begin, semantic=name, offset=begin) for begin, end in ranges]


def _derived(tensors: Mapping[str, Any], explained: Iterable[str]) -> dict[str, int]:
    """Return the tensors that nothing explains, each memory under one name."""
    seen = {_memory(tensors[name]) for name in explained}
    derived: dict[str, int] = {}
    for name, tensor in tensors.items():
        if (memory := _memory(tensor)) not in seen:
            seen.add(memory)
            derived[name] = tensor.numel() * tensor.element_size()
    return derived


def _memory(tensor: Any) -> Any:
    return span_of(tensor) or id(tensor)


def _prefixed(prefix: str, table: Mapping[str, T]) -> dict[str, T]:
    return {f"{prefix}.{name}": value for name, value in table.items()}


def _by_name(copies: Iterable[Copy]) -> dict[str, list[View]]:
    views: defaultdict[str, list[View]] = defaultdict(list)
    for copy in copies:
        views[copy.destination_name].append(copy.destination_view)
    return dict(sorted(views.items()))


def _is_there(tensor: Any, place: Place) -> bool:
    """Tell whether a tensor still lies in the memory that a place was; its view of it may be another one."""
    span = None if tensor is None else span_of(tensor)
    if span is None or place.span is None or span.storage != place.span.storage:
        return False
    return bool(storage_of(tensor).nbytes() >= place.span.end)


def _sample(tensor: Any, place: Place, views: Iterable[View]) -> bytes:
    base = 0 if place.span is None else place.span.begin
    ends = (end for view in views for end in view.ends(_SAMPLE_BYTES))
    return read_bytes(storage_of(tensor), ((base + offset, size) for offset, size in ends))


def _ranges(views: Sequence[View]) -> list[tuple[int, int]] | None:
    """Return the bytes of some views as ranges (begin, end), in order and apart; None for too many."""
    if not any(view.dense()[1] for view in views):
        return _merged(sorted((view.offset_bytes, view.offset_bytes + view.span_bytes) for view in views))
    # Rows of one copy may fill the gaps between the rows of another, so that bytes are counted, not rows.
    unit = math.gcd(*(number for view in views for number in (view.width, view.offset_bytes)))
    end = max(view.offset_bytes + view.span_bytes for view in views)
    seen = torch.zeros(end // unit + 2, dtype=torch.bool, device="cpu")  # False at both ends
    for view in views:
        width = view.width // unit
        stride = (*(step * width for step in view.stride), 1)
        seen.as_strided((*view.shape, width), stride, 1 + view.offset_bytes // unit).fill_(True)
    edges = (seen[1:] != seen[:-1]).nonzero().flatten()
    if len(edges) > 2 * _MAX_STRETCHES:
        return None
    places = [int(edge) * unit for edge in edges.tolist()]
    return list(zip(places[::2], places[1::2], strict=True))


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in ranges:
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged
