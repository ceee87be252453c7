"""Where run directories lie, and what a dead one tells.

The one rule: whether an engine lives is decided by the lock on its directory alone; names and pids prove nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from pathlib import Path
from typing import Any

from attrs import frozen

from coldsnap.errors import AdmissionError
from coldsnap.keeper import aftermath, layout

__all__ = ["PostMortem", "discard", "is_full", "new_name", "post_mortem", "require_room", "run_dir_for", "run_root"]

ROOM_BYTES = 4 << 20
"""What a run directory needs at least: the logs of an engine and of CRIU, a few small files."""
ROOM_FILES = 64

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@frozen(kw_only=True)
class PostMortem:
    """What is known of an engine that is no more.

    Attributes:
        alive: It is not dead at all.
        state: ``exited`` (by itself), ``killed`` (with its keeper), or ``gone`` (stopped, or never there).
        exit: Exit code of its root, or minus a signal; None when nobody saw it.
        story: In one sentence.
        log_tail: The last lines of its log.
        operation: What was in flight.
        undone: What was undone after its death.
    """

    alive: bool = False
    state: str = "gone"
    exit: int | None = None
    story: str
    log_tail: str = ""
    operation: str | None = None
    undone: tuple[str, ...] = ()


def run_root() -> Path:
    """Return the directory of all run directories of this user.

    ``/run/coldsnap`` for root, else ``/run/user/<uid>/coldsnap``, where logind gives the user such a directory; where
    it does not, ``/tmp/coldsnap-<uid>``, which must belong to the user.
    """
    uid = os.geteuid()
    if uid == 0:
        return Path("/run/coldsnap")
    user = Path(f"/run/user/{uid}")
    return user / "coldsnap" if os.access(user, os.W_OK) else Path(f"/tmp/coldsnap-{uid}")  # noqa: S108 - checked when used


def new_name(prefix: str = "engine") -> str:
    """Return a name that no engine has."""
    return f"{prefix}-{secrets.token_hex(4)}"


def run_dir_for(name: str) -> Path:
    """Return the run directory of a name.

    Raises:
        AdmissionError: The name is no plain file name.
    """
    if not _NAME.fullmatch(name):
        raise AdmissionError(f"an engine's name has letters, digits, '.', '_' and '-', at most 64, found {name!r}")
    return run_root() / name


def require_room(run_dir: str | os.PathLike[str]) -> None:
    """Refuse a place without room for a run directory, before anything is started there.

    Raises:
        AdmissionError: The filesystem is all but full.
    """
    place = Path(os.path.abspath(run_dir))
    while not place.is_dir() and place != place.parent:
        place = place.parent
    found = os.statvfs(place)
    free_bytes = found.f_bavail * found.f_frsize
    if free_bytes < ROOM_BYTES or (found.f_files and found.f_favail < ROOM_FILES):
        raise AdmissionError(
            f"the filesystem of the run directory {run_dir} has room for {free_bytes >> 10} KiB and {found.f_favail} "
            f"files, expected at least {ROOM_BYTES >> 10} KiB and {ROOM_FILES} files; {layout.ELSEWHERE}"
        )


def is_full(run_dir: str | os.PathLike[str]) -> bool:
    """Tell whether nothing more can be written to a run directory."""
    found = os.statvfs(run_dir)
    return found.f_bavail == 0 or (found.f_files != 0 and found.f_favail == 0)


def post_mortem(run_dir: str | os.PathLike[str], *, lines: int = 20, patience_s: float = 0.0) -> PostMortem:
    """Tell what became of an engine; finish the clean-up if nobody could.

    Args:
        run_dir: Its run directory, which may be gone.
        lines: How much of its log to return.
        patience_s: How long a lock that is held may belong to processes that are just ending.
    """
    try:
        dir_fd = layout.open_directory(os.fspath(run_dir))
    except PermissionError:
        return PostMortem(story=f"{run_dir} belongs to another user")
    except (FileNotFoundError, NotADirectoryError):
        return PostMortem(story=f"there is no engine at {run_dir}: it was stopped, or never started")
    end = time.monotonic() + patience_s
    try:
        while not layout.lock(dir_fd):
            if time.monotonic() < end:
                time.sleep(0.002)
                continue
            return PostMortem(alive=True, story=f"{run_dir} belongs to a living keeper")
        return _examine(run_dir, dir_fd, lines)
    finally:
        os.close(dir_fd)


def discard(run_dir: str | os.PathLike[str]) -> None:
    """Remove what a dead engine left: its log and its story.

    Raises:
        AdmissionError: It lives, or the directory is not a run directory.
    """
    dir_fd = layout.open_directory(os.fspath(run_dir))
    try:
        if not layout.lock(dir_fd):
            raise AdmissionError(f"{run_dir} belongs to an engine that is running; stop it first")
        if others := layout.foreign(dir_fd):
            raise AdmissionError(f"{run_dir} is not a run directory, it holds {', '.join(others[:3])}")
        _examine(run_dir, dir_fd, 0)  # what its operation left half done goes first
        layout.empty(dir_fd)
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(run_dir)
    finally:
        os.close(dir_fd)


def _examine(run_dir: str | os.PathLike[str], dir_fd: int, lines: int) -> PostMortem:
    keeper = layout.read_json(dir_fd, layout.KEEPER_FILE)
    if keeper is None and not os.listdir(dir_fd):
        with contextlib.suppress(OSError):
            os.rmdir(run_dir)
        return PostMortem(story=f"there is no engine at {run_dir}: it never started")
    if layout.foreign(dir_fd):
        return PostMortem(story=f"{run_dir} is not a run directory")
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
        same_boot = keeper is None or keeper.get("boot_id") == stream.read().strip()
    cause = "its guard and its keeper were killed" if same_boot else "the machine was restarted"
    root_fd = os.open("/", layout.DIRECTORY)
    try:
        outcome = aftermath.settle_once(os.path.abspath(run_dir), dir_fd, root_fd, cause=cause)
    finally:
        os.close(root_fd)
    log = layout.tail(f"{layout.RANK}/{layout.ENGINE_LOG}", lines, dir_fd=dir_fd)
    return _read_outcome(run_dir, outcome, log)


def _read_outcome(run_dir: str | os.PathLike[str], outcome: dict[str, Any], log: str) -> PostMortem:
    return PostMortem(
        state=str(outcome.get("state")),
        exit=outcome.get("exit"),
        story=f"the engine at {run_dir} is no more: {aftermath.story(outcome)}",
        log_tail=log,
        operation=outcome.get("operation"),
        undone=tuple(outcome.get("undone") or ()),
    )
