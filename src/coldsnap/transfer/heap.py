"""The C library's heap: what was freed goes back to the kernel.

The one rule: it is asked for after bytes were freed that must not be in a process image, and never fails.
"""

from __future__ import annotations

import ctypes

__all__ = ["can_trim", "trim_heap"]


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
