"""What is to be done when an operation is not finished: data, so that it can be journaled and run by whoever is left.

The one rule: an entry says everything that is needed to run it, and running it twice does no harm.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TypeAlias

from coldsnap.keeper import layout

Undo: TypeAlias = Mapping[str, str]

CONTINUE: Undo = {"kind": "continue"}
KILL: Undo = {"kind": "kill"}

NOT_DONE = ", not done: "
KEPT = "kept "
STAYS_CLOSED = "asked nobody to resume, since memory is not back"

_FIELDS = {"remove": {"path", "unless", "kept"}, "continue": set[str](), "control": {"op"}, "kill": set[str]()}


def remove(path: str | os.PathLike[str], *, unless: str = "", kept: str = "") -> Undo:
    """Remove a file or directory tree.

    Args:
        path: As the caller sees it; its directory is resolved now, so that no link in it is followed later.
        unless: When a file of this name lies in ``path`` it is complete, and stays.
        kept: When the memory of the engine cannot be brought back, ``path`` stays, since it has what that memory held,
            and a link of this name in it says for whom; empty: it is removed even so.
    """
    directory, name = os.path.split(os.path.abspath(path))
    return {"kind": "remove", "path": os.path.join(os.path.realpath(directory), name), "unless": unless, "kept": kept}


def control(op: str) -> Undo:
    """Ask every rank to do something, for example ``resume``."""
    return {"kind": "control", "op": op}


def parse(value: object) -> Undo:
    """Check one entry.

    Raises:
        ValueError: With the sentence.
    """
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise ValueError(f"an undo entry is an object of strings, found {value!r}")
    fields = _FIELDS.get(value.get("kind", ""))
    if fields is None or set(value) != fields | {"kind"}:
        raise ValueError(f"unknown undo entry {value!r}; known: {', '.join(sorted(_FIELDS))}")
    if value["kind"] == "remove":
        path = value["path"]
        # "/x" would be a directory of the system: nothing of ours lies directly in the root.
        if not path.startswith("/") or os.path.normpath(path) != path or path.count("/") < 2 or path.startswith("//"):
            raise ValueError(
                f"only an absolute path in its shortest form, below some directory, is removed, found {path!r}"
            )
        for name in ("unless", "kept"):
            if "/" in value[name]:
                raise ValueError(f"{name} is a file's name, found {value[name]!r}")
    return value


def remove_path(root_fd: int, entry: Undo) -> str:
    """Run a ``remove`` entry: the name goes at once, and then what had it.

    A caller whose keeper has died may be committing at this very moment; so what it finds is all there or not at all.

    Args:
        root_fd: The root directory of the caller's world; the keeper's own has another ``/dev/shm``.
        entry: What to remove.

    Returns:
        What was done, in words.
    """
    path, unless = entry["path"], entry["unless"]
    directory, name = os.path.split(path[1:])
    aside = os.path.join(directory, f".{name}.partial-{os.urandom(8).hex()}")  # which the next capture takes for stale
    stays = f"{path} is complete and stays"
    try:
        if unless and _exists(root_fd, f"{path[1:]}/{unless}"):
            return stays
        os.rename(path[1:], aside, src_dir_fd=root_fd, dst_dir_fd=root_fd)
        if unless and _exists(root_fd, f"{aside}/{unless}"):  # it became complete between the look and the renaming
            os.rename(aside, path[1:], src_dir_fd=root_fd, dst_dir_fd=root_fd)
            return stays
        layout.remove_tree(root_fd, aside)
    except (FileNotFoundError, NotADirectoryError):
        return f"{path} was not there"
    except OSError as error:
        return f"{path} could not be removed: {error.strerror}"
    return f"removed {path}"


def keep_path(root_fd: int, dir_fd: int, run_dir: str, entry: Undo) -> str:
    """Leave what a ``remove`` entry names to the engine, whose memory is not back, instead of removing it.

    Two links of one name lead from the run directory to what is kept, and back.

    Args:
        root_fd: As for :func:`remove_path`.
        dir_fd: The run directory.
        run_dir: Its path in the caller's world.
        entry: What to keep.

    Returns:
        What was done, in words.
    """
    path, link = entry["path"], f"{layout.SLEEP}/{entry['kept']}"
    if not _exists(root_fd, path[1:]) or (entry["unless"] and _exists(root_fd, f"{path[1:]}/{entry['unless']}")):
        return remove_path(root_fd, entry)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(layout.SLEEP, 0o700, dir_fd=dir_fd)
        os.symlink(path, link, dir_fd=dir_fd)
        os.symlink(os.path.join(run_dir, link), f"{path[1:]}/{entry['kept']}", dir_fd=root_fd)
    except OSError as error:  # it stays, and nobody is told for whom
        return f"{KEPT}{path}, which has what the memory held, without a link to it: {error.strerror}"
    return f"{KEPT}{path}, which has what the memory held"


def let_go(root_fd: int, dir_fd: int, run_dir: str) -> None:
    """Remove what was kept for an engine that has ended; what is not kept any more is another's."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(sleep_fd := os.open(layout.SLEEP, layout.DIRECTORY, dir_fd=dir_fd)):
            with contextlib.suppress(OSError):  # what its workers wrote there is no link
                path = os.readlink(name, dir_fd=sleep_fd)
                if os.readlink(f"{path[1:]}/{name}", dir_fd=root_fd) == os.path.join(run_dir, layout.SLEEP, name):
                    remove_path(root_fd, {"path": path, "unless": ""})
                os.unlink(name, dir_fd=sleep_fd)
        os.close(sleep_fd)


def _exists(root_fd: int, path: str) -> bool:
    try:
        os.lstat(path, dir_fd=root_fd)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
