"""``coldsnap_io.h`` as ctypes sees it: structures and signatures, nothing that acts.

The one rule: field for field and name for name what the header says; a test compiles the header to compare.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

from coldsnap.transfer.backend import FileExtent, Source
from coldsnap.transfer.outcome import STAGES

__all__ = [
    "ABI",
    "SIGNATURES",
    "Error",
    "Extent",
    "Image",
    "ImageResult",
    "Match",
    "Options",
    "Part",
    "Range",
    "Result",
    "Span",
    "Statistics",
    "Stream",
    "addresses",
    "extents_of",
    "sources_of",
]

ABI = 2
_VERIFY = {"none": 0, "crc32": 1, "crc32+sha256": 2}


class Extent(ctypes.Structure):
    """``coldsnap_io_extent``."""

    _fields_ = (
        ("file_offset", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
        ("verify", ctypes.c_uint32),
        ("crc32", ctypes.c_uint32),
        ("sha256", ctypes.c_uint8 * 32),
    )


class Options(ctypes.Structure):
    """``coldsnap_io_options``."""

    _fields_ = (
        ("abi", ctypes.c_uint32),
        ("backend", ctypes.c_uint32),
        ("access", ctypes.c_uint32),
        ("queue_depth", ctypes.c_uint32),
        ("chunk_bytes", ctypes.c_uint64),
        ("slice_bytes", ctypes.c_uint64),
        ("threads", ctypes.c_uint32),
        ("cuda_device", ctypes.c_int32),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class Range(ctypes.Structure):
    """``coldsnap_io_range``."""

    _fields_ = (
        ("file_offset", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
        ("backend", ctypes.c_uint32),
        ("reason", ctypes.c_uint32),
    )


_COUNTS = ("bytes", "buffered_bytes", "direct_bytes", "edge_bytes", "file_bytes", "verified_extents", "slices")
_SIZES = ("slice_bytes", "ring_bytes", "range_count")


class Result(ctypes.Structure):
    """``coldsnap_io_result``."""

    _fields_ = (
        ("abi", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in _COUNTS + _SIZES),
        ("access", ctypes.c_uint32),
        ("direct_errno", ctypes.c_int32),
        ("reason", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in STAGES),
        ("file_sha256", ctypes.c_uint8 * 32),
    )


class Error(ctypes.Structure):
    """``coldsnap_io_error``."""

    _fields_ = (
        ("status", ctypes.c_uint32),
        ("os_error", ctypes.c_int32),
        ("driver_error", ctypes.c_int32),
        ("reserved", ctypes.c_uint32),
        ("extent", ctypes.c_uint64),
        ("message", ctypes.c_char * 512),
        ("expected", ctypes.c_char * 80),
        ("actual", ctypes.c_char * 80),
    )


class Statistics(ctypes.Structure):
    """``coldsnap_io_statistics``."""

    _fields_ = (("ring_bytes", ctypes.c_uint64), ("registered_bytes", ctypes.c_uint64))


class Stream(ctypes.Structure):
    """``coldsnap_io_sha256_stream``."""

    _fields_ = (("opaque", ctypes.c_uint64 * 13),)


class Part(ctypes.Structure):
    """``coldsnap_io_sha256_part``."""

    _fields_ = (("stream", ctypes.POINTER(Stream)), ("data", ctypes.c_void_p), ("length", ctypes.c_uint64))


class Match(ctypes.Structure):
    """``coldsnap_io_match``."""

    _fields_ = (("file_offset", ctypes.c_uint64), ("pattern", ctypes.c_uint64))


class _Buffer(ctypes.Structure):
    """``Py_buffer``, whose layout is part of Python's stable ABI."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


@contextlib.contextmanager
def addresses(*views: memoryview) -> Iterator[list[int]]:
    """Yield the addresses of contiguous buffers, read-only ones too, which ctypes alone has no way to.

    They hold inside the block.

    Raises:
        BufferError: One is not contiguous.
    """
    held = (_Buffer * len(views))()
    with contextlib.ExitStack() as stack:
        for buffer, view in zip(held, views, strict=True):
            ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
            stack.callback(ctypes.pythonapi.PyBuffer_Release, ctypes.byref(buffer))
        yield [buffer.buf or 0 for buffer in held]


def extents_of(extents: Sequence[FileExtent]) -> Any:
    """Return an array of ``coldsnap_io_extent`` to hydrate."""
    array = (Extent * len(extents))()
    for native, extent in zip(array, extents, strict=True):
        native.file_offset, native.address, native.length = extent.file_offset, extent.address, extent.length
        if extent.crc32 is not None:
            native.verify, native.crc32 = 1, extent.crc32
        if extent.sha256 is not None:
            native.verify, native.sha256 = 2, (ctypes.c_uint8 * 32).from_buffer_copy(extent.sha256)
    return array


def sources_of(sources: Sequence[Source]) -> Any:
    """Return an array of ``coldsnap_io_extent`` to capture."""
    array = (Extent * len(sources))()
    for native, source in zip(array, sources, strict=True):
        native.file_offset, native.address, native.length = source.file_offset, source.address, source.length
        native.verify = _VERIFY[source.verification]
    return array


class Span(ctypes.Structure):
    """``coldsnap_io_span``."""

    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class Image(ctypes.Structure):
    """``coldsnap_io_image``."""

    _fields_ = (
        ("abi", ctypes.c_uint32),
        ("block_bytes", ctypes.c_uint32),
        ("raw_bytes", ctypes.c_uint64),
        ("payload_offset", ctypes.c_uint64),
        ("alignment", ctypes.c_uint32),
        ("acceleration", ctypes.c_uint32),
        ("backend", ctypes.c_uint32),
        ("workers", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class ImageResult(ctypes.Structure):
    """``coldsnap_io_image_result``."""

    _fields_ = (
        ("workers", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("raw_bytes", "zero_bytes", "payload_bytes", "end")),
        *((name, ctypes.c_uint64) for name in ("buffered_bytes", "direct_bytes")),
        *((name, ctypes.c_uint64) for name in ("io_ns", "codec_ns", "write_ns", "total_ns")),
    )


_INT, _U32, _I32, _U64, _TEXT, _AT = (
    *(ctypes.c_int, ctypes.c_uint32, ctypes.c_int32, ctypes.c_uint64),
    *(ctypes.c_char_p, ctypes.c_void_p),
)
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "abi_version": (_U32, []),
    "last_error": (ctypes.POINTER(Error), []),
    "load_cuda": (_INT, [_TEXT]),
    "load_cufile": (_INT, [_TEXT]),
    "hydrate_available": (_INT, [_U32, _I32]),
    "capture_available": (_INT, [_U32, _I32]),
    "probe_gds": (_INT, [_INT, _I32]),
    "hydrate": (_INT, [_INT, _AT, _U64, _AT, _AT, _AT, _U64]),
    "capture": (_INT, [_INT, _AT, _U64, _AT, _AT]),
    "residency": (_INT, [_INT, _U64, _U64, _U64, _AT, _U64]),
    "crc32": (_U32, [_U32, _AT, _U64]),
    "crc32_combine": (_U32, [_U32, _U32, _U64]),
    "crc32_copy": (_U32, [_U32, _AT, _AT, _U64]),
    "sha256": (None, [_AT, _U64, _AT]),
    "sha256_begin": (None, [_AT]),
    "sha256_update": (None, [_AT, _U64]),
    "sha256_end": (None, [_AT, _AT]),
    "sha256_lanes": (_U32, []),
    "sha256_limit": (None, [_U32]),
    "search": (_INT, [_INT, _U64, _U64, _AT, _U64, _U64, _AT, _U64, _AT]),
    "zero_pages": (_INT, [_INT, _AT, _U64]),
    "pack_pages": (_INT, [_INT, _AT, _U64, _INT, _AT, _AT, _U64, _AT]),
    "unpack_pages": (_INT, [_INT, _AT, _U64, _INT, _AT, _AT]),
    "memcpy": (_INT, [_AT, _AT, _U64, _U32]),
    "read_statistics": (None, [_AT]),
    "release": (_INT, []),
}
