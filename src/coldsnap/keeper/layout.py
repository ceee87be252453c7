"""Names: what lies in a run directory, and where the tree sees it.

The one rule: every file operation here is relative to a directory descriptor, so that neither a long path nor a private
``/dev/shm`` changes its meaning.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Mapping
from typing import Any

FORMAT = 1

KEEPER_FILE = "keeper.json"
KEEPER_SOCKET = "keeper.sock"
JOURNAL = "journal.jsonl"
OUTCOME = "outcome.json"
RANK = "rank"
WORK = "work"
SLEEP = "sleep"  # what the engine's workers wrote when it fell asleep; it ends with the engine
WARM = "warm.json"  # there while the engine waits for its weights
DIRECTIVE = "directive.json"
ACK = "ack"
CONTROL = "control"
TMP = "tmp"  # of a tree in the host's namespaces
ENGINE_LOG = "engine.log"
KEEPER_LOG = "keeper.log"
ELSEWHERE = "free some there, or choose a run directory on another filesystem (Placement.run_dir)"
KNOWN = frozenset({KEEPER_FILE, KEEPER_SOCKET, JOURNAL, OUTCOME, RANK, WORK, SLEEP, WARM})

# Fixed at launch, and for every restore of that process for ever: the tree remembers them.
SHM = "/dev/shm"  # noqa: S108 - the mount point itself
IN_PROCESS_DIR = "/dev/shm/coldsnap/run"  # noqa: S108 - a bind mount inside a private tmpfs
TMP_DIR = "/dev/shm/coldsnap/tmp"  # noqa: S108 - as above

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_SMALL_BYTES = 1 << 20


def open_directory(path: str, *, dir_fd: int | None = None) -> int:
    """Open a directory, not following a link in the last place."""
    return os.open(path, DIRECTORY | os.O_NOFOLLOW, dir_fd=dir_fd)


def replace(dir_fd: int, name: str, data: bytes) -> None:
    """Replace a small file: a reader sees the old one or the new one.

    Nothing is fsynced: what a run directory tells about does not outlive the boot either.
    """
    temporary = f".{name}.{os.getpid()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    try:
        with open(fd, "wb") as stream:
            stream.write(data)
        os.replace(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=dir_fd)
        raise OSError(error.errno, error.strerror, name) from None  # write(2) knows no names, people do


def write_json(dir_fd: int, name: str, value: Mapping[str, Any]) -> None:
    """Replace a small JSON file."""
    replace(dir_fd, name, json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii"))


def read_json(dir_fd: int, name: str) -> dict[str, Any] | None:
    """Read a small JSON object; None when it is absent, too long or not one."""
    try:
        with open(os.open(name, _READ, dir_fd=dir_fd), "rb") as stream:
            value = json.loads(stream.read(_SMALL_BYTES))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def tail(path: str, lines: int, *, dir_fd: int | None = None) -> str:
    """Return the last lines of a log, the empty string when there is none."""
    try:
        with open(os.open(path, _READ, dir_fd=dir_fd), "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - 400 * lines))
            text = stream.read(400 * lines).decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def remove_tree(dir_fd: int, name: str) -> None:
    """Remove a file or a directory with all that is in it; links are removed, never followed."""
    status = os.lstat(name, dir_fd=dir_fd)
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(name, dir_fd=dir_fd)
        return
    inner = open_directory(name, dir_fd=dir_fd)
    try:
        for entry in os.listdir(inner):
            remove_tree(inner, entry)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=dir_fd)


def empty(dir_fd: int) -> None:
    """Remove every known name from a run directory; what others put there stays."""
    for name in os.listdir(dir_fd):
        if name in KNOWN or any(name.startswith(f".{known}.") for known in KNOWN):
            with contextlib.suppress(FileNotFoundError):
                remove_tree(dir_fd, name)


def foreign(dir_fd: int) -> list[str]:
    """Return the names in a run directory that no keeper puts there."""
    return sorted(name for name in os.listdir(dir_fd) if name not in KNOWN and not name.startswith("."))


def lock(dir_fd: int) -> bool:
    """Try to take the run directory's lock, held by a guard and its keeper for as long as either lives.

    A lock needs no pid, so neither pid reuse nor another pid namespace can make a dead keeper look alive.
    """
    try:
        fcntl.flock(dir_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(dir_fd: int) -> None:
    """Give the lock up, on behalf of guard and keeper both (they share it).

    A process that ends does not drop everything at one moment: whoever sees a pipe closed may still find the lock held.
    """
    fcntl.flock(dir_fd, fcntl.LOCK_UN)
