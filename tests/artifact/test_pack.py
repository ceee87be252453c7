"""The bytes of a pack are a function of the set of its extents, and every one of them is checked."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.artifact.durable import staged_file
from coldsnap.artifact.extents import PAGE_BYTES
from coldsnap.artifact.pack import CHUNK_BYTES, Bytes, Pack, PackEntry, verify_extents, write_pack
from coldsnap.errors import FormatError, IntegrityError


def written(directory: Path, extents: list[bytes], name: str = "pack") -> tuple[Pack, Path]:
    with staged_file(directory, name) as staged:
        pack = write_pack(staged, [Bytes(data) for data in extents])
        staged.publish(directory / name)
    return pack, directory / name


def verify(path: Path, entries: tuple[PackEntry, ...]) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        verify_extents(fd, os.fstat(fd).st_size, entries, path=str(path))
    finally:
        os.close(fd)


@pytest.fixture(name="directory", scope="module")
def _directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("packs")


@settings(deadline=None)
@given(data=st.data(), extents=st.lists(st.binary(min_size=1, max_size=10_000), min_size=1, max_size=8))
def test_permuting_extents_never_changes_a_byte(directory: Path, data, extents: list[bytes]) -> None:
    shuffled = data.draw(st.permutations(extents))

    first, path = written(directory, extents)
    content = path.read_bytes()
    second, path = written(directory, shuffled)

    assert content == path.read_bytes()
    assert first.sha256 == second.sha256 == f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert set(first.entries) == set(second.entries)


@settings(deadline=None)
@given(extents=st.lists(st.binary(min_size=1, max_size=10_000), min_size=1, max_size=8))
def test_every_extent_is_where_its_entry_says_and_all_else_is_zero(directory: Path, extents: list[bytes]) -> None:
    pack, path = written(directory, extents)
    content = bytearray(path.read_bytes())

    assert pack.bytes == len(content)
    assert not len(content) % PAGE_BYTES
    for data, entry in zip(extents, pack.entries, strict=True):
        assert not entry.offset % PAGE_BYTES
        assert data == content[entry.offset : entry.offset + entry.size]
        assert entry.sha256 == f"sha256:{hashlib.sha256(data).hexdigest()}"
    for entry in pack.entries:
        content[entry.offset : entry.offset + entry.size] = bytes(entry.size)
    assert not any(content)
    verify(path, pack.entries)


def test_extents_are_ordered_by_digest_and_size(directory: Path) -> None:
    pack, _ = written(directory, [bytes([number]) * 100 for number in range(20)])

    by_offset = sorted(pack.entries, key=lambda entry: entry.offset)
    assert sorted(entry.sha256 for entry in by_offset) == [entry.sha256 for entry in by_offset]


def test_every_flip_and_every_truncation_is_refused(directory: Path) -> None:
    pack, path = written(directory, [b"A" * 3, b"B" * 50])
    content = path.read_bytes()

    fd = os.open(path, os.O_WRONLY)
    for offset in range(len(content)):
        os.pwrite(fd, bytes([content[offset] ^ 0x10]), offset)
        with pytest.raises(IntegrityError, match=r"rule pack\.[35]"):
            verify(path, pack.entries)
        os.pwrite(fd, content[offset : offset + 1], offset)
    verify(path, pack.entries)
    for size in (*range(0, len(content), 511), len(content) - 1, len(content) + PAGE_BYTES):
        os.truncate(fd, size)
        with pytest.raises(IntegrityError, match=r"rule pack\.3"):
            verify(path, pack.entries)
    os.close(fd)


def test_an_index_of_another_order_is_refused(directory: Path) -> None:
    pack, path = written(directory, [b"A", b"B"])
    first, second = pack.entries
    swapped = (
        PackEntry(offset=second.offset, size=1, sha256=first.sha256, crc32=0),
        PackEntry(offset=first.offset, size=1, sha256=second.sha256, crc32=0),
    )

    with pytest.raises(FormatError) as caught:
        verify(path, swapped)
    assert "pack.2" == caught.value.rule
    with pytest.raises(FormatError):
        verify(path, ())


def test_a_pack_without_extents_or_with_an_empty_one_cannot_be_written(directory: Path) -> None:
    for extents in ([], [b""]):
        with pytest.raises(FormatError) as caught:
            written(directory, extents, "empty")
        assert "pack.3" == caught.value.rule
    assert not (directory / "empty").exists()


class Stream:
    """A source that is larger than memory ought to be, and counts what of it is alive."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.reads = 0

    def pieces(self):
        self.reads += 1
        buffer = memoryview(bytearray(1 << 20))
        for start in range(0, self.size, len(buffer)):
            count = min(len(buffer), self.size - start)
            buffer[:8] = start.to_bytes(8, "big")
            yield buffer[:count]


def test_writing_streams_with_bounded_memory(directory: Path) -> None:
    stream = Stream(3 * CHUNK_BYTES + 12_345)
    with staged_file(directory, "large") as staged:
        pack = write_pack(staged, [Bytes(b"small"), stream])
        staged.publish(directory / "large")

    verify(directory / "large", pack.entries)
    assert 2 == stream.reads
    assert pack.sha256 == f"sha256:{hashlib.sha256((directory / 'large').read_bytes()).hexdigest()}"


def test_a_source_that_lies_about_its_size_leaves_nothing(directory: Path) -> None:
    stream = Stream(100)
    stream.size = 100
    liar = type("Liar", (), {"size": 200, "pieces": lambda self: iter([memoryview(b"x" * 100)])})()

    with pytest.raises(OSError, match="gave 100"), staged_file(directory, "liar") as staged:
        write_pack(staged, [liar])
    assert [] == list(directory.glob("*liar*"))
