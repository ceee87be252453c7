"""``tree.json`` in a capsule: what a thaw must know of the tree and CRIU's images do not say.

The one rule: strict, like every reader of bytes at rest (rule tree.1 of ``docs/drivers.md``).
"""

from __future__ import annotations

import json
import os
from typing import Any

from attrs import frozen

from coldsnap.errors import FormatError

__all__ = ["TREE", "TreeRecord", "read_tree_record", "write_tree_record"]

TREE = "tree.json"
FORMAT = 1
MAX_BYTES = 1 << 20


@frozen(kw_only=True)
class TreeRecord:
    """What is kept beside the images.

    Attributes:
        nvidia_pids: Processes whose device state was checkpointed, children before their parents.
    """

    nvidia_pids: tuple[int, ...]


def write_tree_record(capsule_fd: int, record: TreeRecord) -> None:
    """Write ``tree.json``; it must not exist."""
    text = json.dumps({"format": FORMAT, "nvidia_pids": list(record.nvidia_pids)}, sort_keys=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(TREE, flags, 0o600, dir_fd=capsule_fd), "w") as file:
        file.write(text + "\n")


def read_tree_record(capsule_fd: int) -> TreeRecord:
    """Read ``tree.json``.

    Raises:
        FormatError: Rule tree.1.
    """
    document: Any = None
    try:
        with os.fdopen(os.open(TREE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=capsule_fd), "rb") as file:
            document = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError) as error:
        raise FormatError(f"it cannot be read: {error}", path=TREE, rule="tree.1") from error
    if not isinstance(document, dict) or set(document) != {"format", "nvidia_pids"} or document["format"] != FORMAT:
        raise FormatError(f"it is not an object of format {FORMAT} with nvidia_pids", path=TREE, rule="tree.1")
    pids = document["nvidia_pids"]
    if not isinstance(pids, list) or not all(type(pid) is int and pid > 0 for pid in pids):
        raise FormatError("nvidia_pids is not a list of pids", path=TREE, rule="tree.1")
    return TreeRecord(nvidia_pids=tuple(pids))
