"""A pack is made again of the checkpoint that was loaded, byte for byte, and of nothing that is not it."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import zlib

import pytest
from attrs import evolve
from memory import BASE, SOURCE, native_manifest

from coldsnap.artifact import checkpoint_source
from coldsnap.artifact.checkpoint_source import CheckpointSources, require_tensors
from coldsnap.artifact.extents import Allocation, Extent, ExtentMap
from coldsnap.artifact.manifest import Blob, RecoveryManifest, ReloadExtent
from coldsnap.artifact.pack import Bytes
from coldsnap.artifact.rebuild import rebuild_pack
from coldsnap.artifact.replay import Elements, ReplayCopy, SourceFile
from coldsnap.artifact.residual import Residual
from coldsnap.artifact.store import Store
from coldsnap.engines.weights.documents import placed_pieces
from coldsnap.errors import IntegrityError, UnsupportedError

HEADER = 64  # bytes before the tensors; nobody parses them here


def elements(shape, stride=None, *, offset=0, dtype="U16"):
    dense = tuple(math.prod(shape[index + 1 :]) for index in range(len(shape)))
    return Elements(dtype=dtype, offset=offset, shape=shape, stride=stride or dense)


class Loaded:
    """A load of small tensors into one allocation, done element by element, and what a capture wrote of it."""

    def __init__(self, tmp_path, size, copies):
        self.path, self.store = tmp_path / "model.safetensors", Store(tmp_path / "store")
        data = bytearray(random.Random(3).randbytes(4096))
        self.path.write_bytes(data)
        self.memory, touched = bytearray(size), set()
        for copy in copies:
            for index in itertools.product(*map(range, copy.source.shape)):
                begin, end = (
                    one.offset + 2 * sum(at * step for at, step in zip(index, one.stride, strict=True))
                    for one in (copy.source, copy.target)
                )
                at = copy.file_offset + begin
                self.memory[end : end + 2] = data[at : at + 2]
                touched |= {end, end + 1}
        extents = list(_stretches(sorted(touched)))
        model = ExtentMap.of([Allocation(address=BASE, size=size)], extents)
        sources = [Bytes(memoryview(self.memory)[one.offset : one.end]) for one in model.extents]
        self.pack = self.store.write(sources)
        rest = Residual(
            blob=self._blob(model), native=self._pieces(model), recovery=self._pieces(model), stored_bytes=0
        )
        self.native = native_manifest(model, self.pack, rest)
        self.recovery = RecoveryManifest(
            capture_id="capture-0001",
            worker="0",
            model_source=SOURCE,
            allocations=model.allocations,
            residual=rest.blob,
            model_extents=tuple(
                ReloadExtent(
                    allocation=0,
                    offset=one.offset,
                    size=one.size,
                    semantic_id="0" * 64,
                    crc32=zlib.crc32(self.memory[one.offset : one.end]),
                )
                for one in model.extents
            ),
            residual_extents=rest.recovery,
            files=(SourceFile(path=str(self.path), bytes=len(data), header_sha256=f"sha256:{'0' * 64}"),),
            copies=tuple(self._summed(one, data) for one in copies),
        )

    @staticmethod
    def _summed(copy, data):
        begin = copy.file_offset + copy.source.offset
        return evolve(copy, crc32=zlib.crc32(data[begin : begin + copy.source.span])) if copy.is_unbroken else copy

    @staticmethod
    def _pieces(model):
        gaps = model.complement().extents
        return placed_pieces(gaps, [0] * len(gaps))

    def _blob(self, model):
        pieces = len(model.complement().extents)
        return Blob(bytes=4096 * pieces, sha256=f"sha256:{hashlib.sha256(b'').hexdigest()}")

    def again(self):
        """Make the pack again, where it is gone."""
        self.store.delete(self.pack.sha256)
        with CheckpointSources(self.native, self.recovery) as checkpoint:
            return rebuild_pack(
                self.store, checkpoint.sources(), self.native.index, sha256=self.pack.sha256, size=self.pack.bytes
            )


def _stretches(touched):
    begin = previous = touched[0]
    for at in [*touched[1:], None]:
        if at != previous + 1:
            yield Extent(allocation=0, offset=begin, size=previous + 1 - begin)
            begin = at
        previous = at


def copied(name, at, source, target):
    return ReplayCopy(
        file=0, tensor=name, file_offset=HEADER + at, length=512, source=source, name=name, allocation=0, target=target
    )


PLAIN = copied("plain", 0, elements((8, 16)), elements((8, 16), offset=32))
LOADS = {
    "plain": (PLAIN,),
    "a part of a tensor": (copied("part", 512, elements((4, 8), (16, 1), offset=8), elements((4, 8))),),
    "rows side by side": (
        copied("left", 0, elements((4, 8)), elements((4, 8), (16, 1))),
        copied("right", 512, elements((4, 8)), elements((4, 8), (16, 1), offset=16)),
    ),
    "transposed": (copied("turned", 0, elements((4, 8)), elements((4, 8), (1, 4), offset=2)),),
    "one element repeated": (copied("scale", 0, elements((8,), (0,)), elements((8,))),),
    "a scalar": (copied("scalar", 512, elements(()), elements((), offset=6)),),
    "written twice": (
        PLAIN,
        copied("second", 512, elements((3, 16)), elements((3, 16), offset=64)),
        copied("third", 1024, elements((2,)), elements((2,), offset=70)),
    ),
    "a hole filled later": (
        copied("above", 0, elements((64,)), elements((64,))),
        copied("below", 512, elements((4,)), elements((4,), (8,), offset=20)),
    ),
}


@pytest.mark.parametrize("name", LOADS)
def test_whatever_moves_bytes_as_they_are_gives_the_same_pack(tmp_path, name):
    loaded = Loaded(tmp_path, 1024, LOADS[name])

    rebuilt = loaded.again()

    assert rebuilt.new_bytes == loaded.pack.bytes
    assert loaded.store.packs()[0].sha256 == loaded.pack.sha256


def test_random_loads_give_the_same_pack(tmp_path):
    made = random.Random(11)
    for number in range(30):
        copies = []
        for index in range(made.randint(1, 5)):
            shape = tuple(made.randint(1, 5) for _ in range(made.randint(1, 3)))
            order = made.sample(range(len(shape)), len(shape))
            stride, step = [0] * len(shape), made.choice((1, 1, 2))
            for axis in order:
                stride[axis], step = step, step * shape[axis]
            target = elements(shape, tuple(stride), offset=2 * made.randint(0, 60))
            copies.append(copied(f"tensor.{index}", 512 * index, elements(shape), target))
        directory = tmp_path / str(number)
        directory.mkdir()
        loaded = Loaded(directory, 1024, copies)
        assert loaded.again().new_bytes == loaded.pack.bytes
        assert loaded.store.packs()[0].sha256 == loaded.pack.sha256


def test_a_pack_that_is_there_is_not_written(tmp_path):
    loaded = Loaded(tmp_path, 1024, LOADS["plain"])
    with CheckpointSources(loaded.native, loaded.recovery) as checkpoint:
        sources, pack = checkpoint.sources(), loaded.pack
        assert not rebuild_pack(
            loaded.store, sources, loaded.native.index, sha256=pack.sha256, size=pack.bytes
        ).new_bytes


def test_a_flipped_byte_gives_no_pack_and_its_tensor_is_named(tmp_path):
    loaded = Loaded(tmp_path, 1024, LOADS["plain"])
    data = bytearray(loaded.path.read_bytes())
    data[HEADER + 9] ^= 1
    loaded.path.write_bytes(data)

    with pytest.raises(IntegrityError, match="are not those of the capture"):
        loaded.again()
    with pytest.raises(IntegrityError, match="the tensor plain is not the one that was loaded at capture"):
        require_tensors(loaded.recovery)
    assert loaded.store.packs() == ()


def test_a_file_that_became_shorter_gives_no_pack(tmp_path):
    loaded = Loaded(tmp_path, 1024, LOADS["plain"])
    loaded.path.write_bytes(loaded.path.read_bytes()[: HEADER + 100])

    with pytest.raises(IntegrityError, match="ends before its tensors do"):
        loaded.again()
    assert loaded.store.packs() == ()


def test_a_conversion_is_refused_by_the_name_of_its_tensor(tmp_path):
    loaded = Loaded(tmp_path, 1024, LOADS["plain"])
    converted = evolve(PLAIN, tensor="half", source=elements((8, 16), dtype="F16"))
    recovery = evolve(loaded.recovery, copies=(converted,))

    with pytest.raises(UnsupportedError, match="the load of half converts F16 to U16"):
        CheckpointSources(loaded.native, recovery)


def test_too_many_pieces_are_refused_before_anything_is_read(tmp_path, monkeypatch):
    loaded = Loaded(tmp_path, 1024, LOADS["transposed"])
    monkeypatch.setattr(checkpoint_source, "MOST_RUNS", 31)

    with pytest.raises(UnsupportedError, match="the load of turned and those before it move bytes in over 31 pieces"):
        CheckpointSources(loaded.native, loaded.recovery)


def test_an_extent_that_no_copy_wrote_is_refused(tmp_path):
    loaded = Loaded(tmp_path, 1024, LOADS["rows side by side"])
    smaller = Loaded(tmp_path, 1024, LOADS["a part of a tensor"])
    with (
        CheckpointSources(loaded.native, smaller.recovery) as checkpoint,
        pytest.raises(UnsupportedError, match="no copy is known that wrote byte 0x40"),
    ):
        checkpoint.sources()
