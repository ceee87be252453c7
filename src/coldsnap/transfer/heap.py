"""The C library's heap: what was freed goes back to the kernel.

glibc gives a large block back when it is freed only while that block has a mapping of its own, and the size from which
blocks have one grows with every such block that is freed, up to 32 MiB. A load frees staging buffers of that size, so
that later ones lie in an arena, and the free end of a thread's arena is out of malloc_trim(3)'s reach: weights would
stay there.

The one rule: nothing here ever fails, and what the environment says about malloc stands.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["can_trim", "large_blocks_returned", "trim_heap"]

LOW_BYTES = 64 << 10
"""While large blocks are returned: what is as large as this has a mapping of its own, and no arena keeps more free."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_BYTES = 32 << 20
"""Where glibc's own threshold ends, once a block of that size has been freed (DEFAULT_MMAP_THRESHOLD_MAX)."""
_SAID_BY = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def can_trim() -> bool:
    """Return whether the C library has malloc_trim(3): glibc does, musl does not."""
    return hasattr(ctypes.CDLL(None), "malloc_trim")


def trim_heap() -> bool:
    """Give free pages of every arena back (malloc_trim(3)).

    Returns:
        False where the C library cannot; musl gives large blocks back by itself.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


@contextmanager
def large_blocks_returned() -> Iterator[bool]:
    """Have every block of 64 KiB and more leave the process when it is freed, in all threads.

    Afterwards the thresholds are what a load leaves behind without this: the largest that glibc's own would have grown
    to. It costs a mapping for each such block, which nobody wants to pay while requests are answered.

    Yields:
        Whether it is so: not with another C library, nor where the environment sets these thresholds.
    """
    taken = not _said(os.environ) and _thresholds(LOW_BYTES, LOW_BYTES)
    try:
        yield taken
    finally:
        if taken:
            _thresholds(_LARGEST_BYTES, 2 * _LARGEST_BYTES)


def _said(environment: os._Environ[str]) -> bool:
    tunables = environment.get("GLIBC_TUNABLES", "")
    return any(name in environment for name in _SAID_BY) or "glibc.malloc." in tunables


def _thresholds(mapped_bytes: int, trimmed_bytes: int) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not can_trim():  # musl has neither, and needs neither
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, mapped_bytes)) and bool(mallopt(_M_TRIM_THRESHOLD, trimmed_bytes))
