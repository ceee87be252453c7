"""Which bytes of the preserved allocations are the model's: the pack gets them, the residual gets all the others.

The one rule: what the pack gets depends on the destinations alone. Where the allocator put them, in allocations of
which size, in which order they were written and what else lies there changes no extent's size and no semantic id, so
that captures with another KV cache share a pack.

This is pure arithmetic: no torch, no file, no device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

from attrs import field, frozen

from coldsnap.artifact import canonical, record
from coldsnap.artifact.extents import Allocation, Coverage, Extent, ExtentMap, prove
from coldsnap.engines.weights.copies import Placed
from coldsnap.errors import CoverageError

__all__ = ["AMBIGUOUS_NAME", "CROSSES_ALLOCATION", "OUTSIDE_ALLOCATIONS", "Split", "Written", "semantic_id", "split"]

AMBIGUOUS_NAME = "ambiguous-name"
CROSSES_ALLOCATION = "crosses-allocation"
OUTSIDE_ALLOCATIONS = "outside-allocations"


@frozen(kw_only=True)
class Written:
    """One stretch of memory that a load wrote, seen exactly.

    Attributes:
        address: First byte.
        size: Bytes.
        semantic: Name of the destination, without an address: ``model.layers.0.self_attn.qkv_proj.weight``.
        offset: Where in the destination the stretch begins, bytes from the destination's first element.
    """

    address: int = field(validator=record.at_least(1))
    size: int = field(validator=record.at_least(1))
    semantic: str
    offset: int = field(default=0, validator=record.at_least(0))

    @property
    def base(self) -> int:
        """The address of the destination's first element."""
        return self.address - self.offset


@frozen(kw_only=True)
class Split:
    """Allocations, divided.

    Attributes:
        allocations: Ascending by device and address.
        model: What goes into the pack: one extent for each destination that was written completely.
        residual: Every other byte.
        vacant: Bytes that nothing lives in: what the engine's allocator holds in reserve. They are not preserved.
        semantic_ids: 64 hex digits for each model extent, without an address in them, all different.
        kept: Reason → bytes that could have been the model's and stayed out of the pack. All of them are in the
            residual, but those that lie outside every allocation: these are in the process image.
        coverage: The receipt: model, residual and what is vacant are every byte exactly once.
        copies: The copies that wrote the model's bytes, in their order; some may have gone where nothing is preserved.
        derived: Parameters and buffers that no copy explains → bytes.
    """

    allocations: tuple[Allocation, ...]
    model: ExtentMap
    residual: ExtentMap
    vacant: ExtentMap
    semantic_ids: Mapping[Extent, str]
    kept: Mapping[str, int]
    coverage: Coverage
    copies: tuple[Placed, ...] = ()
    derived: Mapping[str, int] = field(factory=dict)

    def beside(self, model: ExtentMap) -> ExtentMap:
        """Return every preserved byte that a pack of these extents leaves out."""
        return ExtentMap.of(self.allocations, (*model.extents, *self.vacant.extents)).complement()


def split(
    allocations: Iterable[Allocation],
    written: Iterable[Written],
    kept: Mapping[str, int] | None = None,
    vacant: Iterable[tuple[int, int]] = (),
    *,
    copies: Iterable[Placed] = (),
    derived: Mapping[str, int] | None = None,
) -> Split:
    """Divide allocations into model and residual.

    Stretches of one destination that touch or overlap become one extent. Destinations that share a byte (tied weights)
    become one extent, which has the name of the first of them in the order of names. A run that does not lie in one
    allocation is left out as a whole, since where it would be cut depends on the allocator.

    Args:
        allocations: What is preserved, in any order, disjoint; addresses of all devices are one address space.
        written: What the load wrote, in any order, stretches as often as they were written.
        kept: What the caller left out already: reason → bytes.
        vacant: Where nothing lives, by the engine's own allocator: address and size, disjoint, in any order. What a
            load wrote is never taken for vacant, and neither is what leaves its allocation.
        copies: Which copies wrote it, for a recovery.
        derived: What no copy explains.

    Raises:
        CoverageError: Two allocations overlap, of whatever devices; or two vacant stretches.
    """
    ordered = tuple(sorted(allocations, key=_place))
    reasons = Counter(kept or {})
    runs = _joined(_runs(written, reasons), touching=False)
    named = {extent: run.semantic_id for extent, run in _placed(ordered, runs, reasons)}
    model = ExtentMap.of(ordered, named)
    empty = ExtentMap.of(ordered, _vacancies(ordered, vacant, model))
    residual = ExtentMap.of(ordered, (*model.extents, *empty.extents)).complement()
    maps = (model, residual, empty) if empty.extents else (model, residual)
    return Split(
        allocations=ordered,
        model=model,
        residual=residual,
        vacant=empty,
        semantic_ids=MappingProxyType({extent: named[extent] for extent in model.extents}),
        kept=MappingProxyType({reason: size for reason, size in sorted(reasons.items()) if size}),
        coverage=prove(ordered, *(one.extents for one in maps)),
        copies=tuple(copies),
        derived=MappingProxyType(dict(derived or {})),
    )


def semantic_id(name: str, offset: int, size: int) -> str:
    """Name a stretch of a destination without an address (rule bootstrap.3).

    Args:
        name: Of the destination.
        offset: First byte, from the destination's first element.
        size: Bytes.
    """
    return canonical.hex_of(canonical.digest([name, offset, size]))


def _place(allocation: Allocation) -> tuple[int, int]:
    return -1 if allocation.device is None else allocation.device, allocation.address


@frozen(order=True)
class _Run:
    """A range of addresses, and the destination it is named after."""

    begin: int
    end: int
    name: str
    base: int

    @property
    def size(self) -> int:
        return self.end - self.begin

    @property
    def semantic_id(self) -> str:
        # The offset is negative where an alias with a later name begins before the named destination.
        return semantic_id(self.name, self.begin - self.base, self.size)

    def joined(self, other: _Run) -> _Run:
        named = min(self, other, key=lambda run: run.name)
        return _Run(min(self.begin, other.begin), max(self.end, other.end), named.name, named.base)


def _runs(written: Iterable[Written], reasons: Counter[str]) -> Iterator[_Run]:
    """Yield each destination's stretches, joined where they touch; a name for two places would give an id twice."""
    by_name: defaultdict[str, list[_Run]] = defaultdict(list)
    for one in written:
        by_name[one.semantic].append(_Run(one.address, one.address + one.size, one.semantic, one.base))
    for stretches in by_name.values():
        runs = _joined(stretches, touching=True)
        if len({run.base for run in stretches}) == 1:
            yield from runs
        else:
            reasons[AMBIGUOUS_NAME] += sum(run.size for run in runs)


def _joined(runs: Iterable[_Run], *, touching: bool) -> list[_Run]:
    """Join the runs that share a byte, or that touch."""
    joined: list[_Run] = []
    for run in sorted(runs):
        if joined and run.begin < joined[-1].end + touching:
            joined[-1] = joined[-1].joined(run)
        else:
            joined.append(run)
    return joined


def _placed(
    allocations: Sequence[Allocation], runs: Iterable[_Run], reasons: Counter[str]
) -> Iterator[tuple[Extent, _Run]]:
    """Yield the runs that lie in one allocation, with their extents."""
    by_address = sorted(range(len(allocations)), key=lambda index: allocations[index].address)
    bases = [allocations[index].address for index in by_address]
    _require_one_address_space([allocations[index] for index in by_address])
    for run in runs:
        at = bisect_right(bases, run.begin) - 1
        index = by_address[at] if at >= 0 else -1
        if index >= 0 and run.end <= allocations[index].address + allocations[index].size:
            offset = run.begin - allocations[index].address
            yield Extent(allocation=index, offset=offset, size=run.size), run
        elif touches := sum(_common_bytes(run, allocation) for allocation in allocations):
            reasons[CROSSES_ALLOCATION] += touches
        else:
            reasons[OUTSIDE_ALLOCATIONS] += run.size


def _vacancies(
    allocations: Sequence[Allocation], vacant: Iterable[tuple[int, int]], model: ExtentMap
) -> Iterator[Extent]:
    by_address = sorted(range(len(allocations)), key=lambda index: allocations[index].address)
    bases = [allocations[index].address for index in by_address]
    starts = [(extent.allocation, extent.offset) for extent in model.extents]
    for address, size in vacant:
        at = bisect_right(bases, address) - 1
        index = by_address[at] if at >= 0 else -1
        if index < 0 or size <= 0 or address + size > allocations[index].address + allocations[index].size:
            continue
        extent = Extent(allocation=index, offset=address - allocations[index].address, size=size)
        before = bisect_right(starts, (index, extent.end - 1)) - 1
        last = model.extents[before] if before >= 0 else None
        if last is None or last.allocation != index or last.end <= extent.offset:
            yield extent


def _require_one_address_space(allocations: Sequence[Allocation]) -> None:
    # CUDA's unified addresses are different on every device and on the host, so that an address tells its device.
    for before, after in pairwise(allocations):
        if before.address + before.size > after.address:
            raise CoverageError(
                f"the allocations at {before.address:#x} (device {before.device}) and {after.address:#x} (device "
                f"{after.device}) overlap (rule extent.1); report the memory provider that named both",
                at=(f"{after.address:#x}", 0, "overlap"),
            )


def _common_bytes(run: _Run, allocation: Allocation) -> int:
    return max(0, min(run.end, allocation.address + allocation.size) - max(run.begin, allocation.address))
