"""Streams that are hashed side by side have the digests of hashlib, whatever the processor offers."""

import hashlib
import os
import random
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.artifact.lanes import sha256_streams
from coldsnap.artifact.pack import CHUNK_BYTES, Bytes, Pack, verify_extents
from coldsnap.artifact.payloads import PayloadObject
from coldsnap.artifact.store import PACKS, Store
from coldsnap.engines.weights.source import STAGE_BYTES, Staging, digests_of
from coldsnap.errors import IntegrityError

DATA = random.Random(1).randbytes(1 << 20)


@pytest.fixture(params=[None, 1, 0], ids=["all-lanes", "one-lane", "portable"])
def lanes(request, library):
    """The library with what the processor has, with one lane, and without the processor's own instructions."""
    library.limit_sha256_lanes(request.param)
    yield library
    library.limit_sha256_lanes(None)


class Pieces:
    """A stream of given pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self.parts = pieces
        self.size = sum(map(len, pieces))

    def pieces(self):
        yield from map(memoryview, self.parts)

    @property
    def digest(self) -> str:
        return f"sha256:{hashlib.sha256(b''.join(self.parts)).hexdigest()}"


def digest_of(library, *pieces: memoryview) -> bytes:
    stream = library.sha256_begin()
    for piece in pieces:
        library.sha256_update([(stream, piece)])
    return library.sha256_end(stream)


def test_a_processor_with_the_instructions_has_two_lanes_and_any_other_none(library):
    with open("/proc/cpuinfo") as info:
        able = "sha_ni" in info.read().split()

    assert library.sha256_lanes == (2 if able else 0)


def test_every_length_at_every_alignment(lanes):
    for length in range(301):
        at = length % 67
        assert digest_of(lanes, memoryview(DATA)[at : at + length]) == hashlib.sha256(DATA[at : at + length]).digest()
    for at in range(64):
        for length in (63, 64, 65, 1000):
            streams = [lanes.sha256_begin() for _ in range(2)]
            views = [memoryview(DATA)[at : at + length], memoryview(DATA)[63 - at : 63 - at + 4096]]
            lanes.sha256_update(list(zip(streams, views, strict=True)))
            assert [hashlib.sha256(view).digest() for view in views] == [lanes.sha256_end(one) for one in streams]


@settings(deadline=None, max_examples=150)
@given(data=st.data(), count=st.integers(1, 8))
def test_any_streams_in_any_pieces_side_by_side(library, data, count):
    length = st.one_of(st.integers(0, 300), st.integers(0, 5000))
    library.limit_sha256_lanes(data.draw(st.sampled_from([None, 2, 1, 0])))
    streams, hashes = [library.sha256_begin() for _ in range(count)], [hashlib.sha256() for _ in range(count)]
    try:
        for turn in data.draw(st.lists(st.lists(length, min_size=count, max_size=count), max_size=5)):
            at = data.draw(st.integers(0, 5000))
            views = [memoryview(DATA)[at + index : at + index + size] for index, size in enumerate(turn)]
            library.sha256_update(list(zip(streams, views, strict=True)))
            for state, view in zip(hashes, views, strict=True):
                state.update(view)
    finally:
        library.limit_sha256_lanes(None)

    assert [state.digest() for state in hashes] == [library.sha256_end(stream) for stream in streams]


def test_more_streams_in_one_update_than_are_told_at_once(lanes):
    streams = [lanes.sha256_begin() for _ in range(50)]
    views = [memoryview(DATA)[index * 1000 : index * 1400] for index in range(50)]

    lanes.sha256_update(list(zip(streams, views, strict=True)))

    assert [hashlib.sha256(view).digest() for view in views] == [lanes.sha256_end(stream) for stream in streams]


@settings(deadline=None, max_examples=60)
@given(
    pieces=st.lists(st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 400_000)), max_size=4), max_size=9),
    threads=st.integers(1, 3),
    most=st.sampled_from([None, 1, 0]),
)
def test_streams_spread_over_cores_and_lanes_keep_their_order(library, pieces, threads, most):
    library.limit_sha256_lanes(most)
    streams = [Pieces(*(DATA[at : at + size] for at, size in parts)) for parts in pieces]
    try:
        found = sha256_streams(streams, threads=threads, lanes=library)
    finally:
        library.limit_sha256_lanes(None)

    assert [stream.digest for stream in streams] == found == sha256_streams(streams, threads=threads)


@pytest.mark.parametrize("threads", [1, 2])
def test_no_lane_is_empty_while_streams_wait(threads):
    """A stream that runs alone takes as long as two that run side by side."""
    sizes = [70_000 + 1_000 * index for index in range(40)]
    alone = []

    class Counting:
        sha256_lanes = 2

        def sha256_begin(self):
            return [hashlib.sha256()]

        def sha256_update(self, parts):
            for (state,), view in parts:
                state.update(view)
            if len(parts) == 1:
                alone.append(len(parts[0][1]))

        def sha256_end(self, stream):
            return stream[0].digest()

    streams = [Pieces(DATA[:50_000], DATA[50_000:size]) for size in sizes]

    assert [stream.digest for stream in streams] == sha256_streams(streams, threads=threads, lanes=Counting())
    assert sum(alone) <= threads * max(sizes)


def test_without_lanes_the_library_is_not_asked_to_hash():
    class Without:
        sha256_lanes = 0

    streams = [Pieces(DATA[index:]) for index in range(5)]

    assert [stream.digest for stream in streams] == sha256_streams(streams, lanes=Without())


def test_one_stream_and_none_are_hashed_too(library):
    assert [Pieces(DATA).digest] == sha256_streams([Pieces(DATA)], lanes=library)
    assert [] == sha256_streams([], lanes=library)
    assert [Pieces().digest] == sha256_streams([Pieces()], lanes=library)


def test_a_stream_that_fails_ends_them_all_and_lets_go_of_their_memory(library):
    class Failing(Pieces):
        closed = False

        def pieces(self):
            try:
                yield memoryview(self.parts[0])
                yield from iter(self.parts[1:2])
                raise OSError("the medium failed")
            finally:
                type(self).closed = True

    buffer = bytearray(DATA)
    held = [Pieces(buffer, buffer), Failing(DATA[:70_000]), *(Pieces(DATA) for _ in range(20))]

    with pytest.raises(OSError, match="the medium failed") as caught:
        sha256_streams(held, threads=1, lanes=library)

    assert Failing.closed
    assert caught.value.__traceback__ is not None
    buffer.extend(b"nobody holds a view of it any more")


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=5000), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_a_copy_is_summed_on_the_way(library, data, room, crc):
    target = bytearray(os.urandom(len(data) + room))
    rest = target[len(data) :]

    assert zlib.crc32(data, crc) == library.crc32_copy(crc, memoryview(target), memoryview(data))
    assert data + rest == target


def test_a_copy_that_does_not_fit_is_refused(library):
    with pytest.raises(ValueError, match="10 bytes do not fit into 9"):
        library.crc32_copy(0, memoryview(bytearray(9)), memoryview(bytes(10)))
    with pytest.raises(BufferError):
        library.crc32_copy(0, memoryview(bytearray(9)), memoryview(bytes(10))[::2])


# Packs


def kept(store: Store, extents: list[bytes]) -> tuple[Pack, bytes]:
    pack = store.write([Bytes(data) for data in extents])
    return pack, store.path(pack.sha256).read_bytes()


@settings(deadline=None, max_examples=15)
@given(sizes=st.lists(st.integers(1, 300_000), min_size=1, max_size=9), seed=st.integers(0, 1000))
def test_a_pack_is_the_same_with_and_without_lanes(tmp_path_factory, library, sizes, seed):
    extents = [DATA[seed + index : seed + index + size] for index, size in enumerate(sizes)]
    directory = tmp_path_factory.mktemp("packs")

    assert kept(Store(directory / "with", lanes=library), extents) == kept(Store(directory / "without"), extents)


def test_a_pack_larger_than_its_buffers_is_the_same_with_and_without_lanes(tmp_path, library):
    extents = [DATA * 40, bytes(CHUNK_BYTES), DATA[:12_345] * 100, DATA[1:]]

    assert kept(Store(tmp_path / "with", lanes=library), extents) == kept(Store(tmp_path / "without"), extents)


def test_a_wrong_byte_is_found_by_lanes(tmp_path, library):
    store = Store(tmp_path, lanes=library)
    pack, content = kept(store, [DATA, DATA[1:], DATA[2:], DATA[3:]])
    path = tmp_path / "copy"
    path.write_bytes(content)
    with path.open("rb") as stream:
        verify_extents(stream.fileno(), len(content), pack.entries, path=str(path), lanes=library)
    for at in (0, 1 << 20, (2 << 20) + 77, len(content) - 5000):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with path.open("rb") as stream, pytest.raises(IntegrityError, match=r"rule pack\.[35]"):
            verify_extents(stream.fileno(), len(content), pack.entries, path=str(path), lanes=library)


def test_full_verification_of_a_stored_pack_uses_the_lanes_of_the_store(tmp_path, library):
    class Counting:
        updates = 0

        def __getattr__(self, name: str):
            Counting.updates += name == "sha256_update"
            return getattr(library, name)

    store = Store(tmp_path, lanes=Counting())
    pack, _ = kept(store, [DATA[at:] for at in range(4)])
    path = f"{PACKS}/{pack.sha256.removeprefix('sha256:')}.pack"
    payload = PayloadObject(worker="worker-0", path=path, sha256=pack.sha256, bytes=pack.bytes)
    store.admit(payload, index=pack.entries)
    Counting.updates = 0

    store.admit(payload, "full", index=pack.entries)

    assert bool(Counting.updates) == (library.sha256_lanes > 1)


def test_no_whole_block_of_what_was_hashed_stays_in_a_stream(lanes):
    stream = lanes.sha256_begin()
    for at in range(0, 1000, 100):
        lanes.sha256_update([(stream, memoryview(DATA)[at : at + 100])])

    kept = bytes(stream)

    assert not any(DATA[at : at + 64] in kept for at in range(1000))
    assert hashlib.sha256(DATA[:1000]).digest() == lanes.sha256_end(stream)


def test_stretches_of_memory_that_are_read_side_by_side_keep_their_bytes_apart(library, host):
    region = host.allocate(STAGE_BYTES * 4, tag="weights")
    host.copy_from_host(region.address, memoryview((DATA * 40)[: region.size_bytes]))
    with Staging(host) as staging:
        sizes = (STAGE_BYTES + 4097, STAGE_BYTES - 1, 70_000, 1)
        sources = [staging.source(region.address + index * 4096, size) for index, size in enumerate(sizes)]

        assert digests_of(sources, threads=1) == digests_of(sources, threads=1, lanes=library)
        assert digests_of(sources, threads=3) == digests_of(sources, threads=2, lanes=library)
