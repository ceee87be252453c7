"""Samples of a file are telling, and every place where one lies is found, at any byte of any file."""

import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.errors import NativeError
from coldsnap.transfer import samples as module
from coldsnap.transfer.samples import Found, Sample, draw, search

CHUNK = 128 << 10  # of the library


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A file of 1 MiB of random bytes between two of zeros."""
    path = tmp_path_factory.mktemp("samples") / "weights"
    path.write_bytes(bytes(1 << 20) + random.Random(1).randbytes(1 << 20) + bytes(1 << 20))
    return path


@pytest.fixture(params=["python", "library"])
def searcher(request, monkeypatch):
    """Search in one of the two ways."""
    if request.param == "library":
        library = request.getfixturevalue("library")
        return lambda *arguments, **options: search(*arguments, library=library, **options)
    monkeypatch.setattr(module, "packaged", lambda: None)
    return search


def drawn(count, size=64, seed=3):
    generator = random.Random(seed)
    return tuple(Sample(data=generator.randbytes(size), offset=index) for index in range(count))


# Drawing


def test_the_same_seed_draws_the_same_samples_and_another_one_others(weights):
    extents = [(0, 3 << 20)]

    assert draw(weights, extents, seed="a") == draw(weights, extents, seed="a") != draw(weights, extents, seed="b")
    assert 100 == len(draw(weights, extents, seed="a"))


def test_samples_are_bytes_of_the_extents_in_file_order(weights):
    extents = [((1 << 20) + 100, 1000), ((1 << 20) + 50_000, 63), ((1 << 20) + 70_000, 64)]
    content = weights.read_bytes()

    found = draw(weights, extents, count=1024, seed=0)

    assert 900 <= len(found)
    assert (1 << 20) + 70_000 in {sample.offset for sample in found}
    for sample in found:
        assert any(at <= sample.offset and sample.offset + 64 <= at + size for at, size in extents)
        assert sample.data == content[sample.offset : sample.offset + 64]
    assert sorted(sample.offset for sample in found) == [sample.offset for sample in found]
    assert len({sample.data for sample in found}) == len(found)


@pytest.mark.parametrize(
    "dull",
    [
        bytes(4096),
        b"\x7f" * 4096,
        struct.pack("<512d", *[1.5] * 512),
        bytes(range(32)) * 128,
        bytes(range(256)) * 16,
        struct.pack("<1024I", *range(70_000, 71_024)),
        struct.pack(">512Q", *range(1 << 40, (1 << 40) + 512 * 12_345_678, 12_345_678)),
        bytes(random.Random(2).choices(range(8), k=4096)),
        (random.Random(2).randbytes(28) + bytes(4)) * 128,
    ],
    ids=["zeros", "constant", "one-number", "period", "bytes", "indices", "multiples", "few-values", "runs"],
)
def test_bytes_that_any_process_may_hold_are_never_drawn(tmp_path, dull):
    (tmp_path / "file").write_bytes(dull)

    assert () == draw(tmp_path / "file", [(0, len(dull))], count=10, seed=0)


@pytest.mark.parametrize("form", ["e", "f"])
def test_numbers_of_16_and_32_bits_are_drawn(tmp_path, form):
    generator = random.Random(4)
    values = [generator.gauss(0, 0.02) for _ in range(4096)]
    data = struct.pack(f"<4096{form}", *values)
    # bfloat16 is the upper half of a float32.
    (tmp_path / "file").write_bytes(
        data if form == "e" else b"".join(data[at + 2 : at + 4] for at in range(0, 16384, 4))
    )

    assert 100 == len(draw(tmp_path / "file", [(0, 8192)], seed=0))


def test_nothing_is_drawn_from_nothing(weights):
    assert () == draw(weights, [], seed=0) == draw(weights, [(0, 63)], seed=0) == draw(weights, [(0, 9999)], 0, seed=0)


def test_an_extent_beyond_the_file_is_an_error(weights):
    with pytest.raises(OSError, match="must not change"):
        draw(weights, [(3 << 20, 4096)], seed=0)
    for arguments in ((1025, 64), (-1, 64), (10, 63), (10, 4097)):
        with pytest.raises(ValueError, match="can be drawn"):
            draw(weights, [(0, 1 << 20)], *arguments, seed=0)


# Searching


def test_samples_of_the_file_itself_are_found_where_they_were_drawn(searcher, weights):
    drawn_ones = draw(weights, [(0, 3 << 20)], seed=5)

    found = searcher([weights], drawn_ones)

    assert found == tuple(Found(path=str(weights), offset=sample.offset, sample=sample) for sample in drawn_ones)


def test_every_alignment_across_the_borders_of_chunks_and_at_both_ends(searcher, tmp_path):
    sample, *others = drawn(3)
    path = tmp_path / "file"
    size = CHUNK * 8 + (1 << 20) + 33
    blank = random.Random(6).randbytes(size)
    for shift in range(-66, 67):
        places = [border + shift for border in (0, CHUNK, 1 << 20, size - 64) if 0 <= border + shift <= size - 64]
        content = bytearray(blank)
        for at in places:
            content[at : at + 64] = sample.data
        path.write_bytes(content)

        assert places == [found.offset for found in searcher([path], [others[0], sample, others[1]])]


def test_a_sample_cut_by_the_end_of_the_file_is_not_there(searcher, tmp_path):
    (sample,) = drawn(1)
    for count in range(64):
        (tmp_path / "file").write_bytes(bytes(5000) + sample.data[:count])
        assert () == searcher([tmp_path / "file"], [sample])


def test_none_is_found_where_none_is(searcher, weights, tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    near = Sample(data=weights.read_bytes()[(1 << 20) + 7 :][:63] + b"?", offset=0)

    assert () == searcher([weights, tmp_path / "empty"], [near, *drawn(1023)])
    assert () == searcher([weights], []) == searcher([], drawn(1))


def test_all_files_are_searched_in_their_order(searcher, tmp_path):
    first, second = drawn(2)
    for name, data in (("b", second.data + first.data), ("a", b"?" + first.data * 2)):
        (tmp_path / name).write_bytes(data)

    found = searcher([tmp_path / "b", tmp_path / "a"], [first, second], threads=2)

    expected = [("b", 0, second), ("b", 64, first), ("a", 1, first), ("a", 65, first)]
    assert expected == [(one.path.rsplit("/", 1)[1], one.offset, one.sample) for one in found]


def test_ranges_of_a_file_find_everything_once(searcher, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_RANGE_BYTES", 100)
    (sample,) = drawn(1)
    offsets = [3, 99, 163, 227, 300, 936]
    data = bytearray(1000)
    for offset in offsets:
        data[offset : offset + 64] = sample.data
    (tmp_path / "file").write_bytes(data)

    assert offsets == [found.offset for found in searcher([tmp_path / "file"], [sample])]


def test_more_places_than_expected_are_all_told(searcher, tmp_path):
    (sample,) = drawn(1)
    (tmp_path / "file").write_bytes(sample.data * 3000)

    assert list(range(0, 64 * 3000, 64)) == [found.offset for found in searcher([tmp_path / "file"], [sample])]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_library_finds_what_python_finds(tmp_path_factory, library, data):
    # Few different bytes: parts of patterns, repetitions and overlaps are everywhere.
    size = data.draw(st.integers(64, 80))
    letters = st.binary(min_size=1, max_size=3)
    patterns = data.draw(
        st.lists(st.builds(lambda one: (one * size)[:size], letters), min_size=1, max_size=8, unique=True)
    )
    pieces = st.one_of(st.sampled_from(patterns), letters.map(lambda one: one * 20), st.binary(max_size=40))
    content = b"".join(data.draw(st.lists(pieces, max_size=12)))
    path = tmp_path_factory.getbasetemp() / "searched"
    path.write_bytes(content)
    offset = data.draw(st.integers(0, len(content)))
    length = data.draw(st.integers(0, len(content) - offset))

    with path.open("rb") as stream:
        found = library.search(stream.fileno(), str(path), offset, length, patterns)

    slow = [
        (at, index)
        for at in range(offset, offset + length)
        for index, pattern in enumerate(patterns)
        if content[at : at + size] == pattern
    ]
    assert slow == list(found) == list(module._by_python(patterns, (str(path), offset, length)))


def test_what_cannot_be_searched_is_refused(searcher, weights, library):
    one, other = drawn(1, 64)[0], drawn(1, 65)[0]
    for samples in ([one, one], [one, other], drawn(1, 63), drawn(1, 4097), drawn(1025)):
        with pytest.raises(ValueError, match="can be searched for"):
            searcher([weights], samples)
    with pytest.raises(FileNotFoundError):
        searcher([weights.with_name("absent")], [one])
    with weights.open("rb") as stream:
        with pytest.raises(NativeError, match="ends beyond the file"):
            library.search(stream.fileno(), "weights", 1, 3 << 20, [one.data])
        with pytest.raises(NativeError, match="0 patterns"):
            library.search(stream.fileno(), "weights", 0, 0, [])
