"""The native codec of page images: equal to the Python one in what it reads, and in what it refuses."""

import os
import random
import struct
import threading
import zlib
from contextlib import contextmanager

import lz4.block
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.artifact import pageimage
from coldsnap.artifact.pageimage import ALIGNED, PACKED, PageImage, read_image, read_pages, write_pages
from coldsnap.errors import IntegrityError, NativeError

PAGE = 4096
WAYS = [
    {"workers": workers, "sequential": sequential, "backend": backend}
    for workers in (1, 3)
    for sequential in (False, True)
    for backend in ("auto", "buffered")
]


@contextmanager
def memory(data=b""):
    fd = os.memfd_create("image")
    try:
        os.write(fd, data) if data else None
        yield fd
    finally:
        os.close(fd)


def pages(seed, count):
    """Zeros, text with long and short repeats, noise, and a mixture within one page."""
    draw = random.Random(seed)
    kinds = (
        lambda: bytes(PAGE),
        lambda: (draw.randbytes(draw.randint(1, 40)) * PAGE)[:PAGE],
        lambda: draw.randbytes(PAGE),
        lambda: draw.randbytes(PAGE // 2) + bytes(PAGE // 2),
        lambda: b"".join(struct.pack("<If", n, n / 3) for n in range(draw.randint(0, 9), PAGE // 8 + 9))[:PAGE],
    )
    return b"".join(draw.choice(kinds)() for _ in range(count))


def unpacked(library, fd, image, *, sequential=False, **options):
    if not sequential:
        with memory() as target:
            os.ftruncate(target, image.raw_bytes)
            moved = library.unpack_pages(fd, image, target, **options)
            return os.pread(target, image.raw_bytes + 1, 0), moved
    reading, writing = os.pipe()
    parts = []

    def drain():
        with os.fdopen(reading, "rb") as file:
            parts.append(file.read())

    thread = threading.Thread(target=drain)
    thread.start()
    try:
        moved = library.unpack_pages(fd, image, writing, sequential=True, **options)
    finally:
        os.close(writing)
        thread.join()
    return parts[0], moved


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 1 << 30),
    count=st.integers(0, 80),
    block_pages=st.sampled_from([1, 3, 16, 64]),
    align=st.sampled_from([ALIGNED, PACKED]),
    acceleration=st.sampled_from([1, 9]),
    way=st.sampled_from(WAYS),
)
def test_either_codec_reads_what_either_wrote(library, seed, count, block_pages, align, acceleration, way):
    content, block = pages(seed, count), block_pages * PAGE
    with memory(content) as source, memory() as native, memory() as python:
        image, packed = library.pack_pages(
            source, [(0, len(content))], native, block_bytes=block, align_bytes=align, acceleration=acceleration
        )
        image.finish(native)
        blocks = [content[at : at + block] for at in range(0, len(content), block)]
        reference = write_pages(python, blocks, block_bytes=block, align_bytes=align, acceleration=acceleration)

        assert read_image(native) == image
        assert b"".join(read_pages(native, image)) == content
        for fd, known in ((native, image), (python, reference)):
            data, moved = unpacked(library, fd, known, **way)
            assert data == content
            assert moved.raw_bytes == len(content)
            zeros = [each.raw_bytes for each in known.blocks() if not each.length]
            assert moved.zero_bytes == sum(zeros)
            assert moved.payload_bytes == sum(each.length for each in known.blocks())
        assert [not each.length for each in image.blocks()] == [not each.length for each in reference.blocks()]
        assert packed.payload_bytes == sum(each.length for each in image.blocks())


def test_it_compresses_about_as_well_as_the_reference(library):
    content = pages(7, 2048)
    with memory(content) as source, memory() as target:
        image, _ = library.pack_pages(source, [(0, len(content))], target, block_bytes=pageimage.BLOCK_BYTES)
        blocks = [content[at : at + image.block_bytes] for at in range(0, len(content), image.block_bytes)]
        with memory() as python:
            reference = write_pages(python, blocks)

    assert image.payload_end < 1.05 * reference.payload_end


def test_spans_are_taken_one_after_the_other(library):
    content = pages(1, 40)
    spans = [(36 * PAGE, 2 * PAGE), (0, PAGE), (5 * PAGE, 20 * PAGE), (30 * PAGE, PAGE)]
    with memory(content) as source, memory() as target:
        image, _ = library.pack_pages(source, spans, target, block_bytes=8 * PAGE, workers=2)
        image.finish(target)
        expected = b"".join(content[at : at + length] for at, length in spans)

        assert b"".join(read_pages(target, read_image(target))) == expected


def test_many_workers_write_the_same_file(library):
    content = pages(3, 5000)
    found = []
    for workers in (1, 4):
        with memory(content) as source, memory() as target:
            image, _ = library.pack_pages(source, [(0, len(content))], target, block_bytes=64 << 10, workers=workers)
            image.finish(target)
            found.append(os.pread(target, image.file_bytes + 1, 0))

    assert found[0] == found[1]


def test_zero_pages_are_found(library):
    content = bytes(PAGE) + b"\1" + bytes(PAGE - 1) + bytes(PAGE) + bytes(PAGE - 1) + b"\1" + bytes(2000 * PAGE)
    with memory(content) as source:
        assert library.zero_pages(source, 2004) == b"\1\0\1\0" + b"\1" * 2000
        with pytest.raises(NativeError):
            library.zero_pages(source, 2005)


def test_blocks_of_zeros_stay_holes_of_the_target(library):
    content = bytes(64 * PAGE) + pages(5, 64) + bytes(256 * PAGE)
    with memory(content) as source, memory() as packed, memory() as target:
        image, _ = library.pack_pages(source, [(0, len(content))], packed, block_bytes=64 * PAGE)
        os.ftruncate(target, image.raw_bytes)
        library.unpack_pages(packed, image, target)

        assert os.fstat(target).st_blocks * 512 <= 64 * PAGE
        assert os.pread(target, len(content), 0) == content


def test_an_image_on_a_disk_is_read_around_the_page_cache_unless_it_is_there(library, tmp_path):
    content = pages(11, 3000)
    with memory(content) as source, open(tmp_path / "image", "w+b") as file:
        fd = file.fileno()
        image, _ = library.pack_pages(source, [(0, len(content))], fd, block_bytes=pageimage.BLOCK_BYTES)
        image.finish(fd)
        os.fsync(fd)
        hot, moved = unpacked(library, fd, image)
        assert (moved.direct_bytes, hot == content) == (0, True)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            direct, moved = unpacked(library, fd, image, backend="direct")
        except NativeError:
            pytest.fail("the temporary directory of the tests takes no direct reads")
        assert (moved.buffered_bytes, direct == content) == (0, True)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        cold, moved = unpacked(library, fd, image)
        assert cold == content
        assert moved.direct_bytes > 0


def test_a_packed_image_is_never_read_directly(library):
    content = pages(2, 16)
    with memory(content) as source, memory() as target:
        image, _ = library.pack_pages(source, [(0, len(content))], target, block_bytes=4 * PAGE, align_bytes=PACKED)
        with pytest.raises(NativeError, match="packed"):
            unpacked(library, target, image, backend="direct")


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_flipped_byte_names_its_block(library, way):
    content = pages(4, 600)
    with memory(content) as source, memory() as target:
        image, _ = library.pack_pages(source, [(0, len(content))], target, block_bytes=16 * PAGE)
        block = list(image.blocks())[20]
        at = block.offset + block.length // 2
        flipped = bytes([os.pread(target, 1, at)[0] ^ 1])
        os.pwrite(target, flipped, at)

        with pytest.raises(IntegrityError, match="extent 20"):
            unpacked(library, target, image, **way)


def test_a_truncated_image_is_an_error_and_no_hang(library):
    content = pages(4, 3000)
    with memory(content) as source, memory() as target:
        image, _ = library.pack_pages(source, [(0, len(content))], target, block_bytes=16 * PAGE)
        os.ftruncate(target, image.payload_end // 2)

        for way in WAYS:
            with pytest.raises(NativeError):
                unpacked(library, target, image, **way)


def test_a_pipe_that_nobody_reads_is_a_broken_pipe(library):
    content = pages(4, 3000)
    with memory(content) as source, memory() as target:
        image, _ = library.pack_pages(source, [(0, len(content))], target, block_bytes=16 * PAGE)
        reading, writing = os.pipe()
        os.close(reading)
        try:
            with pytest.raises(BrokenPipeError):
                library.unpack_pages(target, image, writing, sequential=True, workers=2)
        finally:
            os.close(writing)


def test_a_full_disk_is_an_error(library):
    content = pages(4, 3000)
    with memory(content) as source, open("/dev/full", "wb", buffering=0) as full:
        with pytest.raises(NativeError, match=r"(?i)space|full"):
            library.pack_pages(source, [(0, len(content))], full.fileno(), block_bytes=16 * PAGE, workers=2)


def fuzzed(draw, payload):
    data = bytearray(payload)
    for _ in range(draw.randint(1, 6)):
        kind = draw.randrange(4)
        at = draw.randrange(len(data))
        if kind == 0:
            data[at] = draw.randrange(256)
        elif kind == 1:
            data[at] = draw.choice([0, 0x0F, 0xF0, 0xFF])
        elif kind == 2 and len(data) > 8:
            del data[at : at + draw.randint(1, 8)]
        else:
            data[at:at] = draw.randbytes(draw.randint(1, 8))
    return bytes(data[: 16 * PAGE - 1])


def test_a_damaged_block_with_the_right_checksum_gives_what_the_reference_gives_or_is_refused(library):
    """A short pass of a fuzzer; the whole buffer and its slack are guarded by the sanitizers' own build."""
    draw = random.Random(0)
    block = 16 * PAGE
    accepted = 0
    for seed in range(400):
        content = pages(seed, 16)
        payload = fuzzed(draw, lz4.block.compress(content, store_size=False)[: block - 1])
        index = struct.pack("<II", len(payload), zlib.crc32(payload))
        image = PageImage(raw_bytes=block, block_bytes=block, index=index)
        with memory(bytes(PAGE) + payload.ljust(image.padded(len(payload)), b"\0")) as fd:
            try:
                found, _ = unpacked(library, fd, image)
            except IntegrityError:
                continue
            accepted += 1
            assert found == lz4.block.decompress(payload, uncompressed_size=block)
    assert accepted
