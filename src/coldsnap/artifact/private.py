"""Files and directories that are ours alone.

The one rule: nothing is opened through a link, nothing that belongs to someone else or is open to others is read at
all. The check is made on the open descriptor, so that the file that was checked is the file that is read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coldsnap.errors import FormatError, IntegrityError

__all__ = ["open_directory", "open_private", "read_small", "require_private"]


def require_private(status: os.stat_result, path: str, kind: str) -> None:
    """Demand a regular file or a directory that belongs to this uid and is closed to group and others.

    Args:
        status: Its stat.
        path: What to call it in errors.
        kind: ``file`` or ``directory``.

    Raises:
        FormatError: evidence.1 (kind), evidence.2 (owner) or evidence.3 (mode).
    """
    wanted = stat.S_ISDIR if kind == "directory" else stat.S_ISREG
    problem, rule = "", ""
    if not wanted(status.st_mode):
        problem, rule = f"is not a regular {kind}" if kind == "file" else "is not a directory", "evidence.1"
    elif status.st_uid != os.geteuid():
        problem, rule = f"belongs to uid {status.st_uid}, this process is uid {os.geteuid()}", "evidence.2"
    elif status.st_mode & 0o077:
        problem, rule = (
            f"is open to group or others (mode {stat.S_IMODE(status.st_mode):04o}); chmod go= it",
            "evidence.3",
        )
    if problem:
        raise FormatError(f"the {kind} {problem}", path=path, rule=rule)


@contextmanager
def open_private(
    path: Path | str, *, dir_fd: int | None = None, name: str | None = None
) -> Iterator[tuple[int, os.stat_result]]:
    """Open a file for reading, without following a link, and demand that it is ours alone.

    Args:
        path: The file, relative to ``dir_fd`` if given.
        dir_fd: An open directory.
        name: What to call it in errors.

    Yields:
        The descriptor and its stat.

    Raises:
        FormatError: evidence.1 (not a regular file), evidence.2 (owner) or evidence.3 (mode).
        IntegrityError: It is not there.
    """
    label = name or str(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    except FileNotFoundError as error:
        raise IntegrityError("the file is missing", path=label, expected="a file", actual="nothing") from error
    except OSError as error:
        raise FormatError(f"the file cannot be opened: {error.strerror}", path=label, rule="evidence.1") from error
    try:
        status = os.fstat(fd)
        require_private(status, label, "file")
        yield fd, status
    finally:
        os.close(fd)


def read_small(path: Path, *, max_bytes: int, rule: str = "json.4") -> bytes:
    """Read a private file of bounded size.

    Raises:
        FormatError: It is larger, or not private.
        IntegrityError: It is not there.
    """
    with open_private(path) as (fd, status):
        if status.st_size > max_bytes:
            raise FormatError(
                f"{status.st_size} bytes where at most {max_bytes} are allowed", path=str(path), rule=rule
            )
        with open(fd, "rb", closefd=False) as stream:
            return stream.read(max_bytes + 1)


def open_directory(path: Path | str, dir_fd: int | None = None, label: str | None = None) -> int:
    """Open a directory without following a link, and demand that it is ours alone.

    Args:
        path: Relative to ``dir_fd`` if given.
        dir_fd: An open directory.
        label: What to call it in errors.

    Returns:
        The descriptor; the caller closes it.

    Raises:
        FormatError: evidence.1 (not a directory), evidence.2 (owner) or evidence.3 (mode).
        IntegrityError: It is not there.
    """
    label = label or str(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    except FileNotFoundError as error:
        raise IntegrityError(
            "the directory is missing", path=label, expected="a directory", actual="nothing"
        ) from error
    except OSError as error:
        # With O_DIRECTORY a link fails as what it is: not a directory.
        link = dir_fd is None and os.path.islink(path)
        why = "is a symbolic link; name what it leads to" if link else f"cannot be opened: {error.strerror}"
        raise FormatError(f"the directory {why}", path=label, rule="evidence.1") from error
    try:
        require_private(os.fstat(fd), label, "directory")
    except BaseException:
        os.close(fd)
        raise
    return fd
