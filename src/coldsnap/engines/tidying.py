"""What a rank gives back before its process image is taken: memory that is its own and that nothing uses.

Every anonymous page is written to the image, and copied and faulted in at every restore, whether it is in use or not.
What was measured, and what did not help, is in docs/drivers.md.

The one rule: only what nobody can miss is given back, so that nothing is to be undone: the rank goes on as it was.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coldsnap.transfer.heap import can_trim, trim_heap

__all__ = ["MEASURES", "anonymous_bytes", "tidied", "tidy"]

ROLLUP = "/proc/self/smaps_rollup"

MEASURES: tuple[tuple[str, Callable[[], object]], ...] = (("garbage", gc.collect), ("heap", trim_heap))
"""In this order: what the first lets go, the second gives back."""


def tidy(_request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Collect garbage, then give the free pages of the heap back.

    Returns:
        ``freed``: bytes by measure; ``anonymous_bytes`` that the process has left; ``trims``: whether its C library
        can give free pages of its heap back.

    Raises:
        OSError: The kernel does not tell what the process has.
    """
    freed, before = {}, anonymous_bytes()
    for name, measure in MEASURES:
        measure()
        after = anonymous_bytes()
        freed[name], before = max(0, before - after), after
    return {"freed": freed, "anonymous_bytes": before, "trims": can_trim()}


def tidied(replies: Mapping[str, Mapping[str, Any]]) -> Mapping[str, int | str]:
    """Say in a receipt what each rank gave back.

    Args:
        replies: Of :func:`tidy`, by rank.

    Returns:
        ``{"worker.640 freed_bytes": …}``, and what could not be done.
    """
    told: dict[str, int | str] = {}
    for rank, reply in replies.items():
        told[f"{rank} freed_bytes"] = sum(reply["freed"].values())
        if not reply["trims"]:
            told[f"{rank} heap"] = "kept: its C library has no malloc_trim"
    return told


def anonymous_bytes(rollup: str = ROLLUP) -> int:
    """Return the size of this process's anonymous memory; the rollup counts pages, a status line only estimates.

    Args:
        rollup: The kernel's file that adds up the mappings.

    Raises:
        OSError: It cannot be read, or does not say.
    """
    for line in Path(rollup).read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10
    raise OSError(f"{rollup} has no line 'Anonymous:', which Linux 4.14 and newer write; use such a kernel")
