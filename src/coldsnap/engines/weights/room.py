"""Room on the filesystems that a worker writes to.

The one rule: measured before the first byte, so that what does not fit is refused and not broken off.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from coldsnap.errors import AdmissionError

__all__ = ["require_room"]


def require_room(wanted: Iterable[tuple[Path, int]], *, reserve_bytes: int, what: str) -> None:
    """Demand that what will be written fits, and leaves something.

    Args:
        wanted: Directories, which need not exist yet, and the bytes that go there.
        reserve_bytes: What must stay free on every filesystem.
        what: What is written, for the error.

    Raises:
        AdmissionError: It does not; nothing was written.
    """
    needed: dict[int, tuple[Path, int]] = {}
    for path, size in wanted:
        place = _existing(path)
        device = place.stat().st_dev
        needed[device] = (place, needed.get(device, (place, 0))[1] + size)
    for place, size in needed.values():
        status = os.statvfs(place)
        free = status.f_bavail * status.f_frsize
        if free - size < reserve_bytes:
            raise AdmissionError(
                f"the filesystem of {place} has {free:,} bytes free; {what} needs {size:,} and {reserve_bytes:,} must "
                "stay free; nothing was written: make room there, or name a store and an output on another filesystem"
            )


def _existing(path: Path) -> Path:
    """Return the path, or the first directory above it that is there."""
    return path if path.exists() else _existing(path.parent)
