"""Model and residual extents cover every byte of every allocation exactly once."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory import BASE, maps

from coldsnap.artifact.extents import (
    Allocation,
    Extent,
    ExtentMap,
    common_pieces,
    padded,
    page_split,
    prove,
)
from coldsnap.errors import CoverageError

ALLOCATIONS = (Allocation(address=BASE, size=100), Allocation(address=BASE + 4096, size=50))


def extent(allocation: int, offset: int, size: int) -> Extent:
    return Extent(allocation=allocation, offset=offset, size=size)


def bytes_of(mapped: ExtentMap) -> set[tuple[int, int]]:
    return {(one.allocation, offset) for one in mapped.extents for offset in range(one.offset, one.end)}


@given(maps(most=300))
def test_a_map_and_its_complement_are_every_byte_exactly_once(mapped: ExtentMap) -> None:
    rest = mapped.complement()
    every = {(index, offset) for index, one in enumerate(mapped.allocations) for offset in range(one.size)}

    assert bytes_of(mapped) | bytes_of(rest) == every
    assert not bytes_of(mapped) & bytes_of(rest)
    assert (mapped.bytes, rest.bytes) == prove(mapped.allocations, mapped.extents, rest.extents).mapped_bytes


@given(maps())
def test_the_complement_of_the_complement_is_the_map_merged(mapped: ExtentMap) -> None:
    assert mapped.merged() == mapped.complement().complement()
    assert mapped.bytes == mapped.merged().bytes


@given(maps(), st.data())
def test_any_byte_too_few_or_too_many_is_refused(mapped: ExtentMap, data) -> None:
    rest = mapped.complement()
    whole = [*mapped.extents, *rest.extents]
    index = data.draw(st.integers(0, len(whole) - 1))
    victim = whole[index]
    others = whole[:index] + whole[index + 1 :]

    with pytest.raises(CoverageError) as gap:
        prove(mapped.allocations, others)
    assert gap.value.at == (f"{mapped.allocations[victim.allocation].address:#x}", victim.offset, "gap")
    with pytest.raises(CoverageError) as twice:
        prove(mapped.allocations, whole, [victim])
    assert twice.value.at[2] == "duplicate"
    longer = attrs.evolve(victim, size=victim.size + 1)
    with pytest.raises(CoverageError) as beyond:
        prove(mapped.allocations, others, [longer])
    assert beyond.value.at[2] in {"overlap", "size"}


@given(maps(most=300), st.data())
def test_common_pieces_serve_both_maps(first: ExtentMap, data) -> None:
    second = first.complement() if data.draw(st.booleans()) else first
    kept = [one for one in second.extents if data.draw(st.booleans())]
    second = ExtentMap.of(first.allocations, kept)

    pieces = common_pieces(first, second)

    assert bytes_of(first) | bytes_of(second) == bytes_of(pieces)
    for mapped in (first, second):
        mine = [one for one in pieces.extents if mapped.at(one.allocation, one.offset)]
        assert bytes_of(mapped) == bytes_of(ExtentMap.of(first.allocations, mine))
    assert pieces == ExtentMap.of(first.allocations, pieces.extents)


@given(st.integers(0, 20_000), st.integers(1, 20_000), st.integers(0, 9_000))
def test_a_page_split_is_edge_interior_edge(offset: int, size: int, base: int) -> None:
    parts = page_split(extent(0, offset, size), base=base)

    assert (offset, offset + size) == (parts[0].offset, parts[-1].end)
    assert all(left.end == right.offset for left, right in zip(parts, parts[1:], strict=False))
    pages = [one for one in parts if not (base + one.offset) % 4096 and not (base + one.end) % 4096]
    assert len(parts) - len(pages) <= 2
    assert all(one.size < 4096 for one in parts if one not in pages) or len(parts) == 1 or not pages


@given(maps(), st.integers(0, 3), st.integers(0, 20_000))
def test_the_extent_at_a_byte_is_the_one_that_holds_it(mapped: ExtentMap, allocation: int, offset: int) -> None:
    found = mapped.at(allocation, offset)
    holders = [one for one in mapped.extents if one.allocation == allocation and one.offset <= offset < one.end]

    assert holders == ([found] if found else [])


@pytest.mark.parametrize(
    ("extents", "at"),
    [
        ([(0, 0, 100)], (hex(BASE + 4096), 0, "gap")),
        ([(0, 0, 99), (1, 0, 50)], (hex(BASE), 99, "gap")),
        ([(0, 1, 99), (1, 0, 50)], (hex(BASE), 0, "gap")),
        ([(0, 0, 60), (0, 50, 50), (1, 0, 50)], (hex(BASE), 50, "overlap")),
        ([(0, 0, 100), (0, 0, 100), (1, 0, 50)], (hex(BASE), 0, "duplicate")),
        ([(0, 0, 100), (1, 0, 51)], (hex(BASE + 4096), 0, "size")),
        ([(0, 0, 100), (1, 0, 0)], (hex(BASE + 4096), 0, "size")),
        ([(2, 0, 1)], ("#2", 0, "size")),
    ],
)
def test_each_kind_of_hole_is_named_with_its_place(extents, at) -> None:
    with pytest.raises(CoverageError, match=r"rule extent\.1") as caught:
        prove(ALLOCATIONS, [extent(*one) for one in extents])
    assert at == caught.value.at


def test_allocations_are_ascending_and_disjoint() -> None:
    first, second = ALLOCATIONS
    for allocations, kind in (
        ((second, first), "duplicate"),
        ((first, first), "duplicate"),
        ((first, Allocation(address=BASE + 99, size=1)), "overlap"),
    ):
        with pytest.raises(CoverageError) as caught:
            prove(allocations)
        assert kind == caught.value.at[2]
    prove((first, attrs.evolve(first, device=0)), [extent(0, 0, 100), extent(1, 0, 100)])


def test_the_receipt_says_it_in_one_line() -> None:
    receipt = prove(ALLOCATIONS, [extent(0, 0, 90)], [extent(0, 90, 10), extent(1, 0, 50)])

    assert "150 bytes in 2 allocations = 90 in 1 extents + 60 in 2 extents; no gap, no overlap" == str(receipt)


def test_maps_of_different_memory_have_no_common_pieces() -> None:
    with pytest.raises(CoverageError):
        common_pieces(ExtentMap.of(ALLOCATIONS, []), ExtentMap.of(ALLOCATIONS[:1], []))


def test_padding_rounds_up_to_pages() -> None:
    assert [0, 4096, 4096, 8192] == [padded(size) for size in (0, 1, 4096, 4097)]
