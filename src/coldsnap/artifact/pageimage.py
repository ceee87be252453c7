"""The page-image container: pages of a process image in LZ4 blocks, and the codec in Python that the native one equals.

The one rule: a reader believes nothing that it can compute. Offsets follow from lengths, the size of the file from
both, and every payload is compared with its checksum before it is decompressed. ``docs/format/pageimage.md``.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

import lz4.block
from attrs import field, frozen

from coldsnap.errors import FormatError, IntegrityError

__all__ = [
    "ALIGNED",
    "BLOCK_BYTES",
    "PACKED",
    "SUFFIX",
    "Block",
    "PageImage",
    "read_image",
    "read_pages",
    "write_pages",
]

PAGE_BYTES = 4096
BLOCK_BYTES = 256 << 10
MAX_BLOCK_BYTES = 4 << 20
HEADER_BYTES = PAGE_BYTES
ALIGNED, PACKED = PAGE_BYTES, 1
SUFFIX = ".blocks"
"""``pages-3.img`` is kept as ``pages-3.blocks``."""

MAGIC = b"CSPAGES\0"
VERSION = 1
HEADER = struct.Struct("<8sIIQQIII")
"""Magic, version, bytes of a block, raw bytes, blocks, alignment, CRC-32 of the index, CRC-32 of what is before."""

ENTRY = struct.Struct("<II")
MAX_RAW_BYTES = 1 << 46


class Block(NamedTuple):
    """One block: where its payload is, how long it and the pages in it are."""

    offset: int
    length: int
    crc32: int
    raw_bytes: int


@frozen(kw_only=True)
class PageImage:
    """Header and index of an image.

    Attributes:
        raw_bytes: Of all pages together.
        block_bytes: Of a block before compression; the last one may be shorter.
        align_bytes: Payloads start at multiples of it.
        index: Length and CRC-32 of every payload, as in the file.
        path: Where it was read, for errors.
    """

    raw_bytes: int
    block_bytes: int = BLOCK_BYTES
    align_bytes: int = ALIGNED
    index: bytes = field(repr=False)
    path: str = field(default="", eq=False)

    @property
    def count(self) -> int:
        """Return how many blocks there are."""
        return -(-self.raw_bytes // self.block_bytes)

    @property
    def payload_end(self) -> int:
        """Return where the last payload ends, padding included."""
        return HEADER_BYTES + sum(self.padded(length) for length, _ in ENTRY.iter_unpack(self.index))

    @property
    def file_bytes(self) -> int:
        """Return the size of the whole file."""
        return self.padded(self.payload_end + len(self.index))

    def padded(self, length: int) -> int:
        """Return a length, or an offset, at the next multiple of the alignment."""
        return length + -length % self.align_bytes

    def blocks(self) -> Iterator[Block]:
        """Return every block."""
        entries = list(ENTRY.iter_unpack(self.index))
        offsets = accumulate((self.padded(length) for length, _ in entries), initial=HEADER_BYTES)
        for number, (offset, (length, crc32)) in enumerate(zip(offsets, entries, strict=False)):
            raw = min(self.block_bytes, self.raw_bytes - number * self.block_bytes)
            yield Block(offset, length, crc32, raw)

    def header(self) -> bytes:
        """Return the bytes of the header, padding included."""
        start = HEADER.pack(
            MAGIC,
            VERSION,
            self.block_bytes,
            self.raw_bytes,
            self.count,
            self.align_bytes,
            zlib.crc32(self.index),
            0,
        )[:-4]
        return (start + struct.pack("<I", zlib.crc32(start))).ljust(HEADER_BYTES, b"\0")

    def finish(self, fd: int) -> None:
        """Write index and header to a file that has its payloads.

        Raises:
            OSError: They cannot be written.
        """
        _write(fd, self.index.ljust(self.file_bytes - self.payload_end, b"\0"), self.payload_end)
        _write(fd, self.header(), 0)


def _write(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def read_image(fd: int, path: str = "") -> PageImage:
    """Read and check header and index.

    Args:
        fd: Of the file.
        path: For errors.

    Raises:
        FormatError: Rules pageimage.1 to pageimage.5.
    """

    def require(rule: int, holds: object, what: str) -> None:
        if not holds:
            raise FormatError(what, path=path, rule=f"pageimage.{rule}")

    size = os.fstat(fd).st_size
    head = os.pread(fd, HEADER_BYTES, 0)
    require(1, len(head) == HEADER_BYTES and head.startswith(MAGIC), "it does not start like a page image")
    _, version, block, raw, count, align, index_crc, head_crc = HEADER.unpack_from(head)
    require(1, zlib.crc32(head[: HEADER.size - 4]) == head_crc, "its header is damaged")
    require(1, not any(head[HEADER.size :]), "its header is damaged")
    require(2, version == VERSION, f"its version is {version}, this library reads {VERSION}")
    require(3, 0 < block <= MAX_BLOCK_BYTES and block % PAGE_BYTES == 0, f"its blocks have {block} bytes")
    require(3, align in (ALIGNED, PACKED), f"its payloads are aligned to {align} bytes")
    require(3, raw % PAGE_BYTES == 0 and raw <= MAX_RAW_BYTES, f"it has {raw} bytes of pages")
    require(4, count == -(-raw // block), f"it has {count} blocks for {raw} bytes of pages")
    # Before a size taken from the file is allocated: the index ends the file, so it is where the size says, or nowhere.
    tail = count * ENTRY.size
    require(4, HEADER_BYTES + tail <= size, f"it is cut short: {size} bytes")
    shape = PageImage(raw_bytes=raw, block_bytes=block, align_bytes=align, index=b"", path=path)
    image = _with_index(fd, shape, size, tail, index_crc)
    require(4, image is not None, "its index is damaged, or its end is cut off")
    assert image is not None  # noqa: S101 - just required
    for number, each in enumerate(image.blocks()):
        require(5, each.length <= each.raw_bytes, f"block {number} is longer than its pages")
        require(5, each.length or not each.crc32, f"block {number} has a checksum and no payload")
    require(4, image.file_bytes == size, f"it should have {image.file_bytes} bytes and has {size}")
    return image


def _with_index(fd: int, shape: PageImage, size: int, tail: int, crc: int) -> PageImage | None:
    """Find the index: it starts at a multiple of the alignment, and less than one alignment of padding follows it."""
    start = size - shape.padded(tail) if shape.align_bytes == ALIGNED else size - tail
    if start < HEADER_BYTES or start % shape.align_bytes:
        return None
    end = os.pread(fd, size - start, start)
    if len(end) != size - start or zlib.crc32(end[:tail]) != crc or any(end[tail:]):
        return None
    return PageImage(
        raw_bytes=shape.raw_bytes,
        block_bytes=shape.block_bytes,
        align_bytes=shape.align_bytes,
        index=end[:tail],
        path=shape.path,
    )


def write_pages(
    fd: int,
    pages: Iterable[bytes],
    *,
    block_bytes: int = BLOCK_BYTES,
    align_bytes: int = ALIGNED,
    acceleration: int = 1,
) -> PageImage:
    """Write an image: the reference for the native codec.

    Args:
        fd: Of an empty file.
        pages: The content of every block, in order.
        block_bytes: Of a block.
        align_bytes: 4096, or 1: packed.
        acceleration: LZ4's.

    Returns:
        What was written.
    """
    index, raw_bytes, at = bytearray(), 0, HEADER_BYTES
    for block in pages:
        payload = _payload(block, align_bytes, acceleration)
        _write(fd, payload.ljust(len(payload) + -len(payload) % align_bytes, b"\0"), at)
        at += len(payload) + -len(payload) % align_bytes
        index += ENTRY.pack(len(payload), zlib.crc32(payload))
        raw_bytes += len(block)
    image = PageImage(raw_bytes=raw_bytes, block_bytes=block_bytes, align_bytes=align_bytes, index=bytes(index))
    image.finish(fd)
    return image


def _payload(block: bytes, align_bytes: int, acceleration: int) -> bytes:
    if not any(block):
        return b""
    packed: bytes = lz4.block.compress(block, mode="fast", acceleration=acceleration, store_size=False)
    saves = len(packed) + -len(packed) % align_bytes < len(block) + -len(block) % align_bytes
    return packed if saves else block


def read_pages(fd: int, image: PageImage) -> Iterator[bytes]:
    """Read the pages of an image, block by block: the reference for the native codec.

    Args:
        fd: Of the file.
        image: From :func:`read_image`.

    Raises:
        FormatError: Rules pageimage.6 and pageimage.8: padding, and what a payload gives.
        IntegrityError: Rule pageimage.7: the payload of a block is not what was written.
    """
    for number, block in enumerate(image.blocks()):
        data = os.pread(fd, image.padded(block.length), block.offset)
        payload, padding = data[: block.length], data[block.length :]
        if len(data) != image.padded(block.length) or any(padding):
            raise FormatError(f"block {number} is cut short or badly padded", path=image.path, rule="pageimage.6")
        if block.length and (found := zlib.crc32(payload)) != block.crc32:
            where = f"{image.path}, block {number} (rule pageimage.7)"
            raise IntegrityError("wrong bytes", path=where, expected=f"{block.crc32:08x}", actual=f"{found:08x}")
        yield _content(payload, block, number, image.path)


def _content(payload: bytes, block: Block, number: int, path: str) -> bytes:
    if not payload:
        return bytes(block.raw_bytes)
    if len(payload) == block.raw_bytes:
        return payload
    try:
        content: bytes = lz4.block.decompress(payload, uncompressed_size=block.raw_bytes)
    except lz4.block.LZ4BlockError as error:
        raise FormatError(f"block {number} is not an LZ4 block: {error}", path=path, rule="pageimage.8") from error
    if len(content) != block.raw_bytes:
        raise FormatError(f"block {number} does not hold its pages", path=path, rule="pageimage.8")
    return content
