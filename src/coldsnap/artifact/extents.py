"""Extents of allocations, and the proof that they cover every byte exactly once.

The one rule: model and residual extents are disjoint and together are every byte of every preserved allocation.
Anything else, by one byte, is a CoverageError that names the allocation, the offset and the kind: ``gap``,
``overlap``, ``duplicate`` or ``size``.

This is pure arithmetic: no torch, no file, no device. Addresses are data; offsets count from the base of an allocation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from attrs import field, frozen

from coldsnap.artifact import record
from coldsnap.errors import CoverageError

__all__ = [
    "PAGE_BYTES",
    "Allocation",
    "Coverage",
    "Extent",
    "ExtentMap",
    "common_pieces",
    "padded",
    "page_split",
    "prove",
]

PAGE_BYTES = 4096


@frozen(kw_only=True)
class Allocation:
    """A range of memory whose address survives a restore.

    Attributes:
        address: Base, in the address space of its device (or of the process, for host memory).
        size: Bytes.
        region: What it is for: ``weights``, ``kv_cache``, ``cuda_graph``, …
        device: Slot of the device within the unit; None for host memory.
    """

    address: int = field(validator=record.at_least(1))
    size: int = field(validator=record.at_least(1))
    region: str = "weights"
    device: int | None = None


@frozen(kw_only=True, order=True)
class Extent:
    """A part of an allocation.

    Attributes:
        allocation: Index of the allocation.
        offset: First byte, from the allocation's base.
        size: Bytes.
    """

    allocation: int
    offset: int
    size: int

    @property
    def end(self) -> int:
        """The offset after the last byte."""
        return self.offset + self.size


@frozen(kw_only=True)
class Coverage:
    """The receipt of :func:`prove`.

    Attributes:
        allocations: Count.
        bytes: Of all allocations.
        extents: Count, for each map.
        mapped_bytes: Bytes, for each map; they add up to ``bytes``.
    """

    allocations: int
    bytes: int
    extents: tuple[int, ...]
    mapped_bytes: tuple[int, ...]

    def __str__(self) -> str:
        """Say it in one line."""
        parts = " + ".join(
            f"{size:,} in {count} extents" for size, count in zip(self.mapped_bytes, self.extents, strict=True)
        )
        return f"{self.bytes:,} bytes in {self.allocations} allocations = {parts}; no gap, no overlap"


@frozen
class ExtentMap:
    """Disjoint extents inside given allocations, in order.

    Attributes:
        allocations: What the extents are parts of, ascending by device and address, disjoint.
        extents: Ascending by allocation and offset.
    """

    allocations: tuple[Allocation, ...]
    extents: tuple[Extent, ...]

    @classmethod
    def of(cls, allocations: Sequence[Allocation], extents: Iterable[Extent]) -> ExtentMap:
        """Build a map from extents in any order.

        Raises:
            CoverageError: An extent is empty or leaves its allocation (size), is named twice (duplicate), or overlaps
                another (overlap); or two allocations do.
        """
        _require_disjoint(allocations)
        ordered = tuple(sorted(extents))
        previous: Extent | None = None
        for extent in ordered:
            _require_inside(allocations, extent)
            if previous == extent:
                raise _error(allocations, extent, "duplicate", "is mapped twice")
            if previous is not None and previous.allocation == extent.allocation and previous.end > extent.offset:
                raise _error(allocations, extent, "overlap", f"overlaps the extent at {previous.offset:#x}")
            previous = extent
        return cls(tuple(allocations), ordered)

    @property
    def bytes(self) -> int:
        """How many bytes are mapped."""
        return sum(extent.size for extent in self.extents)

    def complement(self) -> ExtentMap:
        """Return the map of every byte that this one leaves out, in extents as long as possible."""
        return ExtentMap(self.allocations, tuple(self._gaps()))

    def _gaps(self) -> Iterator[Extent]:
        by_allocation: list[list[Extent]] = [[] for _ in self.allocations]
        for extent in self.extents:
            by_allocation[extent.allocation].append(extent)
        for index, allocation in enumerate(self.allocations):
            position = 0
            for begin, end in (*((e.offset, e.end) for e in by_allocation[index]), (allocation.size, allocation.size)):
                if position < begin:
                    yield Extent(allocation=index, offset=position, size=begin - position)
                position = end

    def merged(self) -> ExtentMap:
        """Return the map of the same bytes in extents as long as possible."""
        joined: list[Extent] = []
        for extent in self.extents:
            if joined and joined[-1].allocation == extent.allocation and joined[-1].end == extent.offset:
                joined[-1] = Extent(
                    allocation=extent.allocation, offset=joined[-1].offset, size=joined[-1].size + extent.size
                )
            else:
                joined.append(extent)
        return ExtentMap(self.allocations, tuple(joined))

    def at(self, allocation: int, offset: int) -> Extent | None:
        """Return the extent that holds a byte, or None."""
        index = bisect_right(self.extents, (allocation, offset), key=lambda extent: (extent.allocation, extent.offset))
        found = self.extents[index - 1] if index else None
        holds = found is not None and found.allocation == allocation and offset < found.end
        return found if holds else None


def prove(allocations: Sequence[Allocation], *maps: Iterable[Extent]) -> Coverage:
    """Prove that the maps are disjoint and together cover every byte of every allocation.

    Args:
        allocations: What is preserved.
        maps: For example the model extents and the residual extents.

    Returns:
        The receipt.

    Raises:
        CoverageError: With ``at = (allocation address, offset, kind)``.
    """
    lists = [list(extents) for extents in maps]
    whole = ExtentMap.of(allocations, (extent for extents in lists for extent in extents))
    gap = next(iter(whole.complement().extents), None)
    if gap is not None:
        raise _error(allocations, gap, "gap", f"is mapped by nothing for {gap.size} bytes")
    return Coverage(
        allocations=len(allocations),
        bytes=sum(allocation.size for allocation in allocations),
        extents=tuple(len(extents) for extents in lists),
        mapped_bytes=tuple(sum(extent.size for extent in extents) for extents in lists),
    )


def common_pieces(first: ExtentMap, second: ExtentMap) -> ExtentMap:
    """Cut two maps at each other's borders.

    Returns:
        The pieces of all bytes that either maps. Each extent of either map is a run of whole pieces, so that one
        stored copy of a piece serves both.
    """
    if first.allocations != second.allocations:
        raise CoverageError("the two maps are not about the same allocations", at=("allocations", 0, "size"))
    borders = sorted(
        {
            (extent.allocation, edge)
            for one in (first, second)
            for extent in one.extents
            for edge in (extent.offset, extent.end)
        }
    )
    pieces = [
        Extent(allocation=allocation, offset=begin, size=end - begin)
        for (allocation, begin), (next_allocation, end) in pairwise(borders)
        if allocation == next_allocation and (first.at(allocation, begin) or second.at(allocation, begin))
    ]
    return ExtentMap(first.allocations, tuple(pieces))


def page_split(extent: Extent, *, page_bytes: int = PAGE_BYTES, base: int = 0) -> tuple[Extent, ...]:
    """Split an extent into an edge, an interior of whole pages, and an edge; direct I/O takes the interior.

    Args:
        extent: What to split.
        page_bytes: Size of a page, a power of two.
        base: Address of offset 0: pages count from address 0.

    Returns:
        One to three extents, in order, none of them empty.
    """
    begin, end = base + extent.offset, base + extent.end
    first = min(padded(begin, page_bytes), end)
    last = max(end // page_bytes * page_bytes, first)
    edges = sorted({begin, first, last, end})
    return tuple(
        Extent(allocation=extent.allocation, offset=low - base, size=high - low) for low, high in pairwise(edges)
    )


def padded(size: int, page_bytes: int = PAGE_BYTES) -> int:
    """Round up to whole pages."""
    return -(-size // page_bytes) * page_bytes


def _error(allocations: Sequence[Allocation], extent: Extent, kind: str, what: str) -> CoverageError:
    index = extent.allocation
    name = f"{allocations[index].address:#x}" if 0 <= index < len(allocations) else f"#{index}"
    sentence = f"allocation {name} at offset {extent.offset:#x} ({extent.size} bytes) {what} ({kind}, rule extent.1); "
    return CoverageError(f"{sentence}the artifact cannot be used, capture anew", at=(name, extent.offset, kind))


def _require_inside(allocations: Sequence[Allocation], extent: Extent) -> None:
    if not 0 <= extent.allocation < len(allocations):
        raise _error(allocations, extent, "size", "belongs to no allocation")
    if extent.size <= 0 or extent.offset < 0 or extent.end > allocations[extent.allocation].size:
        raise _error(allocations, extent, "size", "is empty or leaves its allocation")


def _require_disjoint(allocations: Sequence[Allocation]) -> None:
    def place(index: int) -> tuple[int, int]:
        allocation = allocations[index]
        return -1 if allocation.device is None else allocation.device, allocation.address

    for index in range(1, len(allocations)):
        before, after = allocations[index - 1], allocations[index]
        if place(index - 1) >= place(index):
            raise _error(
                allocations, Extent(allocation=index, offset=0, size=after.size), "duplicate", "is out of order"
            )
        if before.device == after.device and before.address + before.size > after.address:
            raise _error(
                allocations, Extent(allocation=index, offset=0, size=after.size), "overlap", "overlaps the one before"
            )
