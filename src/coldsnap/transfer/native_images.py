"""Page images, the native side: zero pages found, pages compressed into blocks and brought back.

The one rule: a part of :class:`~coldsnap.transfer.native.NativeLibrary`, which loads and checks the library; the calls
here leave the interpreter's lock, so that a thread of Python is a thread.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Sequence
from typing import Literal, Protocol

from attrs import field, frozen, validators

from coldsnap.artifact.pageimage import ALIGNED, HEADER_BYTES, PAGE_BYTES, PageImage
from coldsnap.transfer import interface

__all__ = ["Backend", "ImageMoved", "NativeImages", "Span"]

Span = tuple[int, int]
"""Offset and length in a file, bytes."""

Backend = Literal["auto", "buffered", "direct"]

_SEQUENTIAL = 1
_BACKENDS: dict[Backend, int] = {"auto": 0, "buffered": 1, "direct": 2}


@frozen(kw_only=True)
class ImageMoved:
    """What compressing or decompressing an image took.

    Attributes:
        raw_bytes: Of the pages.
        zero_bytes: Of them in blocks of zeros.
        payload_bytes: Of the payloads, without padding.
        buffered_bytes: Read through the page cache.
        direct_bytes: Read around it.
        workers: Threads that compressed or decompressed.
        io_s: Reading, summed over threads, s.
        codec_s: Compressing or decompressing, summed, s.
        write_s: Writing, summed, s.
        seconds: All of it on the clock, s.
    """

    raw_bytes: int
    zero_bytes: int = 0
    payload_bytes: int = 0
    buffered_bytes: int = 0
    direct_bytes: int = 0
    workers: int = field(default=1, validator=validators.ge(1))
    io_s: float = 0.0
    codec_s: float = 0.0
    write_s: float = 0.0
    seconds: float = 0.0


class _Checked(Protocol):
    _library: ctypes.CDLL

    def _check(self, status: int, what: str, path: str = "") -> None: ...


class NativeImages:
    """The calls about page images."""

    def zero_pages(self: _Checked, fd: int, pages: int) -> bytes:
        """Say of each of the first pages of a file whether it is all zeros: a byte each, 1 or 0.

        Raises:
            NativeError: It cannot be read that far.
        """
        found = bytearray(pages)
        address = ctypes.addressof(ctypes.c_char.from_buffer(found)) if pages else None
        self._check(self._library.coldsnap_io_zero_pages(fd, address, pages), "looking for zero pages")
        return bytes(found)

    def pack_pages(
        self: _Checked,
        source: int,
        spans: Sequence[Span],
        target: int,
        *,
        block_bytes: int,
        align_bytes: int = ALIGNED,
        acceleration: int = 1,
        workers: int = 1,
        path: str = "",
    ) -> tuple[PageImage, ImageMoved]:
        """Compress stretches of one file into the payloads of another.

        Args:
            source: Descriptor of a file of pages.
            spans: What of it, in this order; whole pages.
            target: Descriptor of an empty file.
            block_bytes: Size of a block before compression.
            align_bytes: 4096, or 1 for a packed image.
            acceleration: LZ4's: 1 compresses best.
            workers: Threads.
            path: For errors.

        Returns:
            The image, whose header and index are still to be written, and what it took.

        Raises:
            NativeError: A file cannot be read or written, or the disk is full.
        """
        raw_bytes = sum(length for _, length in spans)
        blocks = bytearray(8 * -(-raw_bytes // block_bytes))
        request = _request(block_bytes, raw_bytes, align_bytes, workers, acceleration=acceleration)
        native, result = (
            (interface.Span * len(spans))(*(interface.Span(*span) for span in spans)),
            interface.ImageResult(),
        )
        index = (ctypes.c_char * len(blocks)).from_buffer(blocks)
        status = self._library.coldsnap_io_pack_pages(
            source,
            native,
            len(spans),
            target,
            ctypes.byref(request),
            index,
            len(blocks) // 8,
            ctypes.byref(result),
        )
        self._check(status, f"compressing pages into {path or 'a page image'}", path)
        image = PageImage(
            raw_bytes=raw_bytes, block_bytes=block_bytes, align_bytes=align_bytes, index=bytes(blocks), path=path
        )
        return image, _moved(result)

    def unpack_pages(
        self: _Checked,
        source: int,
        image: PageImage,
        target: int,
        *,
        workers: int = 1,
        backend: Backend = "auto",
        sequential: bool = False,
    ) -> ImageMoved:
        """Bring the pages of an image back; each payload is compared with its checksum before it is decompressed.

        Args:
            source: Descriptor of the image.
            image: Its header and index.
            target: Descriptor of a file without content, which keeps holes where blocks are zeros; or of a pipe.
            workers: Threads that decompress.
            backend: How it is read; ``auto``: directly unless the page cache holds it.
            sequential: Write in order, zeros too, as a pipe needs it.

        Raises:
            IntegrityError: A block is not what was written.
            NativeError: It is too short, cannot be read, or cannot be read directly; the target takes no more.
            BrokenPipeError: The other end of the pipe is closed.
        """
        request = _request(
            image.block_bytes,
            image.raw_bytes,
            image.align_bytes,
            workers,
            backend=backend,
            flags=_SEQUENTIAL if sequential else 0,
        )
        index, result = (ctypes.c_char * len(image.index)).from_buffer_copy(image.index), interface.ImageResult()
        status = self._library.coldsnap_io_unpack_pages(
            source, index, len(image.index) // 8, target, ctypes.byref(request), ctypes.byref(result)
        )
        if status and sequential and self._library.coldsnap_io_last_error().contents.os_error == errno.EPIPE:
            raise BrokenPipeError(errno.EPIPE, f"nobody reads the pages of {image.path} any more")
        self._check(status, f"reading the page image {image.path}", image.path)
        return _moved(result)


def _request(
    block_bytes: int,
    raw_bytes: int,
    align_bytes: int,
    workers: int,
    *,
    acceleration: int = 1,
    backend: Backend = "auto",
    flags: int = 0,
) -> interface.Image:
    if raw_bytes % PAGE_BYTES:
        raise ValueError(f"an image has whole pages, not {raw_bytes} bytes")
    return interface.Image(
        abi=interface.ABI,
        block_bytes=block_bytes,
        raw_bytes=raw_bytes,
        payload_offset=HEADER_BYTES,
        alignment=align_bytes,
        acceleration=acceleration,
        backend=_BACKENDS[backend],
        workers=workers,
        flags=flags,
    )


def _moved(result: interface.ImageResult) -> ImageMoved:
    return ImageMoved(
        raw_bytes=result.raw_bytes,
        zero_bytes=result.zero_bytes,
        payload_bytes=result.payload_bytes,
        buffered_bytes=result.buffered_bytes,
        direct_bytes=result.direct_bytes,
        workers=result.workers,
        io_s=result.io_ns / 1e9,
        codec_s=result.codec_ns / 1e9,
        write_s=result.write_ns / 1e9,
        seconds=result.total_ns / 1e9,
    )
