"""``coldsnap_io.h`` as ctypes sees it: structures and signatures, nothing that acts.

The one rule: field for field and name for name what the header says; a test compiles the header to compare.
"""

from __future__ import annotations

import ctypes
from typing import Any

from coldsnap.transfer.outcome import STAGES

__all__ = ["ABI", "SIGNATURES", "Error", "Extent", "Match", "Options", "Range", "Result", "Statistics"]

ABI = 2


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


class Match(ctypes.Structure):
    """``coldsnap_io_match``."""

    _fields_ = (("file_offset", ctypes.c_uint64), ("pattern", ctypes.c_uint64))


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
    "sha256": (None, [_AT, _U64, _AT]),
    "search": (_INT, [_INT, _U64, _U64, _AT, _U64, _U64, _AT, _U64, _AT]),
    "memcpy": (_INT, [_AT, _AT, _U64, _U32]),
    "read_statistics": (None, [_AT]),
    "release": (_INT, []),
}
