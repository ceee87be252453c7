"""Weights that are still in an image are told from traces of them."""

import random

import pytest

from coldsnap.errors import IntegrityError
from coldsnap.outside import MORE, SAMPLES, TRACE_BYTES, LookedFor, look
from coldsnap.transfer.samples import Found, Sample, draw, equal_around

SIZE = 4 << 20
EXTENTS = [(0, SIZE)]


@pytest.fixture(scope="module")
def weights():
    return random.Random(7).randbytes(SIZE)


@pytest.fixture
def pack(tmp_path, weights):
    path = tmp_path / "model.pack"
    path.write_bytes(weights)
    return path


@pytest.fixture
def found(tmp_path, pack):
    """Look for the pack in an image of some contents."""

    def found(contents):
        image = tmp_path / "pages-1.img"
        image.write_bytes(contents)
        return look("worker-0", pack, EXTENTS, [image], seed="a capture")

    return found


@pytest.fixture
def one(pack):
    """The first sample that is looked for."""
    return draw(pack, EXTENTS, SAMPLES, seed=f"a capture {SAMPLES}")[0]


def test_an_image_without_weights_is_searched_once(found):
    assert found(random.Random(8).randbytes(SIZE)) == LookedFor(SAMPLES, 0)


def test_a_row_of_them_is_a_trace_and_told(found, one, weights):
    row = weights[max(0, one.offset - 68) : one.offset + 132]
    told = found(bytes(5000) + row + bytes(5000))
    assert told == LookedFor(SAMPLES + MORE, told.traces)
    assert 1 <= told.traces <= 2
    assert str(told).startswith(f"{told.traces} of 1124 samples of the weights are in the image, each a trace")


def test_a_part_as_long_as_no_trace_is_refused_though_one_sample_alone_is_in_it(found, one, weights):
    begin = min(one.offset, SIZE - TRACE_BYTES)
    with pytest.raises(IntegrityError, match=r"worker-0 are still in the process image: . of 100 .*pages-1.img at 0x"):
        found(bytes(4096) + weights[begin : begin + TRACE_BYTES] + bytes(4096))


def test_many_short_pieces_are_a_copy_all_the_same(found, weights):
    piece = TRACE_BYTES // 2
    rows = b"".join(weights[at : at + piece] + bytes(64) for at in range(0, SIZE, piece))
    with pytest.raises(IntegrityError, match="of 100 samples were found"):
        found(rows)


def test_one_percent_in_short_pieces_is_found_by_the_second_look(found, one, weights):
    row = weights[one.offset : one.offset + 64]
    rows = b"".join(weights[at : at + 2048] + bytes(64) for at in range(0, SIZE, 64 << 10))
    with pytest.raises(IntegrityError, match="still in the process image"):
        found(row + rows)


@pytest.mark.parametrize(("before", "after"), [(0, 0), (0, 40), (33, 0), (100, 200)])
def test_what_is_equal_is_followed_in_both_directions(tmp_path, weights, before, after):
    source, image = tmp_path / "source", tmp_path / "image"
    source.write_bytes(weights[:10_000])
    same = weights[1000 - before : 1064 + after]
    image.write_bytes(bytes([weights[999 - before] ^ 1]) + same + bytes([weights[1064 + after] ^ 1]))
    place = Found(path=str(image), offset=1 + before, sample=Sample(data=weights[1000:1064], offset=1000))
    assert equal_around(place, source, 4096) == before + 64 + after


def test_it_is_followed_to_the_ends_of_both_files_and_no_further_than_asked(tmp_path, weights):
    source, image = tmp_path / "source", tmp_path / "image"
    source.write_bytes(weights[:10_000])
    image.write_bytes(weights[:10_000])
    place = Found(path=str(image), offset=5000, sample=Sample(data=weights[5000:5064], offset=5000))
    assert equal_around(place, source, 1 << 20) == 10_000
    assert equal_around(place, source, 100) == 264
