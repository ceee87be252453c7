"""Whether a living process works on a directory.

The one rule: a lock says so, never a name or an age: a killed process lets go of its locks.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

__all__ = ["is_held"]


def is_held(path: Path) -> bool:
    """Tell whether a capture holds a directory: from birth until its workload is settled, which is after the commit."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False  # its capture ended, and removed it
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
