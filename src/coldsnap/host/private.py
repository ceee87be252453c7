"""Small records that one user keeps between probes: the identity of a CRIU, the qualification of a boot.

The one rule: a record that others could have written is not read, and one that is torn or of another shape is as good
as absent; so the cache can make a probe faster, never wrong.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
from pathlib import Path
from typing import Any

from coldsnap.errors import AdmissionError

DEFAULT_DIRECTORY = Path("~/.cache/coldsnap")
LIMIT_BYTES = 1 << 20
ADVICE = "remove it, or give another directory as cache="


def _open_directory(directory: Path | None) -> int:
    path = (directory or DEFAULT_DIRECTORY).expanduser()
    try:
        descriptor = os.open(path, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in {errno.ENOTDIR, errno.ELOOP} and path.parent.is_dir():
            raise AdmissionError(
                f"the cache directory {path} is no directory but a link or a file; {ADVICE}"
            ) from error
        raise
    try:
        _require_private(os.fstat(descriptor), f"the cache directory {path}")
    except AdmissionError:
        os.close(descriptor)
        raise
    return descriptor


def _require_private(status: os.stat_result, what: str) -> None:
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise AdmissionError(f"{what} is no regular file; {ADVICE}")
    if status.st_uid != os.geteuid():
        raise AdmissionError(f"{what} belongs to uid {status.st_uid}, not to uid {os.geteuid()} who probes; {ADVICE}")
    if status.st_mode & 0o022:
        raise AdmissionError(
            f"{what} may be written by others (mode {stat.S_IMODE(status.st_mode):04o}); chmod go-w it"
        )


def read(name: str, directory: Path | None = None) -> dict[str, Any]:
    """Return a record; empty when it is absent, unreadable or torn.

    Raises:
        AdmissionError: It, or its directory, is not private.
    """
    try:
        descriptor = _open(name, os.O_RDONLY, directory)
    except OSError:
        # Absent, or on a disk that fails: the caller finds out anew what it would have said.
        return {}
    with open(descriptor, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        try:
            record = json.loads(file.read(LIMIT_BYTES))
        except ValueError:
            return {}
    return record if isinstance(record, dict) else {}


def write(name: str, record: dict[str, Any], directory: Path | None = None) -> None:
    """Replace a record, under its lock: readers wait, and a torn one counts as absent.

    Raises:
        AdmissionError: It, or its directory, is not private.
        OSError: It cannot be written.
    """
    path = (directory or DEFAULT_DIRECTORY).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    descriptor = _open(name, os.O_RDWR | os.O_CREAT, directory)
    with open(descriptor, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate()
        file.write(json.dumps(record, sort_keys=True).encode() + b"\n")


def _open(name: str, flags: int, directory: Path | None) -> int:
    folder = _open_directory(directory)
    try:
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise AdmissionError(f"the cached record {name} is a symbolic link; {ADVICE}") from error
        raise
    finally:
        os.close(folder)
    try:
        _require_private(os.fstat(descriptor), f"the cached record {name}")
    except AdmissionError:
        os.close(descriptor)
        raise
    return descriptor
