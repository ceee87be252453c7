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

__all__ = ["KEPT_FOR", "is_held", "is_kept", "kept_for", "reading", "user_of"]

KEPT_FOR = "kept-for"
"""A link in the output of a failed capture, while it has what the memory of a living engine held."""

CAPTURE, RESTORE = "the capture that wrote it", "a restore that reads it"
PATIENCE_S = 10.0
"""How long a reader waits for a capture that has committed and is settling its workload, s."""
_POLL_S = 0.01
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})


def is_held(path: Path) -> bool:
    """Tell whether a capture holds a directory: from birth until its workload is settled, which is after the commit."""
    return user_of(path) == CAPTURE


def is_kept(path: Path) -> bool:
    """Tell whether an engine, whose memory is not back, needs what a failed capture left in a directory.

    Its link leads to one in the engine's run directory, which leads back; when the engine has ended, it leads nowhere.
    """
    try:
        return os.path.samefile(path / KEPT_FOR, path)
    except OSError:
        return False


def kept_for(path: Path) -> Path:
    """Return the run directory of the engine for which a directory is kept."""
    return Path(os.readlink(path / KEPT_FOR)).parents[1]


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
