"""The choices about process images follow from the measured table, by the rule that is written down."""

from attrs import evolve

from coldsnap.drivers.image_profile import FEED, MEASURED, WORKERS, Measured, choose, image_compression, stored_as

SLOW = Measured(compression="none", pages="stored", workers=1, size_ratio=1.0, hot_s=2.0, cold_s=8.0)


def test_the_fastest_for_one_hot_and_one_cold_restore_is_chosen():
    faster = evolve(SLOW, compression="lz4", hot_s=4.0, cold_s=3.0)

    assert choose([SLOW, faster]) == faster
    assert choose([SLOW, evolve(faster, hot_s=9.0)]) == SLOW


def test_of_equally_fast_ways_the_smallest_is_chosen():
    smaller = evolve(SLOW, compression="lz4", size_ratio=0.3, cold_s=8.4)

    assert choose([SLOW, smaller]) == smaller
    assert choose([SLOW, evolve(smaller, cold_s=8.6)]) == SLOW


def test_automatic_compression_is_the_choice_and_says_its_figures():
    chosen = choose(MEASURED)
    effective, reason = image_compression("auto")

    assert effective == chosen.compression
    assert f"{chosen.hot_s + chosen.cold_s:.1f} s" in reason


def test_compressed_pages_are_fed_in_the_fastest_measured_way():
    compressed = [each for each in MEASURED if each.compression == "lz4"]

    assert (FEED, WORKERS) == min((each.hot_s + each.cold_s, each.pages, each.workers) for each in compressed)[1:]
    assert stored_as("lz4")["effective"] == "lz4"
