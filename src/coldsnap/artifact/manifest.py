"""Native and recovery manifest, and hibernate state: which byte of which file belongs at which address.

The one rule: a manifest that can be read is complete. Its extents are checked for coverage when it is built, so that
no one holds one with a gap (rules extent.1 and manifest.1 to manifest.8, ``docs/format/manifest.md``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from attrs import field, frozen

from coldsnap.artifact import canonical, record
from coldsnap.artifact.capsule import WORKER
from coldsnap.artifact.extents import PAGE_BYTES, Allocation, Coverage, Extent, padded, prove
from coldsnap.artifact.pack import PackEntry, layout
from coldsnap.artifact.payloads import REVISION
from coldsnap.artifact.private import read_small
from coldsnap.artifact.replay import ReplayCopy, SourceFile, require_covering
from coldsnap.errors import FormatError, IntegrityError

__all__ = [
    "Blob",
    "HibernateState",
    "ModelExtent",
    "ModelSource",
    "NativeManifest",
    "RecoveryManifest",
    "ReloadExtent",
    "ResidualExtent",
    "read_document",
]

_SEMANTIC = record.matching(r"[0-9a-f]{64}", "64 hex digits")
_CRC32 = record.at_least(0, below=1 << 32)


@frozen(kw_only=True)
class Blob:
    """A file of bytes, named by its content.

    Attributes:
        bytes: Size.
        sha256: Digest.
    """

    bytes: int = field(validator=record.at_least(0))
    sha256: str = field(validator=record.sha256)


@frozen(kw_only=True)
class ModelSource:
    """The checkpoint that recovery reads.

    Attributes:
        source: Kind of checkpoint.
        model_id: Hub id, or name of a local model.
        revision: 40-hex commit, or digest of a local model.
        metadata_sha256: Digest over config and tokenizer, when known.
    """

    source: Literal["huggingface-safetensors"] = "huggingface-safetensors"
    model_id: str
    revision: str = field(validator=REVISION)
    metadata_sha256: str | None = field(default=None, validator=record.optional(record.sha256))


@frozen(kw_only=True)
class ModelExtent:
    """Model bytes of one allocation that are in the pack.

    Attributes:
        allocation: Index into ``allocations``.
        offset: From the allocation's base.
        size: Bytes.
        semantic_id: Name without an address, 64 hex digits; the same range has the same one in another process.
        pack_offset: In the pack.
        sha256: Digest of the bytes.
        crc32: CRC-32 of the bytes.
    """

    allocation: int = field(validator=record.at_least(0))
    offset: int = field(validator=record.at_least(0))
    size: int = field(validator=record.at_least(1))
    semantic_id: str = field(validator=_SEMANTIC)
    pack_offset: int = field(validator=record.at_least(0))
    sha256: str = field(validator=record.sha256)
    crc32: int = field(validator=_CRC32)

    @property
    def extent(self) -> Extent:
        """Where the bytes belong."""
        return Extent(allocation=self.allocation, offset=self.offset, size=self.size)

    @property
    def entry(self) -> PackEntry:
        """Where the bytes are."""
        return PackEntry(offset=self.pack_offset, size=self.size, sha256=self.sha256, crc32=self.crc32)


@frozen(kw_only=True)
class ReloadExtent:
    """Model bytes of one allocation that a recovery writes.

    Attributes:
        allocation: Index into ``allocations``.
        offset: From the allocation's base.
        size: Bytes.
        semantic_id: Name without an address.
        crc32: CRC-32 of the bytes; known wherever the copies are.
    """

    allocation: int = field(validator=record.at_least(0))
    offset: int = field(validator=record.at_least(0))
    size: int = field(validator=record.at_least(1))
    semantic_id: str = field(validator=_SEMANTIC)
    crc32: int | None = field(default=None, validator=record.optional(_CRC32))

    @property
    def extent(self) -> Extent:
        """Where the bytes belong."""
        return Extent(allocation=self.allocation, offset=self.offset, size=self.size)


@frozen(kw_only=True)
class ResidualExtent:
    """One piece of the residual.

    Attributes:
        allocation: Index into ``allocations``.
        offset: From the allocation's base.
        size: Bytes.
        file_offset: In ``weights.blob``, a multiple of 4096.
        crc32: CRC-32 of the bytes.
    """

    allocation: int = field(validator=record.at_least(0))
    offset: int = field(validator=record.at_least(0))
    size: int = field(validator=record.at_least(1))
    file_offset: int = field(validator=record.at_least(0))
    crc32: int = field(validator=_CRC32)

    @property
    def extent(self) -> Extent:
        """Where the bytes belong."""
        return Extent(allocation=self.allocation, offset=self.offset, size=self.size)


def _require_pieces(pieces: Sequence[ResidualExtent], blob: Blob) -> None:
    """Check manifest.4: pieces start at pages, do not share a byte of the file, and end inside it."""
    end = 0
    for piece in sorted(pieces, key=lambda piece: piece.file_offset):
        if piece.file_offset % PAGE_BYTES or piece.file_offset < end:
            raise record.Broken("manifest.4", f"the piece at file offset {piece.file_offset:#x} is misplaced")
        end = padded(piece.file_offset + piece.size)
    if end > blob.bytes or blob.bytes % PAGE_BYTES:
        raise record.Broken("manifest.4", f"the pieces end at {end}, the residual has {blob.bytes} bytes")


@frozen(kw_only=True)
class NativeManifest:
    """Where each byte of the pack and of the residual belongs.

    Attributes:
        capture_id: Of the artifact.
        worker: Whose memory.
        model: Provenance of the model bytes, when known.
        page_bytes: Alignment of extents in both files.
        allocations: What is preserved, ascending by device and address.
        pack: The pack; of 0 bytes when there is none and the residual holds everything.
        residual: ``weights.blob``.
        model_extents: What comes from the pack.
        residual_extents: What comes from the residual.
        vacant_extents: What nothing lived in: zero after a restore, and in no file; absent when there is none.
    """

    MAX_BYTES: ClassVar[int] = 256 << 20

    format: Literal[1] = 1
    kind: Literal["coldsnap-native-manifest"] = "coldsnap-native-manifest"
    capture_id: str
    worker: str = field(validator=WORKER)
    model: ModelSource | None = None
    page_bytes: Literal[4096] = 4096
    allocations: tuple[Allocation, ...]
    pack: Blob
    residual: Blob
    model_extents: tuple[ModelExtent, ...]
    residual_extents: tuple[ResidualExtent, ...]
    vacant_extents: tuple[Extent, ...] | None = None

    def __attrs_post_init__(self) -> None:
        """Check manifest.3 (the pack's layout), manifest.4 (the residual's), and extent.1 (coverage)."""
        _, offsets, size = layout([(extent.sha256, extent.size) for extent in self.model_extents])
        # Equal extents may take each other's place, so that places are compared as a set.
        placed = {(one.pack_offset, one.sha256, one.size) for one in self.model_extents}
        wanted = {(at, one.sha256, one.size) for at, one in zip(offsets, self.model_extents, strict=True)}
        if placed != wanted or size != self.pack.bytes:
            raise record.Broken("manifest.3", "the model extents do not have the offsets of their pack")
        _require_pieces(self.residual_extents, self.residual)
        self.prove()

    def prove(self) -> Coverage:
        """Prove coverage again, and return the receipt."""
        return _prove(self)

    @property
    def index(self) -> tuple[PackEntry, ...]:
        """The index of the pack."""
        return tuple(extent.entry for extent in self.model_extents)


@frozen(kw_only=True)
class RecoveryManifest:
    """The same memory, its model bytes coming from the checkpoint.

    Attributes:
        capture_id: Of the artifact.
        worker: Whose memory.
        model_source: The only checkpoint that may be used.
        page_bytes: Alignment of pieces in the residual.
        allocations: What is preserved.
        residual: ``weights.blob``; pieces that the native manifest has too are the same ones.
        model_extents: What the copies write.
        residual_extents: What comes from the residual.
        vacant_extents: As in the native manifest.
        files: The safetensors files that were read; empty in an artifact of a time that did not record copies.
        copies: What was copied from them, in order.
    """

    MAX_BYTES: ClassVar[int] = 256 << 20

    format: Literal[1] = 1
    kind: Literal["coldsnap-recovery-manifest"] = "coldsnap-recovery-manifest"
    capture_id: str
    worker: str = field(validator=WORKER)
    model_source: ModelSource
    page_bytes: Literal[4096] = 4096
    allocations: tuple[Allocation, ...]
    residual: Blob
    model_extents: tuple[ReloadExtent, ...]
    residual_extents: tuple[ResidualExtent, ...]
    vacant_extents: tuple[Extent, ...] | None = None
    files: tuple[SourceFile, ...] = ()
    copies: tuple[ReplayCopy, ...] = ()

    def __attrs_post_init__(self) -> None:
        """Check manifest.4, extent.1 and manifest.10."""
        _require_pieces(self.residual_extents, self.residual)
        self.prove()
        if self.copies or self.files:
            require_covering(self.copies, [one.extent for one in self.model_extents], self.files)
            if any(one.crc32 is None for one in self.model_extents):
                raise record.Broken("manifest.10", "a model extent has no checksum, so that no copy could be verified")

    def prove(self) -> Coverage:
        """Prove coverage again, and return the receipt."""
        return _prove(self)

    def require_same_memory(self, native: NativeManifest) -> None:
        """Check manifest.5: both manifests are about the same memory, residual and capture, and share their pieces.

        Raises:
            FormatError: They are not.
        """
        same = (self.capture_id, self.worker, self.allocations, self.residual, self.vacant_extents)
        other = (native.capture_id, native.worker, native.allocations, native.residual, native.vacant_extents)
        if same != other:
            raise FormatError("not of the same capture as the native manifest", path="recovery", rule="manifest.5")
        pieces = {piece.file_offset: piece for piece in native.residual_extents}
        for piece in self.residual_extents:
            if pieces.get(piece.file_offset, piece) != piece:
                at = f"the piece at file offset {piece.file_offset:#x} is not the native manifest's"
                raise FormatError(at, path="recovery", rule="manifest.5")


def _prove(manifest: NativeManifest | RecoveryManifest) -> Coverage:
    maps: list[list[Extent]] = [[one.extent for one in manifest.model_extents]]
    maps.append([one.extent for one in manifest.residual_extents])
    if manifest.vacant_extents is not None:
        maps.append(list(manifest.vacant_extents))
    return prove(manifest.allocations, *maps)


@frozen(kw_only=True)
class HibernateState:
    """How one worker went to sleep.

    Attributes:
        worker: Who.
        state: ``sleeping``: everything preserved is written; nothing else is accepted by a restore.
        capture_id: Of the artifact.
        pid: In its namespace.
        generation: Of the residual and pack, unique in the life of the process.
        discarded: Region → bytes whose content was thrown away; they are zero after a restore.
        phases_ns: Phase → duration, ns.
        backend: Which I/O backend wrote.
    """

    MAX_BYTES: ClassVar[int] = 1 << 20

    format: Literal[1] = 1
    kind: Literal["coldsnap-hibernate-state"] = "coldsnap-hibernate-state"
    worker: str = field(validator=WORKER)
    state: Literal["sleeping"] = "sleeping"
    capture_id: str
    pid: int = field(validator=record.at_least(1))
    generation: str = field(validator=record.matching(r"[0-9A-Za-z-]{1,64}", "1 to 64 of 0-9 A-Z a-z -"))
    discarded: Mapping[str, int] = field(factory=dict)
    phases_ns: Mapping[str, int] = field(factory=dict)
    backend: str = "python"


_Document = TypeVar("_Document", NativeManifest, RecoveryManifest, HibernateState)


def encode(document: NativeManifest | RecoveryManifest | HibernateState) -> bytes:
    """Return the bytes of a document's file."""
    return canonical.encode(record.write_object(document))


def decode(cls: type[_Document], data: bytes, *, path: str) -> _Document:
    """Read the bytes of a document's file.

    Raises:
        FormatError: A rule is broken.
        CoverageError: The extents do not cover the allocations exactly once.
    """
    value = canonical.decode(data, path=path, max_bytes=cls.MAX_BYTES)
    return record.read(cls, value, path=path)


def read_document(cls: type[_Document], path: Path, *, sha256: str) -> _Document:
    """Read a document whose digest is known from the descriptor.

    Args:
        cls: NativeManifest, RecoveryManifest or HibernateState.
        path: Its file, private.
        sha256: The listed digest; the bytes are compared with it before they are looked at.

    Raises:
        IntegrityError: They are other bytes.
        FormatError: A rule is broken.
        CoverageError: The extents do not cover the allocations exactly once.
    """
    data = read_small(path, max_bytes=cls.MAX_BYTES)
    actual = canonical.sha256_of(data)
    if actual != sha256:
        raise IntegrityError("wrong content (rule evidence.5)", path=str(path), expected=sha256, actual=actual)
    return decode(cls, data, path=str(path))
