"""The operation in flight, on disk: what was begun, how to undo it, whether it ended.

The one rule: an entry is in the file before its sender hears that it is. One write(2) for each line survives any
SIGKILL; a machine that crashes takes the tree with it, so nothing is fsynced.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from coldsnap.keeper import layout, undo

_MAX_BYTES = 64 << 20


class Recorded(NamedTuple):
    """An operation as the journal tells it."""

    operation: str
    entries: list[undo.Undo]


class Journal:
    """Appends to ``journal.jsonl`` of a run directory."""

    def __init__(self, dir_fd: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(layout.JOURNAL, flags, 0o600, dir_fd=dir_fd)

    def begin(self, operation: str, entries: Sequence[undo.Undo]) -> None:
        """An operation begins."""
        self._write("begin", operation=operation, undo=list(entries))

    def undo(self, entry: undo.Undo) -> None:
        """It can be undone by one thing more."""
        self._write("undo", entry=dict(entry))

    def end(self) -> None:
        """It is done."""
        self._write("end")

    def undone(self, why: str, did: Sequence[str]) -> None:
        """It was undone."""
        self._write("undone", why=why, did=list(did))

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _write(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, "unix_ns": time.time_ns(), **fields}, separators=(",", ":"))
        data, before = line.encode("ascii") + b"\n", os.fstat(self._fd).st_size
        if os.write(self._fd, data) < len(data):  # a filesystem that is nearly full takes a part, and says nothing
            os.ftruncate(self._fd, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), layout.JOURNAL)


def in_flight(dir_fd: int) -> Recorded | None:
    """Return the operation that was begun and neither ended nor undone."""
    current: Recorded | None = None
    for line in _lines(dir_fd):
        match line.get("event"):
            case "begin":
                current = Recorded(str(line["operation"]), [undo.parse(entry) for entry in line["undo"]])
            case "undo" if current is not None:
                current.entries.append(undo.parse(line["entry"]))
            case "end" | "undone":
                current = None
    return current


def _lines(dir_fd: int) -> Iterable[dict[str, Any]]:
    try:
        fd = os.open(layout.JOURNAL, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    except FileNotFoundError:
        return
    with open(fd, "rb") as stream:
        *lines, _partial = stream.read(_MAX_BYTES).split(b"\n")
    for line in lines:
        yield json.loads(line)
