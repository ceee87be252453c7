"""``weights.blob``: all bytes of the preserved allocations that are not the model's.

The one rule: each byte is stored once, in pieces that both manifests refer to, each piece on a page of its own and
padded with zeros (rule manifest.4).
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Sequence

from attrs import frozen

from coldsnap.artifact.durable import StagedFile
from coldsnap.artifact.extents import Extent, ExtentMap, common_pieces, padded
from coldsnap.artifact.manifest import Blob, ResidualExtent
from coldsnap.artifact.pack import Source
from coldsnap.errors import IntegrityError

__all__ = ["Residual", "check_piece", "write_residual"]


@frozen(kw_only=True)
class Residual:
    """What :func:`write_residual` wrote.

    Attributes:
        blob: Size and digest of the file.
        native: The pieces of the native manifest.
        recovery: The pieces of the recovery manifest; they are ranges of the same file.
        stored_bytes: Without padding.
    """

    blob: Blob
    native: tuple[ResidualExtent, ...]
    recovery: tuple[ResidualExtent, ...]
    stored_bytes: int


def write_residual(
    staged: StagedFile, native: ExtentMap, recovery: ExtentMap, source: Callable[[Extent], Source]
) -> Residual:
    """Write the residual of one worker into a staged file.

    Args:
        staged: Empty.
        native: What the native manifest takes from the residual.
        recovery: What the recovery manifest takes from it.
        source: Gives the bytes of an extent.

    Raises:
        CoverageError: The two maps are about different allocations.
        OSError: The medium is full or failed.
    """
    pieces = common_pieces(native, recovery).extents
    state, position, written = hashlib.sha256(), 0, []
    for piece in pieces:
        checksum = 0
        for data in source(piece).pieces():
            checksum = zlib.crc32(data, checksum)
            state.update(data)
            _append(staged, data)
        pad = bytes(padded(piece.size) - piece.size)
        state.update(pad)
        _append(staged, memoryview(pad))
        written.append(_placed(piece, position, checksum))
        position += padded(piece.size)
    blob = Blob(bytes=position, sha256=f"sha256:{state.hexdigest()}")
    return Residual(
        blob=blob,
        native=tuple(_within(written, native)),
        recovery=tuple(_within(written, recovery)),
        stored_bytes=sum(piece.size for piece in pieces),
    )


def _placed(piece: Extent, position: int, checksum: int) -> ResidualExtent:
    return ResidualExtent(
        allocation=piece.allocation, offset=piece.offset, size=piece.size, file_offset=position, crc32=checksum
    )


def _within(pieces: Sequence[ResidualExtent], wanted: ExtentMap) -> Iterable[ResidualExtent]:
    return (piece for piece in pieces if wanted.at(piece.allocation, piece.offset) is not None)


def _append(staged: StagedFile, data: memoryview) -> None:
    while data:
        data = data[staged.stream.write(data) :]


def check_piece(fd: int, piece: ResidualExtent, *, path: str) -> bytes:
    """Read one piece and compare its CRC-32.

    Raises:
        IntegrityError: The file is too short or the bytes are others.
    """
    data = os.pread(fd, piece.size, piece.file_offset)
    actual = f"{zlib.crc32(data):08x}, {len(data)} bytes"
    expected = f"{piece.crc32:08x}, {piece.size} bytes"
    if actual != expected:
        where = f"the piece at {piece.file_offset:#x} has wrong content (rule manifest.4)"
        raise IntegrityError(where, path=path, expected=expected, actual=actual)
    return data
