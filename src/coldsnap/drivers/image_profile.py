"""What ``io.image_compression = "auto"`` comes to, and how compressed pages are fed to CRIU: chosen by measurement.

The one rule: the figures are those that ``examples/qualify_image.py`` printed, and the choices follow from them by the
rules written here; a new measurement is a new table, never an opinion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from attrs import frozen

__all__ = ["FEED", "MEASURED", "WORKERS", "Measured", "choose_compression", "image_compression", "stored_as"]

Compression = Literal["none", "lz4"]


@frozen(kw_only=True)
class Measured:
    """One way of storing the pages of an image.

    Attributes:
        compression: The way.
        size_ratio: What it takes, for each byte that CRIU wrote.
        hot_ratio: Restore with everything in the page cache, in times of the uncompressed image's.
        cold_ratio: The same with nothing in the page cache.
    """

    compression: Compression
    size_ratio: float
    hot_ratio: float
    cold_ratio: float


MEASURED = (
    Measured(compression="none", size_ratio=0.98, hot_ratio=1.0, cold_ratio=1.0),
    Measured(compression="lz4", size_ratio=0.30, hot_ratio=2.0, cold_ratio=1.7),
)
"""A vLLM server on two cores of a virtual machine with a fast virtual disk."""

FEED: Literal["rebuilt", "stream"] = "rebuilt"
WORKERS = 1
"""One thread decompresses: another reads, and CRIU's processes wait for the memory bus."""

SAME = 1.05
"""Within a twentieth, two restores are equally fast."""


def choose_compression(measured: tuple[Measured, ...] = MEASURED) -> Measured:
    """Choose: the faster restore from a cold cache; among equally fast ones the smaller image."""
    fastest = min(each.cold_ratio for each in measured)
    return min((each for each in measured if each.cold_ratio <= SAME * fastest), key=lambda each: each.size_ratio)


def image_compression(requested: str) -> tuple[Compression, str]:
    """Return how a capture stores the pages of its image, and why.

    Args:
        requested: ``io.image_compression``.
    """
    if requested == "lz4":
        return "lz4", "pages in blocks of 256 KiB, zero pages left out"
    if requested == "none":
        return "none", "pages as CRIU wrote them, zero pages left out where they are many"
    chosen = choose_compression()
    other = next(each for each in MEASURED if each.compression != chosen.compression)
    times = other.cold_ratio / chosen.cold_ratio
    return chosen.compression, (
        f"measured: {other.compression} takes {times:.1f} x as long to restore from a cold cache, "
        f"and {other.size_ratio / chosen.size_ratio:.2f} x the space"
    )


def stored_as(compression: Compression) -> Mapping[str, str]:
    """Say how the pages of an artifact are stored, and what a restore does with them."""
    reason = "CRIU reads the pages itself"
    if compression != "none":
        reason = f"{WORKERS} thread decompresses, CRIU is fed {_FED[FEED]}"
    return {"effective": compression, "reason": reason}


_FED = {"rebuilt": "from memory", "stream": "through pipes"}
