"""The files of a checkpoint, told apart: by size, and by the digest of the header.

The one rule: a file is compared before anything of it is used. What two files with one header have in their tensors is
not told apart here, but by the checksum of every copy.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

from attrs import frozen

from coldsnap.artifact.cores import in_threads
from coldsnap.artifact.replay import SourceFile
from coldsnap.errors import FormatError, IntegrityError
from coldsnap.transfer.hydrate import opened
from coldsnap.transfer.safetensors import HEADER_LIMIT_BYTES

__all__ = ["Header", "header_of", "require_files"]

_LENGTH_BYTES = 8


@frozen(kw_only=True)
class Header:
    """What a file says of itself.

    Attributes:
        path: As it was asked for, absolute; links are followed.
        bytes: Size of the file.
        sha256: Digest of the header and of its length.
    """

    path: str
    bytes: int
    sha256: str


def header_of(path: str | os.PathLike[str]) -> Header:
    """Read the header of a safetensors file as bytes.

    Raises:
        FormatError: It is longer than the file (safetensors.1).
        NativeError: The file cannot be opened.
    """
    with opened(path) as fd:
        size = os.fstat(fd).st_size
        length = os.pread(fd, _LENGTH_BYTES, 0)
        header_bytes = int.from_bytes(length, "little")
        if len(length) < _LENGTH_BYTES or header_bytes > min(size - _LENGTH_BYTES, HEADER_LIMIT_BYTES):
            raise FormatError(
                f"a header of {header_bytes} bytes in a file of {size}", path=os.fspath(path), rule="safetensors.1"
            )
        found = hashlib.sha256(length + os.pread(fd, header_bytes, _LENGTH_BYTES))
    return Header(path=os.path.abspath(path), bytes=size, sha256=f"sha256:{found.hexdigest()}")


def require_files(files: Iterable[SourceFile]) -> int:
    """Compare files with what a capture recorded of them; return their bytes.

    Raises:
        IntegrityError: One is missing, or is another file (rule manifest.6); it is named.
    """
    return sum(in_threads(_require_file, files))


def _require_file(file: SourceFile) -> int:
    if not os.path.exists(file.path):
        raise IntegrityError(
            "a file of the checkpoint is missing (rule manifest.6)",
            path=file.path,
            expected=f"{file.bytes} bytes, header {file.header_sha256}",
            actual="no file",
        )
    found = header_of(file.path)
    if (found.bytes, found.sha256) != (file.bytes, file.header_sha256):
        raise IntegrityError(
            "this is a file of another model or revision than the captured one (rule manifest.6)",
            path=file.path,
            expected=f"{file.bytes} bytes, header {file.header_sha256}",
            actual=f"{found.bytes} bytes, header {found.sha256}",
        )
    return file.bytes
