"""Where each tensor lies in safetensors files, read from their headers alone.

A file is 8 bytes with the header's length (little-endian), that many bytes of JSON, then the tensors. The one rule:
what a header says is checked against the file's size and against itself, so that an offset from here can be read.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from io import FileIO
from typing import Any

from attrs import frozen

from coldsnap.artifact.replay import DTYPE_BYTES
from coldsnap.errors import FormatError

__all__ = ["DTYPE_BYTES", "HEADER_LIMIT_BYTES", "Stored", "index", "read_header"]

HEADER_LIMIT_BYTES = 256 << 20

_LENGTH_BYTES = 8
_ANY_BYTES = 1 << 63
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})


@frozen(kw_only=True)
class Stored:
    """One tensor in a file; it cannot change under its name.

    Attributes:
        name: In the checkpoint.
        path: The file.
        dtype: As the header has it; one that is not in ``DTYPE_BYTES`` has no known size of an element.
        shape: Elements of each dimension.
        file_offset: First byte, from the beginning of the file.
        length: Bytes.
    """

    name: str
    path: str
    dtype: str
    shape: tuple[int, ...]
    file_offset: int
    length: int


def index(paths: Iterable[str | os.PathLike[str]]) -> dict[str, Stored]:
    """Return every tensor of several files by its name.

    Raises:
        FormatError: A header breaks a rule, or two files have a tensor of one name (safetensors.4).
        OSError: A file cannot be read.
    """
    found: dict[str, Stored] = {}
    for path in dict.fromkeys(os.fspath(path) for path in paths):
        for stored in read_header(path):
            if stored.name in found:
                where = f"the tensor {stored.name!r} is in {found[stored.name].path} too"
                raise FormatError(f"{where}; keep one of them", path=path, rule="safetensors.4")
            found[stored.name] = stored
    return found


def read_header(path: str | os.PathLike[str], *, whole: bool = True) -> tuple[Stored, ...]:
    """Read where the tensors of one file lie, in the order of the header.

    Args:
        path: The file.
        whole: Whether the tensors are in it, too, and not the header alone.

    Raises:
        FormatError: The header is too long, is not one, or does not describe this file (safetensors.1 to .3).
        OSError: The file cannot be read.
    """
    path = os.fspath(path)
    # Unbuffered: a buffer takes the first kilobytes of the weights onto the heap, where they stay when it is freed.
    with open(path, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise FormatError("not a regular file", path=path, rule="safetensors.1")
        length = int.from_bytes(_exactly(file, _LENGTH_BYTES), "little")
        data_bytes = status.st_size - _LENGTH_BYTES - length
        if data_bytes < 0 or length > HEADER_LIMIT_BYTES:
            found = f"a header of {length} bytes in a file of {status.st_size}, at most {HEADER_LIMIT_BYTES} are read"
            raise FormatError(found, path=path, rule="safetensors.1")
        entries = _decode(_exactly(file, length), path)
    if not whole:
        data_bytes = _ANY_BYTES
    stored = [
        _stored(name, entry, path, _LENGTH_BYTES + length, data_bytes)
        for name, entry in entries.items()
        if name != "__metadata__"
    ]
    _require_apart(stored, path)
    return tuple(stored)


def _exactly(file: FileIO, size: int) -> bytes:
    """Read so many bytes, fewer at the end of the file alone."""
    parts = []
    while size and (part := file.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _decode(data: bytes, path: str) -> Mapping[str, Any]:
    try:
        value = json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise FormatError(f"the header is not one JSON object: {error}", path=path, rule="safetensors.2") from None
    if not isinstance(value, dict):
        raise FormatError("the header is not one JSON object", path=path, rule="safetensors.2")
    return value


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key appears twice")
    return table


def _stored(name: str, entry: object, path: str, base: int, data_bytes: int) -> Stored:
    if not isinstance(entry, dict) or entry.keys() != _FIELDS or not isinstance(entry["dtype"], str):
        raise FormatError(f"the entry of {name!r} is not dtype, shape, data_offsets", path=path, rule="safetensors.2")
    shape, offsets = _sizes(entry["shape"]), _sizes(entry["data_offsets"])
    if shape is None or offsets is None or len(offsets) != 2:
        raise FormatError(f"the entry of {name!r} has a wrong shape or offset", path=path, rule="safetensors.2")
    begin, end = offsets
    width = DTYPE_BYTES.get(entry["dtype"])
    if not begin <= end <= data_bytes or (width is not None and math.prod(shape) * width != end - begin):
        text = f"{name!r} is {entry['dtype']} {list(shape)} at {begin} to {end} of {data_bytes} bytes"
        raise FormatError(f"{text}: the bytes do not fit", path=path, rule="safetensors.3")
    return Stored(name=name, path=path, dtype=entry["dtype"], shape=shape, file_offset=base + begin, length=end - begin)


def _sizes(value: object) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value):
        return tuple(value)
    return None


def _require_apart(stored: Iterable[Stored], path: str) -> None:
    end = 0
    for one in sorted((one for one in stored if one.length), key=lambda one: one.file_offset):
        if one.file_offset < end:
            raise FormatError(f"the tensor {one.name!r} overlaps another", path=path, rule="safetensors.3")
        end = one.file_offset + one.length
