"""``tree.json`` in a capsule: what a thaw must know of the tree and CRIU's images do not say.

The one rule: strict, like every reader of bytes at rest (rules tree.1 to tree.3 of ``docs/drivers.md``).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from coldsnap.artifact.private import require_private
from coldsnap.errors import FormatError, IntegrityError

__all__ = ["TREE", "HeldDevice", "TreeRecord", "read_tree_record", "write_tree_record"]

TREE = "tree.json"
FORMAT = 1
FIELDS = {"format", "nvidia_pids", "image_bytes"}
OPTIONAL = {"devices"}  # absent in a tree without device state, and in those of earlier releases
MAX_BYTES = 1 << 20
UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@frozen(kw_only=True)
class HeldDevice:
    """A device that the processes of a capture had memory on.

    Attributes:
        uuid: Names it: ``GPU-`` and 36 characters.
        needs_bytes: How much of it must be free for a restore.
    """

    uuid: str
    needs_bytes: int


@frozen(kw_only=True)
class TreeRecord:
    """What is kept beside the images.

    Attributes:
        nvidia_pids: Processes whose device state was checkpointed, children before their parents.
        image_bytes: Size of every image file.
        devices: Where that state was, in the order of the devices.
    """

    nvidia_pids: tuple[int, ...]
    image_bytes: Mapping[str, int]
    devices: tuple[HeldDevice, ...] = ()

    def check_images(self, images_fd: int) -> None:
        """Compare the sizes of the image files with those recorded.

        CRIU itself goes round and round at the end of a page file that is too short, and fills the disk with its log.

        Args:
            images_fd: The directory of images.

        Raises:
            IntegrityError: One is missing, or has another size.
        """
        for name, size in self.image_bytes.items():
            try:
                found = f"{os.stat(name, dir_fd=images_fd, follow_symlinks=False).st_size} bytes"
            except FileNotFoundError:
                found = "no file"
            if found != f"{size} bytes":
                raise IntegrityError("an image file is not whole", path=name, expected=f"{size} bytes", actual=found)


def write_tree_record(capsule_fd: int, record: TreeRecord) -> None:
    """Write ``tree.json``; it must not exist."""
    document: dict[str, Any] = {
        "format": FORMAT,
        "nvidia_pids": record.nvidia_pids,
        "image_bytes": dict(record.image_bytes),
    }
    if record.devices:
        document["devices"] = [{"uuid": each.uuid, "needs_bytes": each.needs_bytes} for each in record.devices]
    text = json.dumps(document, sort_keys=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(TREE, flags, 0o600, dir_fd=capsule_fd), "w") as file:
        file.write(text + "\n")


def read_tree_record(capsule_fd: int) -> TreeRecord:
    """Read ``tree.json``.

    Raises:
        FormatError: Rules tree.1 to tree.3, or evidence.1 to evidence.3: it is not ours alone.
    """
    document: Any = None
    try:
        with os.fdopen(os.open(TREE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=capsule_fd), "rb") as file:
            require_private(os.fstat(file.fileno()), TREE, "file")
            document = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError) as error:
        raise FormatError(f"it cannot be read: {error}", path=TREE, rule="tree.1") from error
    if not isinstance(document, dict) or set(document) - OPTIONAL != FIELDS or document["format"] != FORMAT:
        raise FormatError(f"it is not an object of format {FORMAT} with its fields", path=TREE, rule="tree.1")
    pids, sizes = document["nvidia_pids"], document["image_bytes"]
    if not isinstance(pids, list) or not all(type(pid) is int and pid > 0 for pid in pids):
        raise FormatError("nvidia_pids is not a list of pids", path=TREE, rule="tree.2")
    if not isinstance(sizes, dict) or not all(
        "/" not in name and type(size) is int and size >= 0 for name, size in sizes.items()
    ):
        raise FormatError("image_bytes does not name files and sizes", path=TREE, rule="tree.2")
    return TreeRecord(nvidia_pids=tuple(pids), image_bytes=sizes, devices=_devices(document.get("devices", [])))


def _devices(found: Any) -> tuple[HeldDevice, ...]:
    values: list[Any] = found if isinstance(found, list) else [None]
    for value in values:
        whole = isinstance(value, dict) and set(value) == {"uuid", "needs_bytes"}
        if not whole or not isinstance(value["uuid"], str) or not UUID.fullmatch(value["uuid"]):
            raise FormatError("devices does not name devices by their UUID", path=TREE, rule="tree.3")
        if type(value["needs_bytes"]) is not int or value["needs_bytes"] < 0:
            raise FormatError("needs_bytes is not a size", path=TREE, rule="tree.3")
    if len({value["uuid"] for value in values}) != len(values):
        raise FormatError("a device occurs twice", path=TREE, rule="tree.3")
    return tuple(HeldDevice(**value) for value in values)
