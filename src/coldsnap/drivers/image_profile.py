"""What ``io.image_compression = "auto"`` comes to, and how compressed pages are fed to CRIU: chosen by measurement.

The one rule: the figures are those that ``examples/qualify_image.py`` printed, and the choices follow from them by
:func:`choose`; a new measurement is a new table, never an opinion.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from attrs import frozen

__all__ = ["FEED", "MEASURED", "WORKERS", "Measured", "choose", "image_compression", "stored_as"]

Compression = Literal["none", "lz4"]
Pages = Literal["stored", "rebuilt", "stream"]


@frozen(kw_only=True)
class Measured:
    """One way of storing the pages of an image and of feeding them to CRIU.

    Attributes:
        compression: How they are stored.
        pages: How they reach CRIU.
        workers: Threads that decompress.
        size_ratio: What they take, for each byte that CRIU wrote.
        hot_s: Restore of the image with all of it in the page cache, s.
        cold_s: With none of it there, s.
    """

    compression: Compression
    pages: Pages
    workers: int
    size_ratio: float
    hot_s: float
    cold_s: float


MEASURED = (
    Measured(compression="none", pages="stored", workers=1, size_ratio=0.98, hot_s=2.39, cold_s=7.84),
    Measured(compression="lz4", pages="rebuilt", workers=1, size_ratio=0.30, hot_s=7.40, cold_s=9.94),
    Measured(compression="lz4", pages="rebuilt", workers=4, size_ratio=0.30, hot_s=7.62, cold_s=9.44),
    Measured(compression="lz4", pages="stream", workers=1, size_ratio=0.30, hot_s=6.26, cold_s=6.07),
    Measured(compression="lz4", pages="stream", workers=4, size_ratio=0.30, hot_s=7.16, cold_s=6.53),
)
"""A vLLM server on a CPU, medians of three; ``docs/drivers.md`` says on what machine."""

SAME = 1.05
"""Within a twentieth, two ways are equally fast."""


def choose(measured: Iterable[Measured]) -> Measured:
    """Choose a way: the shortest time for one hot and one cold restore; of equally fast ones the smallest image."""
    rows = list(measured)
    fastest = min(each.hot_s + each.cold_s for each in rows)
    equal = [each for each in rows if each.hot_s + each.cold_s <= SAME * fastest]
    return min(equal, key=lambda each: (each.size_ratio, each.hot_s + each.cold_s))


_COMPRESSED = choose(each for each in MEASURED if each.compression == "lz4")
FEED, WORKERS = _COMPRESSED.pages, _COMPRESSED.workers


def image_compression(requested: str) -> tuple[Compression, str]:
    """Return how a capture stores the pages of its image, and why.

    Args:
        requested: ``io.image_compression``.
    """
    if requested == "lz4":
        return "lz4", "pages in blocks of 256 KiB, zero pages left out"
    if requested == "none":
        return "none", "pages as CRIU wrote them, zero pages left out where they are many"
    chosen = choose(MEASURED)
    other = choose(each for each in MEASURED if each.compression != chosen.compression)
    return chosen.compression, (
        f"measured: a hot and a cold restore took {chosen.hot_s + chosen.cold_s:.1f} s, with {other.compression} "
        f"{other.hot_s + other.cold_s:.1f} s and {other.size_ratio / chosen.size_ratio:.2f} x the space"
    )


def stored_as(compression: Compression) -> Mapping[str, str]:
    """Say how the pages of an artifact are stored, and what a restore does with them."""
    reason = "CRIU reads the pages itself"
    if compression != "none":
        reason = f"decompressing threads: {WORKERS} a file; CRIU is fed {_FED[FEED]}"
    return {"effective": compression, "reason": reason}


_FED = {"stored": "by itself", "rebuilt": "from memory", "stream": "through pipes"}
