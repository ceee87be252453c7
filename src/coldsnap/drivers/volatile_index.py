"""The index of volatile files: ``volatile.json`` beside ``volatile.blob`` in a capsule.

The one rule: an index is believed as a whole or not at all. Every path is absolute and plain, every directory comes
before what is in it, and the extents add up to the blob (rules volatile.1 to volatile.4 of ``docs/drivers.md``).
"""

from __future__ import annotations

import json
import os
import posixpath
from typing import Any, Literal, get_args

from attrs import fields, frozen

from coldsnap.artifact.private import require_private
from coldsnap.errors import FormatError

__all__ = ["BLOB", "INDEX", "VolatileEntry", "VolatileFiles", "encode_index", "read_index"]

INDEX, BLOB = "volatile.json", "volatile.blob"
FORMAT = 1
MAX_INDEX_BYTES = 64 << 20

Kind = Literal["file", "dir", "symlink", "hardlink"]


@frozen(kw_only=True)
class VolatileEntry:
    """One saved file, directory, symbolic link, or further name of a file.

    Attributes:
        path: Absolute, as the tree sees it.
        kind: What it is.
        mode: Permission bits.
        uid: Owner.
        gid: Group.
        size_bytes: Length, holes included; 0 for others than files.
        extents: Ranges with data, as ``(offset, length)`` in bytes, ascending; their bytes lie in the blob one after
            the other, in the order of the entries.
        target: Where a symbolic link points, or the name that a hard link shares its file with; empty for others.
    """

    path: str
    kind: Kind
    mode: int
    uid: int
    gid: int
    size_bytes: int = 0
    extents: tuple[tuple[int, int], ...] = ()
    target: str = ""

    @property
    def data_bytes(self) -> int:
        """Bytes in the blob."""
        return sum(length for _, length in self.extents)


@frozen(kw_only=True)
class VolatileFiles:
    """What was saved, or is to be put back.

    Attributes:
        entries: Directories before what is in them.
    """

    entries: tuple[VolatileEntry, ...]

    @property
    def data_bytes(self) -> int:
        """Size of the blob."""
        return sum(entry.data_bytes for entry in self.entries)


def encode_index(files: VolatileFiles) -> bytes:
    """Return the bytes of ``volatile.json``."""
    entries = [
        {
            "path": entry.path,
            "kind": entry.kind,
            "mode": entry.mode,
            "uid": entry.uid,
            "gid": entry.gid,
            "size_bytes": entry.size_bytes,
            "extents": [list(extent) for extent in entry.extents],
            "target": entry.target,
        }
        for entry in files.entries
    ]
    return json.dumps({"format": FORMAT, "entries": entries}, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _broken(message: str, rule: int, at: str = "") -> FormatError:
    return FormatError(message, path=f"{INDEX}{at}", rule=f"volatile.{rule}")


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _extents(value: Any, size: int, at: str) -> tuple[tuple[int, int], ...]:
    end = 0
    if not isinstance(value, list):
        raise _broken("extents are not a list", 2, at)
    for extent in value:
        if not isinstance(extent, list) or len(extent) != 2 or not all(map(_is_count, extent)):
            raise _broken("an extent is not a pair of counts", 2, at)
        if extent[0] < end or extent[1] == 0 or extent[0] + extent[1] > size:
            raise _broken(f"the extent {extent} overlaps, is empty or leaves the {size} bytes of the file", 4, at)
        end = extent[0] + extent[1]
    return tuple((offset, length) for offset, length in value)


def _entry(value: Any, at: str) -> VolatileEntry:
    if not isinstance(value, dict) or set(value) != {name.name for name in fields(VolatileEntry)}:
        raise _broken("it has not exactly the fields of an entry", 2, at)
    if value["kind"] not in get_args(Kind) or not isinstance(value["target"], str):
        raise _broken("its kind or target is not one", 2, at)
    if not all(_is_count(value[name]) for name in ("mode", "uid", "gid", "size_bytes")) or value["mode"] > 0o7777:
        raise _broken("mode, owner or size is not a count", 2, at)
    path = value["path"]
    if not isinstance(path, str) or not path.startswith("/") or posixpath.normpath(path) != path or "\0" in path:
        raise _broken(f"its path {path!r} is not absolute and plain", 3, at)
    return VolatileEntry(**value | {"extents": _extents(value["extents"], value["size_bytes"], at)})


def read_index(capsule_fd: int) -> VolatileFiles:
    """Read the index of a capsule.

    Args:
        capsule_fd: The capsule's directory.

    Raises:
        FormatError: Rules volatile.1 to volatile.4, or evidence.1 to evidence.3: it is not ours alone.
    """
    try:
        fd = os.open(INDEX, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=capsule_fd)
    except OSError as error:
        raise _broken(f"it cannot be opened: {error.strerror}", 1) from error
    with os.fdopen(fd, "rb") as file:
        require_private(os.fstat(fd), INDEX, "file")
        data = file.read(MAX_INDEX_BYTES + 1)
    try:
        document = json.loads(data.decode("utf-8")) if len(data) <= MAX_INDEX_BYTES else None
    except ValueError as error:
        raise _broken(f"it is not JSON: {error}", 1) from error
    if not isinstance(document, dict) or set(document) != {"format", "entries"} or document["format"] != FORMAT:
        raise _broken(f"it is not an object of format {FORMAT} with entries", 1)
    if not isinstance(document["entries"], list):
        raise _broken("its entries are not a list", 1)
    entries = [_entry(value, f" entry {number}") for number, value in enumerate(document["entries"])]
    paths = [entry.path for entry in entries]
    if len(set(paths)) != len(paths):
        raise _broken("a path occurs twice", 3)
    files: set[str] = set()
    for number, entry in enumerate(entries):
        if entry.kind == "hardlink" and entry.target not in files:
            raise _broken(f"its target {entry.target!r} is no file before it", 3, f" entry {number}")
        if entry.kind == "file":
            files.add(entry.path)
    return VolatileFiles(entries=tuple(entries))
