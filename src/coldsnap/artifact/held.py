"""Whether a living process works on a directory, and the lock of one that reads it.

The one rule: a lock says so, never a name or an age: a killed process lets go of its locks. Whoever writes holds it
alone, whoever reads shares it, and whoever deletes must have it alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from coldsnap.errors import ArtifactError

__all__ = ["is_held", "reading", "user_of"]

CAPTURE, RESTORE = "the capture that wrote it", "a restore that reads it"
PATIENCE_S = 10.0
"""How long a reader waits for a capture that has committed and is settling its workload, s."""
_POLL_S = 0.01
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})


def is_held(path: Path) -> bool:
    """Tell whether a capture holds a directory: from birth until its workload is settled, which is after the commit."""
    return user_of(path) == CAPTURE


def user_of(path: Path) -> str:
    """Return who uses a directory, in words; nothing when nobody does."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""  # its capture ended, and removed it
    try:
        for how, user in ((fcntl.LOCK_SH, CAPTURE), (fcntl.LOCK_EX, RESTORE)):
            if not _take(fd, how):
                return user
    finally:
        os.close(fd)
    return ""


@contextlib.contextmanager
def reading(path: Path, *, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Keep a directory from being deleted; many may do so at once.

    Args:
        path: The directory; when there is none, there is nothing to keep.
        patience_s: How long to wait for the capture that wrote it.

    Raises:
        ArtifactError: It is being written or deleted.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        yield  # whoever opens the artifact says what is wrong
        return
    try:
        deadline = time.monotonic() + patience_s
        while not _take(fd, fcntl.LOCK_SH):
            if time.monotonic() > deadline:
                raise ArtifactError(f"{path} is in use by {CAPTURE}, or is being deleted; wait for its end")
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(fd)


def _take(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:  # such a filesystem cannot tell who uses it: docs/artifacts.md
            raise
    return True
