"""What a load wrote becomes the pack; where the allocator put it does not matter."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldsnap.artifact.extents import Allocation, Extent
from coldsnap.engines.weights.split import (
    AMBIGUOUS_NAME,
    CROSSES_ALLOCATION,
    OUTSIDE_ALLOCATIONS,
    Written,
    split,
)
from coldsnap.errors import CoverageError

BASE = 0x7F00_0000_0000


def allocation(offset=0, size=100, device=None):
    return Allocation(address=BASE + offset, size=size, device=device)


def written(offset, size, semantic="a", within=0):
    return Written(address=BASE + offset, size=size, semantic=semantic, offset=within)


def spans(made):
    return [(extent.allocation, extent.offset, extent.size) for extent in made.model.extents]


# A model without addresses: groups of destinations that lie together, each a list of stretches (offset, size).

STRETCHES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=4)


@st.composite
def models(draw):
    """Groups of names with their place in the group and their stretches; names are unique."""
    groups = draw(st.lists(st.lists(st.tuples(st.integers(0, 80), STRETCHES), min_size=1, max_size=3), max_size=5))
    names = iter(draw(st.permutations([f"layer.{number}" for number in range(16)])))
    return [[(next(names), place, stretches) for place, stretches in group] for group in groups]


GROUP_BYTES = 200  # no group is larger


def placed(model, generator):
    """Put the groups somewhere: any order, any distance, allocations of any size, some of them empty."""
    allocations, stretches, address = [], [], BASE + generator.randrange(1 << 20)
    groups = generator.sample(model, len(model))
    while groups or generator.random() < 0.3:
        begin = address
        for group in [groups.pop() for _ in range(generator.randint(0, len(groups)))]:
            address += generator.randrange(50)
            for name, place, parts in group:
                stretches += [
                    Written(address=address + place + offset, size=size, semantic=name, offset=offset)
                    for offset, size in parts
                ]
            address += GROUP_BYTES
        address += generator.randint(1, 50)
        allocations.append(Allocation(address=begin, size=address - begin, region="weights"))
        address += generator.randrange(1 << 12)
    return generator.sample(allocations, len(allocations)), generator.sample(stretches, len(stretches))


def identities(made):
    return sorted((made.semantic_ids[extent], extent.size) for extent in made.model.extents)


@given(models(), st.integers(), st.integers())
def test_neither_addresses_nor_allocations_nor_order_change_what_goes_into_the_pack(model, first, second):
    one = split(*placed(model, random.Random(first)))
    other = split(*placed(model, random.Random(second)))
    assert identities(one) == identities(other)
    assert one.kept == other.kept == {}


@given(models(), st.integers())
def test_model_and_residual_are_every_byte_once_and_the_model_is_what_was_written(model, seed):
    allocations, stretches = placed(model, random.Random(seed))
    made = split(allocations, stretches)
    assert made.coverage.bytes == sum(one.size for one in allocations) == made.model.bytes + made.residual.bytes
    assert made.residual.extents == made.model.complement().extents
    found = {
        made.allocations[extent.allocation].address + offset
        for extent in made.model.extents
        for offset in range(extent.offset, extent.end)
    }
    assert found == {one.address + byte for one in stretches for byte in range(one.size)}
    assert len(set(made.semantic_ids.values())) == len(made.model.extents)
    assert all(len(bytes.fromhex(name)) == 32 for name in made.semantic_ids.values())


@given(st.lists(st.integers(1, 99), max_size=4), st.lists(st.tuples(st.integers(-50, 600), st.integers(1, 90))))
def test_whatever_is_said_to_be_written_coverage_is_proven_and_no_byte_is_counted_twice(sizes, claims):
    allocations = [allocation(index * 110, size) for index, size in enumerate(sizes)]
    made = split(allocations, [written(at, size, f"{index % 3}") for index, (at, size) in enumerate(claims)])
    assert made.coverage.mapped_bytes == (made.model.bytes, made.residual.bytes)
    assert made.coverage.bytes == sum(sizes)


# By example.


def test_each_complete_destination_is_one_extent():
    made = split([allocation()], [written(0, 30, "a"), written(30, 20, "b"), written(50, 10, "b", within=20)])
    assert spans(made) == [(0, 0, 30), (0, 30, 30)]
    assert [(one.offset, one.size) for one in made.residual.extents] == [(60, 40)]


def test_a_destination_with_a_hole_is_as_many_extents_as_it_has_stretches():
    made = split([allocation()], [written(0, 10), written(20, 10, within=20), written(5, 7, within=5)])
    assert spans(made) == [(0, 0, 12), (0, 20, 10)]


def test_tied_weights_are_one_extent_under_the_first_name_whoever_is_seen_first():
    stretches = [written(0, 40, "lm_head.weight"), written(0, 40, "embed.weight")]
    made = split([allocation()], stretches)
    assert spans(made) == [(0, 0, 40)]
    assert made.semantic_ids == split([allocation()], stretches[::-1]).semantic_ids
    assert made.semantic_ids == split([allocation()], stretches[1:]).semantic_ids


def test_an_id_tells_name_place_and_size_apart():
    variants = [written(0, 10, "a"), written(0, 10, "b"), written(0, 11, "a"), written(4, 10, "a", within=4)]
    ids = [next(iter(split([allocation()], [one]).semantic_ids.values())) for one in variants]
    assert len(set(ids)) == 4


def test_a_run_outside_of_every_allocation_is_left_out_with_its_reason():
    made = split([allocation()], [written(100, 10, "a"), written(-10, 10, "b"), written(0, 5, "c")])
    assert spans(made) == [(0, 0, 5)] and made.kept == {OUTSIDE_ALLOCATIONS: 20}


@pytest.mark.parametrize("second", [allocation(100), allocation(120)])
def test_a_run_that_leaves_its_allocation_is_residual_as_a_whole(second):
    made = split([allocation(), second], [written(90, 40, "a"), written(0, 5, "b")])
    assert spans(made) == [(0, 0, 5)]
    assert made.kept == {CROSSES_ALLOCATION: 40 if second.address == BASE + 100 else 20}


def test_a_name_for_two_places_is_residual_with_its_reason():
    made = split([allocation()], [written(0, 10, "a"), written(50, 10, "a"), written(20, 5, "b")])
    assert spans(made) == [(0, 20, 5)] and made.kept == {AMBIGUOUS_NAME: 20}


def test_what_the_observer_kept_is_told_too():
    made = split([allocation()], [written(100, 10)], {"mutation:aten::add_": 7, OUTSIDE_ALLOCATIONS: 1, "none": 0})
    assert made.kept == {"mutation:aten::add_": 7, OUTSIDE_ALLOCATIONS: 11}


def test_allocations_are_ordered_by_device_and_address():
    unordered = [allocation(0, device=1), allocation(1000, device=0), allocation(500)]
    made = split(unordered, [written(0, 10)])
    assert made.allocations == (allocation(500), allocation(1000, device=0), allocation(0, device=1))
    assert made.model.extents == (Extent(allocation=2, offset=0, size=10),)


def test_addresses_that_two_devices_claim_are_refused():
    with pytest.raises(CoverageError, match="overlap") as caught:
        split([allocation(0, device=0), allocation(50, device=1)], [])
    assert caught.value.at == (f"{BASE + 50:#x}", 0, "overlap")


def test_what_the_allocator_holds_in_reserve_is_not_preserved():
    made = split([allocation()], [written(10, 20)], vacant=[(BASE + 40, 30)])

    assert made.vacant.extents == (Extent(allocation=0, offset=40, size=30),)
    assert made.residual.extents == (
        Extent(allocation=0, offset=0, size=10),
        Extent(allocation=0, offset=30, size=10),
        Extent(allocation=0, offset=70, size=30),
    )
    assert made.coverage.mapped_bytes == (20, 50, 30)


@pytest.mark.parametrize("vacant", [(5, 10), (15, 5), (25, 10), (10, 20), (90, 20), (-10, 20), (40, 0)])
def test_what_was_written_or_leaves_its_allocation_is_never_taken_for_vacant(vacant):
    made = split([allocation()], [written(10, 20)], vacant=[(BASE + vacant[0], vacant[1])])

    assert not made.vacant.extents
    assert made.residual.bytes == 80


@given(models(), st.integers(), st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 300)), max_size=6))
def test_vacancy_changes_nothing_that_goes_into_the_pack(model, seed, claims):
    allocations, stretches = placed(model, random.Random(seed))
    vacant, end = [], 0
    for begin, size in sorted(claims):
        if begin >= end and allocations:
            vacant.append((min(one.address for one in allocations) + begin, size))
            end = begin + size
    plain, made = split(allocations, stretches), split(allocations, stretches, vacant=vacant)

    assert identities(made) == identities(plain)
    assert sum(made.coverage.mapped_bytes) == made.coverage.bytes
    assert made.residual.bytes + made.vacant.bytes == plain.residual.bytes
