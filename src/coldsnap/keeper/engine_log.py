"""The engine's log, kept from filling its filesystem.

The one rule: what is given back is the beginning of the file, by a hole: no line that stays is moved or missed, and
the engine, which appends, notices nothing. The file keeps its length; ``ls -s`` shows what it takes.
"""

from __future__ import annotations

import os

from coldsnap.keeper import kernel, layout

LIMIT_BYTES = 64 << 20
KEPT_BYTES = 32 << 20
LOOK_S = 10.0
"""How often the log is looked at, s: a run root is memory, and no engine writes gigabytes of text in this time."""

_BLOCK_BYTES = 512  # of st_blocks, stat(2)
_LINE_BYTES = 64 << 10
# Truncating instead would lose the lines written between a copy and the cut, and rotating by a rename is in vain: the
# tree holds the file open.


def shorten(tree_fd: int, *, limit_bytes: int = LIMIT_BYTES, kept_bytes: int = KEPT_BYTES) -> int:
    """Give back the space of the log's beginning once it takes too much.

    Args:
        tree_fd: The directory that holds the log.
        limit_bytes: How much it may take.
        kept_bytes: How much of its end stays then.

    Returns:
        Where the log begins now, at the start of a line; 0 when nothing was done.

    Raises:
        OSError: Its filesystem has no holes.
    """
    try:
        fd = os.open(layout.ENGINE_LOG, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=tree_fd)
    except FileNotFoundError:
        return 0
    try:
        found = os.fstat(fd)
        if found.st_blocks * _BLOCK_BYTES <= limit_bytes:
            return 0
        cut = found.st_size - kept_bytes
        cut += os.pread(fd, _LINE_BYTES, cut).find(b"\n") + 1
        kernel.punch_hole(fd, 0, cut)
    finally:
        os.close(fd)
    return cut
