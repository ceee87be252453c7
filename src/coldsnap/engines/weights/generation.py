"""One worker's generation: residual, pack, manifests and hibernate state, written out of its memory.

The one rule: it is there as a whole or not at all. The room is measured before a byte is written, whatever fails takes
away what was written (a pack that others may have found already stays, it has no name but its content's), and the
native manifest, which is what makes the files a generation, comes after everything that it names.

::

    written = write_generation(split, memory=memory, store=store, directory=path, identity=identity, writing=Writing(…))
    written.manifest_sha256, written.pack, written.residual     # what a hydration needs
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from attrs import field, frozen

from coldsnap.artifact.bootstrap import BOOTSTRAP_INDEX
from coldsnap.artifact.canonical import sha256_of
from coldsnap.artifact.cores import available_cores
from coldsnap.artifact.durable import FaultPoint, unharmed, write_file_durably
from coldsnap.artifact.extents import Coverage, Extent, ExtentMap, common_pieces, padded
from coldsnap.artifact.manifest import Blob, HibernateState, encode
from coldsnap.artifact.pack import PackEntry, layout
from coldsnap.artifact.store import Store, StoredPack
from coldsnap.engines.weights.documents import Documents, Identity, placed_pieces
from coldsnap.engines.weights.replay import Recording, Replay, record_replay
from coldsnap.engines.weights.room import require_room
from coldsnap.engines.weights.source import Checksums, MemorySource, Staging, digests_of
from coldsnap.engines.weights.split import Split
from coldsnap.engines.weights.zeros import without_zeros
from coldsnap.errors import ColdSnapError
from coldsnap.transfer.backend import CaptureReceipt, Source, Tuning
from coldsnap.transfer.capture import CaptureBackendName, capture
from coldsnap.transfer.memory import PreservedMemory
from coldsnap.transfer.native import NativeLibrary

__all__ = [
    "HIBERNATE_STATE",
    "NATIVE_MANIFEST",
    "RECOVERY_MANIFEST",
    "RESIDUAL",
    "Generation",
    "Identity",
    "Writing",
    "write_generation",
]

RESIDUAL = "weights.blob"
NATIVE_MANIFEST = "native-manifest.json"
RECOVERY_MANIFEST = "recovery-manifest.json"
HIBERNATE_STATE = "hibernate-state.json"
# The manifest that names the others goes first and comes last.
_NAMES = (NATIVE_MANIFEST, RECOVERY_MANIFEST, HIBERNATE_STATE, BOOTSTRAP_INDEX, RESIDUAL)

_NO_PACK = Blob(bytes=0, sha256=sha256_of(b""))


@frozen(kw_only=True)
class Writing:
    """How a generation is written.

    Attributes:
        library: The native library; needed for every backend but python.
        backend: Of the residual: ``io.capture_backend``, with ``io.hibernate_write_mode`` in it.
        tuning: Of the residual.
        export_model_payload: Put the model's bytes into a pack; else the residual holds everything.
        reuse: Look for the pack before it is written (``io.reuse_blob``).
        reserve_bytes: Leave at least so many bytes free on every filesystem that is written to.
        threads: Threads that hash; None: all cores.
        recording: Whether a recovery from the checkpoint is to be possible.
    """

    library: NativeLibrary | None = None
    backend: CaptureBackendName = "auto"
    tuning: Tuning = field(factory=Tuning)
    export_model_payload: bool = True
    reuse: bool = True
    reserve_bytes: int = 1 << 30
    threads: int | None = None
    recording: Recording = field(factory=Recording)


@frozen(kw_only=True)
class Generation:
    """What was written.

    Attributes:
        directory: Where residual and manifests are.
        name: Unique in the life of the process.
        worker: Whose memory.
        manifest_sha256: Digest of the native manifest.
        recovery_sha256: Digest of the recovery manifest, None when there is none.
        replay: What it lists, or why there is none.
        pack: The pack, None when the residual holds everything.
        pack_path: Where it is.
        new_pack_bytes: Bytes of the pack that were not in the store before.
        residual: The residual.
        coverage: The receipt of the native manifest.
        receipt: How the residual was written.
        seconds: Phase → duration, s.
    """

    directory: Path
    name: str
    worker: str
    manifest_sha256: str
    recovery_sha256: str | None
    replay: Replay
    pack: Blob | None
    pack_path: Path | None
    new_pack_bytes: int
    residual: Blob
    coverage: Coverage
    receipt: CaptureReceipt
    seconds: Mapping[str, float]

    def recorded(self) -> Mapping[str, str | int | None]:
        """Return what a recovery could use, as a reply has it."""
        return {
            "manifest_sha256": self.recovery_sha256,
            "reason": self.replay.reason,
            "files": len(self.replay.files),
            "copies": len(self.replay.copies),
            "plain": sum(copy.crc32 is not None for copy in self.replay.copies),
            "derived_bytes": self.replay.derived_bytes,
        }


@frozen(kw_only=True)
class _Packed:
    blob: Blob
    entries: tuple[PackEntry, ...] = ()
    path: Path | None = None
    new_bytes: int = 0


def write_generation(
    split: Split,
    *,
    memory: PreservedMemory,
    store: Store,
    directory: Path,
    identity: Identity,
    discarded: Mapping[str, int],
    writing: Writing,
    index: bytes | None = None,
    at: FaultPoint = unharmed,
) -> Generation:
    """Write one worker's memory, durably.

    Args:
        split: What is the model's and what is not.
        memory: Who holds the bytes; they must not change meanwhile.
        store: Where packs are.
        directory: Where everything else goes; made when it is not there. What it holds of another generation is
            replaced.
        identity: Whose memory.
        discarded: Region → bytes that are not written.
        writing: How.
        index: The bootstrap index, when an engine is to be started anew from this generation.
        at: Fault point.

    Raises:
        AdmissionError: There is not enough room; nothing was written.
        NativeError: The residual could not be written.
        OSError: Another file could not be written.
        CoverageError: The split leaves a byte out, or has one twice.
    """
    began = time.monotonic()
    memory.synchronize()
    with Staging(memory) as staging:
        emptied = without_zeros(split, staging, threads=writing.threads or available_cores())
    writer = _Writer(emptied, memory, store, directory, identity, discarded, writing, index, at)
    writer.seconds["zeros"] = time.monotonic() - began
    return writer.write()


@frozen
class _Writer:
    split: Split
    memory: PreservedMemory
    store: Store
    directory: Path
    identity: Identity
    discarded: Mapping[str, int]
    how: Writing
    index: bytes | None
    at: FaultPoint
    seconds: dict[str, float] = field(factory=dict, init=False)

    def write(self) -> Generation:
        self.memory.synchronize()
        with Staging(self.memory) as staging:
            sources = [staging.source(self._address(extent), extent.size) for extent in self.model.extents]
            began = time.monotonic()
            entries = digests_of(sources, threads=self.how.threads or available_cores(), lanes=self.how.library)
            found = self.store.find(entries) if entries and self.how.reuse else None
            self.seconds["hash"] = time.monotonic() - began
            sums = Checksums(self.split, staging, entries, lanes=self.how.library, threads=self.how.threads)
            replay = self._record(sums)
            pieces = self._pieces()
            self._require_room(pieces, 0 if found else layout([(e.sha256, e.size) for e in entries])[2])
            with self._all_or_nothing():
                residual = self._write_residual(pieces)
                packed = self._write_pack(sources, entries) if found is None else _found(found, entries)
                return self._write_documents(residual, pieces, packed, replay, sums)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        made = not self.directory.exists()
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            _remove(self.directory)
            yield
        except BaseException:
            _remove(self.directory)
            if made:
                self.directory.rmdir()
            raise

    @property
    def model(self) -> ExtentMap:
        """What goes into the pack."""
        return self.split.model if self.how.export_model_payload else ExtentMap(self.split.allocations, ())

    def _address(self, extent: Extent) -> int:
        return self.split.allocations[extent.allocation].address + extent.offset

    def _pieces(self) -> tuple[Extent, ...]:
        # Recovery needs what the loader does not write; native, what is not in the pack.
        return common_pieces(self.split.beside(self.model), self.split.residual).extents

    def _require_room(self, pieces: Iterable[Extent], pack_bytes: int) -> None:
        residual_bytes = sum(padded(piece.size) for piece in pieces)
        require_room(
            ((self.directory, residual_bytes), (self.store.root, pack_bytes)),
            reserve_bytes=self.how.reserve_bytes,
            what=f"the generation of worker {self.identity.worker}",
        )

    def _record(self, sums: Checksums) -> Replay:
        began = time.monotonic()
        replay = record_replay(self.split, self.how.recording, sums.of, known=self.identity.model is not None)
        self.seconds["record"] = time.monotonic() - began
        return replay

    def _write_residual(self, pieces: Sequence[Extent]) -> CaptureReceipt:
        began = time.monotonic()
        offset, sources = 0, []
        for piece in pieces:
            sources.append(
                Source(address=self._address(piece), file_offset=offset, length=piece.size, verification="crc32")
            )
            offset += padded(piece.size)
        receipt = capture(
            self.directory / RESIDUAL,
            sources,
            memory=self.memory,
            library=self.how.library,
            backend=self.how.backend,
            file_sha256=True,
            tuning=self.how.tuning,
            at=self.at,
        )
        self.seconds["residual"] = time.monotonic() - began
        return receipt

    def _write_pack(self, sources: Sequence[MemorySource], entries: Sequence[PackEntry]) -> _Packed:
        if not sources:
            return _Packed(blob=_NO_PACK)
        began = time.monotonic()
        there = {pack.sha256 for pack in self.store.packs()}
        pack = self.store.write(sources, digests=[entry.sha256 for entry in entries])
        if [entry.crc32 for entry in pack.entries] != [entry.crc32 for entry in entries]:
            # Its index would name digests that its bytes do not have.
            raise ColdSnapError(
                f"the model bytes of worker {self.identity.worker} changed while they were written; "
                "the engine must be quiet: quiesce it and capture again"
            )
        self.seconds["pack"] = time.monotonic() - began
        return _Packed(
            blob=Blob(bytes=pack.bytes, sha256=pack.sha256),
            entries=pack.entries,
            path=self.store.path(pack.sha256),
            new_bytes=0 if pack.sha256 in there else pack.bytes,
        )

    def _write_documents(
        self, receipt: CaptureReceipt, pieces: Sequence[Extent], packed: _Packed, replay: Replay, sums: Checksums
    ) -> Generation:
        began = time.monotonic()
        residual = Blob(bytes=receipt.file_bytes, sha256=f"sha256:{(receipt.file_sha256 or b'').hex()}")
        documents = Documents(
            split=self.split,
            model=self.model,
            identity=self.identity,
            pack=packed.blob,
            entries=packed.entries,
            residual=residual,
            pieces=placed_pieces(pieces, [digest.crc32 or 0 for digest in receipt.digests]),
            replay=replay,
            checksums=sums.of_extents() if replay.copies else (),
        )
        name = f"{os.getpid()}-{time.time_ns()}"
        native, recovery, recovery_sha256 = documents.native(), documents.recovery(), None
        if recovery is not None:
            recovery.require_same_memory(native)
            recovery_sha256 = self._durably(RECOVERY_MANIFEST, encode(recovery))
        self._durably(HIBERNATE_STATE, encode(self._hibernate_state(name, receipt)))
        if self.index is not None:
            self._durably(BOOTSTRAP_INDEX, self.index)
        manifest_sha256 = self._durably(NATIVE_MANIFEST, encode(native))
        self.seconds["documents"] = time.monotonic() - began
        return Generation(
            directory=self.directory,
            name=name,
            worker=self.identity.worker,
            manifest_sha256=manifest_sha256,
            recovery_sha256=recovery_sha256,
            replay=replay,
            pack=packed.blob if packed.path else None,
            pack_path=packed.path,
            new_pack_bytes=packed.new_bytes,
            residual=residual,
            coverage=native.prove(),
            receipt=receipt,
            seconds=dict(self.seconds),
        )

    def _hibernate_state(self, name: str, receipt: CaptureReceipt) -> HibernateState:
        return HibernateState(
            worker=self.identity.worker,
            capture_id=self.identity.capture_id,
            pid=os.getpid(),
            generation=name,
            discarded=dict(self.discarded),
            phases_ns={phase: round(seconds * 1e9) for phase, seconds in self.seconds.items()},
            backend=receipt.effective,
        )

    def _durably(self, name: str, data: bytes) -> str:
        write_file_durably(self.directory / name, data, at=self.at)
        return sha256_of(data)


def _found(pack: StoredPack, entries: tuple[PackEntry, ...]) -> _Packed:
    return _Packed(blob=Blob(bytes=pack.bytes, sha256=pack.sha256), entries=entries, path=pack.path)


def _remove(directory: Path) -> None:
    for name in _NAMES:
        (directory / name).unlink(missing_ok=True)
