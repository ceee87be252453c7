"""The manifests of one worker's generation, made of its split and of what was written.

The one rule: both manifests are about the same pieces of the same residual (rule manifest.5). This is arithmetic; no
file, no memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import field, frozen

from coldsnap.artifact.extents import Extent, ExtentMap, padded
from coldsnap.artifact.manifest import (
    Blob,
    ModelExtent,
    ModelSource,
    NativeManifest,
    RecoveryManifest,
    ReloadExtent,
    ResidualExtent,
)
from coldsnap.artifact.pack import PackEntry
from coldsnap.engines.weights.replay import Replay
from coldsnap.engines.weights.split import Split

__all__ = ["Documents", "Identity", "placed_pieces"]


@frozen(kw_only=True)
class Identity:
    """Whose memory it is, and of which capture.

    Attributes:
        worker: Worker.
        capture_id: Of the artifact.
        model: The checkpoint, when known; recovery is possible only then.
    """

    worker: str
    capture_id: str
    model: ModelSource | None = None


@frozen(kw_only=True)
class Documents:
    """What the manifests are made of.

    Attributes:
        split: What is the model's and what is not.
        model: What is in the pack: the split's model, or nothing.
        identity: Whose memory.
        pack: The pack.
        entries: Its index, in the order of ``model``.
        residual: The residual.
        pieces: What is in it.
        replay: The copies of the load; without any there is no recovery.
        checksums: CRC-32 of each extent of the split's model, when there are copies.
    """

    split: Split
    model: ExtentMap
    identity: Identity
    pack: Blob
    entries: Sequence[PackEntry]
    residual: Blob
    pieces: Sequence[ResidualExtent]
    replay: Replay = field(factory=Replay)
    checksums: Sequence[int] = ()

    def native(self) -> NativeManifest:
        """Make the native manifest, and prove its coverage.

        Raises:
            CoverageError: A byte is left out, or there twice.
        """
        return NativeManifest(
            capture_id=self.identity.capture_id,
            worker=self.identity.worker,
            model=self.identity.model,
            allocations=self.split.allocations,
            pack=self.pack,
            residual=self.residual,
            model_extents=tuple(
                ModelExtent(
                    allocation=extent.allocation,
                    offset=extent.offset,
                    size=extent.size,
                    semantic_id=self.split.semantic_ids[extent],
                    pack_offset=entry.offset,
                    sha256=entry.sha256,
                    crc32=entry.crc32,
                )
                for extent, entry in zip(self.model.extents, self.entries, strict=True)
            ),
            residual_extents=self._within(self.split.beside(self.model)),
            vacant_extents=self.split.vacant.extents or None,
        )

    def recovery(self) -> RecoveryManifest | None:
        """Make the recovery manifest; None when no checkpoint is known, or its copies were not recorded.

        Raises:
            FormatError: The copies do not write exactly the model's bytes (manifest.10).
        """
        if self.identity.model is None or not self.replay.copies:
            return None
        return RecoveryManifest(
            capture_id=self.identity.capture_id,
            worker=self.identity.worker,
            model_source=self.identity.model,
            allocations=self.split.allocations,
            residual=self.residual,
            model_extents=tuple(
                ReloadExtent(
                    allocation=extent.allocation,
                    offset=extent.offset,
                    size=extent.size,
                    semantic_id=self.split.semantic_ids[extent],
                    crc32=crc32,
                )
                for extent, crc32 in zip(self.split.model.extents, self.checksums, strict=True)
            ),
            residual_extents=self._within(self.split.residual),
            vacant_extents=self.split.vacant.extents or None,
            files=self.replay.files,
            copies=self.replay.copies,
        )

    def _within(self, wanted: ExtentMap) -> tuple[ResidualExtent, ...]:
        return tuple(piece for piece in self.pieces if wanted.at(piece.allocation, piece.offset) is not None)


def placed_pieces(pieces: Sequence[Extent], checksums: Sequence[int]) -> tuple[ResidualExtent, ...]:
    """Lay pieces out as the residual has them: each from the next page on."""
    offset, placed = 0, []
    for piece, crc32 in zip(pieces, checksums, strict=True):
        placed.append(
            ResidualExtent(
                allocation=piece.allocation, offset=piece.offset, size=piece.size, file_offset=offset, crc32=crc32
            )
        )
        offset += padded(piece.size)
    return tuple(placed)
