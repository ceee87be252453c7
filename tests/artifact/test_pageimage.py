"""A page image gives back its pages, or is refused: with its rule when it is none, by block when a byte has changed."""

from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path

import lz4.block
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.artifact import pageimage
from coldsnap.artifact.pageimage import ALIGNED, PACKED, PageImage, read_image, read_pages, write_pages
from coldsnap.errors import ArtifactError, FormatError, IntegrityError

PAGE = 4096
BLOCK = 4 * PAGE


def page(kind: int, seed: int) -> bytes:
    """Zeros, text, or noise."""
    return (bytes(PAGE), (b"page %d " % seed * PAGE)[:PAGE], os.urandom(PAGE))[kind]


PAGES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1 << 20)), max_size=24)


def blocks_of(pages: bytes, block_bytes: int = BLOCK) -> list[bytes]:
    return [pages[at : at + block_bytes] for at in range(0, len(pages), block_bytes)]


def written(path: Path, pages: bytes, align_bytes: int = ALIGNED, block_bytes: int = BLOCK) -> PageImage:
    with path.open("wb") as file:
        return write_pages(
            file.fileno(), blocks_of(pages, block_bytes), block_bytes=block_bytes, align_bytes=align_bytes
        )


def read(path: Path) -> bytes:
    with path.open("rb") as file:
        return b"".join(read_pages(file.fileno(), read_image(file.fileno(), str(path))))


@pytest.fixture(name="path", scope="module")
def _path(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("images") / "pages-1.blocks"


@pytest.mark.parametrize("align_bytes", [ALIGNED, PACKED])
@settings(deadline=None)
@given(kinds=PAGES)
def test_pages_come_back_as_they_were(path: Path, align_bytes: int, kinds: list[tuple[int, int]]) -> None:
    pages = b"".join(page(*kind) for kind in kinds)

    image = written(path, pages, align_bytes)

    assert path.stat().st_size == image.file_bytes
    assert path.stat().st_size % align_bytes == 0
    assert read(path) == pages


SAMPLE = b"".join(page(kind, seed) for seed, kind in enumerate([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 1, 0]))


def test_zero_incompressible_and_compressed_blocks_are_told_apart(path: Path) -> None:
    zero, compressed, stored, last = written(path, SAMPLE).blocks()

    assert (zero.length, zero.crc32) == (0, 0)
    assert 0 < compressed.length < BLOCK
    assert stored.length == stored.raw_bytes == BLOCK
    assert last.raw_bytes == 2 * PAGE
    assert {block.offset % PAGE for block in (zero, compressed, stored, last)} == {0}


def test_the_layout_is_the_one_of_the_document(path: Path) -> None:
    """Read it with nothing but docs/format/pageimage.md."""
    written(path, SAMPLE)
    data = path.read_bytes()
    magic, version, block, raw, count, align, index_crc, header_crc = struct.unpack_from("<8sIIQQIII", data)
    assert (magic, version, block, raw, count, align) == (b"CSPAGES\0", 1, BLOCK, len(SAMPLE), 4, 4096)
    assert header_crc == zlib.crc32(data[:40])

    at, lengths = 4096, []
    index = data[-PAGE:][: 8 * count]
    for length, crc in struct.iter_unpack("<II", index):
        assert zlib.crc32(data[at : at + length]) == (crc if length else 0)
        lengths.append(length)
        at += -(-length // align) * align

    assert index_crc == zlib.crc32(index)
    assert at + PAGE == len(data)
    compressed = data[4096 : 4096 + lengths[1]]
    assert lz4.block.decompress(compressed, uncompressed_size=block) == SAMPLE[block : 2 * block]


def refuse(path: Path, data: bytes) -> FormatError:
    path.write_bytes(data)
    with pytest.raises(FormatError) as caught:
        read(path)
    return caught.value


def with_header(data: bytes, **changes: int) -> bytes:
    """Change fields of a header, and give it the right checksum."""
    names = ("magic", "version", "block", "raw", "count", "align", "index_crc")
    fields = dict(zip(names, struct.unpack_from("<8sIIQQII", data), strict=True)) | changes
    header = struct.pack("<8sIIQQII", *fields.values())
    return header + struct.pack("<I", zlib.crc32(header)) + data[44:]


@pytest.fixture(name="sample")
def _sample(path: Path) -> bytes:
    written(path, SAMPLE)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("rule", "damage"),
    [
        (1, lambda data: b""),
        (1, lambda data: data[:40]),
        (1, lambda data: b"X" + data[1:]),
        (1, lambda data: data[:20] + b"\x01" + data[21:]),
        (1, lambda data: data[:4000] + b"\x01" + data[4001:]),
        (2, lambda data: with_header(data, version=2)),
        (3, lambda data: with_header(data, block=0)),
        (3, lambda data: with_header(data, block=PAGE + 1)),
        (3, lambda data: with_header(data, block=8 << 20)),
        (3, lambda data: with_header(data, align=512)),
        (3, lambda data: with_header(data, raw=len(SAMPLE) + 1)),
        (3, lambda data: with_header(data, raw=1 << 60, count=1 << 46)),
        (4, lambda data: with_header(data, count=3)),
        (4, lambda data: with_header(data, raw=1 << 40, count=(1 << 40) // BLOCK)),
        (4, lambda data: data[:-PAGE]),
        (4, lambda data: data[:-1]),
        (4, lambda data: data[: 4096 + PAGE] + data[4096 + 2 * PAGE :]),
        (4, lambda data: data + bytes(PAGE)),
        (4, lambda data: data[:-PAGE] + b"\xff" + data[-PAGE + 1 :]),
        (4, lambda data: data[:-1] + b"\x01"),
    ],
)
def test_what_is_not_a_whole_page_image_is_refused_with_its_rule(path: Path, sample: bytes, rule: int, damage) -> None:
    assert refuse(path, damage(sample)).rule == f"pageimage.{rule}"


def with_index(data: bytes, image: PageImage, entries: list[tuple[int, int]]) -> bytes:
    index = b"".join(struct.pack("<II", *entry) for entry in entries)
    start = image.payload_end
    return with_header(data[:start] + index + data[start + len(index) :], index_crc=zlib.crc32(index))


def test_a_payload_longer_than_its_block_is_refused(path: Path) -> None:
    image = written(path, SAMPLE)
    entries = [(block.length, block.crc32) for block in image.blocks()]
    entries[3] = (3 * PAGE, 0)

    assert refuse(path, with_index(path.read_bytes(), image, entries)).rule == "pageimage.5"


def test_a_zero_block_with_a_checksum_is_refused(path: Path) -> None:
    image = written(path, SAMPLE)
    entries = [(block.length, block.crc32) for block in image.blocks()]
    entries[0] = (0, 1)

    assert refuse(path, with_index(path.read_bytes(), image, entries)).rule == "pageimage.5"


def test_padding_that_is_not_zeros_is_refused(path: Path) -> None:
    image = written(path, SAMPLE)
    compressed = list(image.blocks())[1]
    data = bytearray(path.read_bytes())
    data[compressed.offset + compressed.length] = 1

    assert refuse(path, bytes(data)).rule == "pageimage.6"


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_flipped_byte_in_a_payload_names_its_block(path: Path, number: int) -> None:
    block = list(written(path, SAMPLE).blocks())[number]
    data = bytearray(path.read_bytes())
    data[block.offset + block.length // 2] ^= 1
    path.write_bytes(data)

    with pytest.raises(IntegrityError, match=rf"block {number} .*pageimage\.7"):
        read(path)


def test_a_payload_that_is_no_lz4_block_is_refused_though_its_checksum_is_right(path: Path) -> None:
    image = written(path, SAMPLE)
    compressed = list(image.blocks())[1]
    garbage = b"\xff" * compressed.length
    data = bytearray(path.read_bytes())
    data[compressed.offset : compressed.offset + compressed.length] = garbage
    entries = [(block.length, block.crc32) for block in image.blocks()]
    entries[1] = (compressed.length, zlib.crc32(garbage))

    assert refuse(path, with_index(bytes(data), image, entries)).rule == "pageimage.8"


def test_a_payload_that_gives_too_little_is_refused(path: Path) -> None:
    image = written(path, SAMPLE)
    compressed = list(image.blocks())[1]
    short = lz4.block.compress(bytes(100), store_size=False)
    data = bytearray(path.read_bytes())
    data[compressed.offset : compressed.offset + PAGE] = short.ljust(PAGE, b"\0")
    entries = [(block.length, block.crc32) for block in image.blocks()]
    entries[1] = (len(short), zlib.crc32(short))
    assert image.padded(compressed.length) == PAGE

    assert refuse(path, with_index(bytes(data), image, entries)).rule == "pageimage.8"


@settings(deadline=None, max_examples=300)
@given(at=st.integers(0, 1 << 20), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found(path: Path, at: int, bit: int) -> None:
    if not path.exists() or path.stat().st_size != len(GOOD):
        path.write_bytes(GOOD)
    data = bytearray(GOOD)
    data[at % len(data)] ^= 1 << bit
    path.write_bytes(data)

    with pytest.raises(ArtifactError):
        read(path)


@settings(deadline=None, max_examples=100)
@given(length=st.integers(0, 1 << 20))
def test_any_truncation_is_found(path: Path, length: int) -> None:
    path.write_bytes(GOOD[: length % len(GOOD)])

    with pytest.raises(FormatError):
        read(path)


def _good() -> bytes:
    fd = os.memfd_create("image")
    try:
        write_pages(fd, blocks_of(SAMPLE), block_bytes=BLOCK)
        with io.FileIO(fd, closefd=False) as file:
            file.seek(0)
            return file.readall()
    finally:
        os.close(fd)


GOOD = _good()


def test_the_block_size_of_the_library_is_256_kib(path: Path) -> None:
    assert pageimage.BLOCK_BYTES == 256 << 10
