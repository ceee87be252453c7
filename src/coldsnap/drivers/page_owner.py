"""Whose memory a byte of an image of pages is.

The one rule: an answer for every byte: where the image does not tell a process, it is named by its file.
"""

from __future__ import annotations

import os
from pathlib import Path

from coldsnap.drivers.dump import opened_directory
from coldsnap.drivers.pagemap import PAGE_BYTES, PREFIX, PRESENT, SHARED_PREFIX, Pagemap

__all__ = ["owner_of"]


def owner_of(path: str | os.PathLike[str], offset: int) -> str:
    """Return process and address in words: ``process 640 at 0x7f52a4000040``.

    Args:
        path: A file of a capsule.
        offset: Of the byte in it.

    Raises:
        FormatError: A pagemap beside it breaks a rule.
    """
    file = Path(path)
    with opened_directory(file.parent) as fd:
        for name in sorted(os.listdir(fd)) if file.name.startswith("pages-") else ():
            if name.startswith(PREFIX) and (pagemap := Pagemap.read(fd, name)).pages_name == file.name:
                address = _address(pagemap, offset)
                shared = name.startswith(SHARED_PREFIX)
                number = name.removeprefix(SHARED_PREFIX if shared else PREFIX).removesuffix(".img")
                if address is not None:
                    return f"{'the shared mapping' if shared else 'process'} {number} at {address:#x}"
    return f"{file.name} at {offset:#x}"


def _address(pagemap: Pagemap, offset: int) -> int | None:
    at = 0
    for entry in pagemap.entries:
        size = entry.pages * PAGE_BYTES if entry.flags & PRESENT else 0
        if at <= offset < at + size:
            return entry.address + offset - at
        at += size
    return None
