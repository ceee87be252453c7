"""A fresh start: the bytes of a pack or a checkpoint, brought into parameters that were allocated a moment ago.

The one rule: a byte reaches a parameter by the parameter's name. The layout of this process is compared with the
captured one before anything moves, and each model extent is matched by its semantic id, computed from the tensors that
are here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import field, frozen

from coldsnap.artifact import record
from coldsnap.artifact.bootstrap import BOOTSTRAP_INDEX, BootstrapIndex, BootstrapTensor
from coldsnap.artifact.manifest import ModelExtent, NativeManifest, RecoveryManifest, ReloadExtent, read_document
from coldsnap.engines.weights.generation import NATIVE_MANIFEST, RECOVERY_MANIFEST, RESIDUAL
from coldsnap.engines.weights.layout import Layout
from coldsnap.engines.weights.native import Reading, admit_pack, move, require_residual, require_size
from coldsnap.engines.weights.replaying import ReplayReceipt, replay
from coldsnap.engines.weights.requests import HydrateRequest
from coldsnap.engines.weights.split import semantic_id
from coldsnap.errors import ContractError, FormatError
from coldsnap.transfer.backend import FileExtent, HydrationReceipt
from coldsnap.transfer.checkpoint import require_files
from coldsnap.transfer.native import NativeLibrary

__all__ = ["Matched", "StartRequest", "match", "start"]

Reply = Mapping[str, Any]
Receipt = HydrationReceipt | ReplayReceipt


@frozen(kw_only=True)
class StartRequest(HydrateRequest):
    """A ``hydrate`` of an engine that has nothing yet.

    Attributes:
        index_sha256: Digest of the bootstrap index.
    """

    index_sha256: str = field(validator=record.sha256)


@frozen(kw_only=True)
class Matched:
    """What goes where.

    Attributes:
        bases: Where each captured allocation begins in this process.
        pack: Extents of the pack, in the order of the file; none where the checkpoint is read.
        residual: Extents of the residual.
        zeros: Address and size of what is in no file; memory of a new engine holds anything.
        tensors: How many tensors the layout has.
    """

    bases: tuple[int, ...]
    pack: tuple[FileExtent, ...]
    residual: tuple[FileExtent, ...]
    zeros: tuple[tuple[int, int], ...]
    tensors: int


def start(model: Any, asked: StartRequest, *, worker: str) -> Reply:
    """Fill a model that was made and not loaded, and return what was moved.

    Args:
        model: Its parameters are allocated.
        asked: From where, and how.
        worker: Whose generation it must be.

    Raises:
        IntegrityError: Manifest, index, pack or residual have other bytes.
        FormatError: A rule of the formats is broken.
        AdmissionError: The model is laid out in another way; each difference is named.
        ContractError: The request names no generation, or another worker's.
        NativeError: A transfer failed; the model is garbage.
    """
    if asked.place is None:
        raise ContractError("a fresh start was asked for without the directory of a generation")
    directory = asked.place[0]
    seconds: dict[str, float] = {}
    with _timed(seconds, "admit"):
        manifest = _admitted(asked, asked.place, worker)
        index = BootstrapIndex.read(directory / BOOTSTRAP_INDEX, sha256=asked.index_sha256)
        index.require_same_capture(manifest)
    with _timed(seconds, "match"):
        derived = {one.name for one in index.tensors if one.role == "buffer"}
        layout = Layout.of(model, derived)
        matched = match(index, manifest, layout)
    receipts = _fill(asked, matched, manifest, layout, directory)
    return {
        "task": "start",
        "worker": worker,
        "provider": asked.provider,
        "bytes": {name: receipts[name].bytes if name in receipts else 0 for name in _KINDS},
        "pack_bytes": manifest.pack.bytes if isinstance(manifest, NativeManifest) else 0,
        "matched": {"extents": len(manifest.model_extents), "tensors": matched.tensors},
        "seconds": {**seconds, **{name: receipt.seconds for name, receipt in receipts.items()}},
        "receipts": {name: _told(receipt) for name, receipt in receipts.items()},
    }


_KINDS = ("pack", "checkpoint", "residual")


def _admitted(
    asked: StartRequest, place: tuple[Path, Path | None, str], worker: str
) -> NativeManifest | RecoveryManifest:
    """Read the manifest, and look at the files that it names before anything moves."""
    directory, pack, manifest_sha256 = place
    manifest: NativeManifest | RecoveryManifest
    if asked.provider == "native":
        manifest = read_document(NativeManifest, directory / NATIVE_MANIFEST, sha256=manifest_sha256)
        admit_pack(manifest, pack, asked.verify)
    else:
        path = directory / RECOVERY_MANIFEST
        manifest = read_document(RecoveryManifest, path, sha256=asked.recovery_sha256 or "")
        require_files(manifest.files)
    if manifest.worker != worker:
        raise ContractError(f"the generation in {directory} is {manifest.worker}'s, this is {worker}")
    require_size(directory / RESIDUAL, manifest.residual, "manifest.4")
    return manifest


def match(index: BootstrapIndex, manifest: NativeManifest | RecoveryManifest, layout: Layout) -> Matched:
    """Find the place of every captured byte in this process.

    Raises:
        AdmissionError: The layouts differ.
        FormatError: A model extent is of no tensor (bootstrap.3).
    """
    bases = layout.bases(index, [allocation.size for allocation in manifest.allocations])
    tensors: dict[int, list[BootstrapTensor]] = {}
    for tensor in index.tensors:
        tensors.setdefault(tensor.allocation, []).append(tensor)
    for one in manifest.model_extents:
        _require_named(one, tensors[one.allocation])
    packed = manifest.model_extents if isinstance(manifest, NativeManifest) else ()
    return Matched(
        bases=tuple(bases[number] for number in range(len(manifest.allocations))),
        pack=tuple(
            FileExtent(
                file_offset=one.pack_offset,
                address=bases[one.allocation] + one.offset,
                length=one.size,
                crc32=one.crc32,
            )
            for one in sorted(packed, key=lambda one: one.pack_offset)
        ),
        residual=tuple(
            FileExtent(
                file_offset=one.file_offset,
                address=bases[one.allocation] + one.offset,
                length=one.size,
                crc32=one.crc32,
            )
            for one in manifest.residual_extents
        ),
        zeros=tuple((bases[one.allocation] + one.offset, one.size) for one in manifest.vacant_extents or ()),
        tensors=len(index.tensors),
    )


def _require_named(extent: ModelExtent | ReloadExtent, tensors: Sequence[BootstrapTensor]) -> None:
    # The tensors of the index are those of this process by now, name for name and byte for byte. Most extents begin
    # where their tensor does.
    for tensor in sorted(tensors, key=lambda one: one.offset != extent.offset):
        if semantic_id(tensor.name, extent.offset - tensor.offset, extent.size) == extent.semantic_id:
            return
    where = f"{extent.size} bytes at byte {extent.offset} of allocation {extent.allocation}"
    raise FormatError(f"{where} belong to no tensor of this model", path=NATIVE_MANIFEST, rule="bootstrap.3")


def _fill(
    asked: StartRequest,
    matched: Matched,
    manifest: NativeManifest | RecoveryManifest,
    layout: Layout,
    directory: Path,
) -> Mapping[str, Receipt]:
    receipts: dict[str, Receipt] = {}
    memory, reading = layout.memory, _reading(asked)
    for address, size in matched.zeros:
        memory.zero(address, size)
    if isinstance(manifest, RecoveryManifest):
        loading = asked.loader.loading(_library(asked) if asked.loader.needs_library else None)
        receipts["checkpoint"] = replay(manifest, memory=memory, loading=loading, bases=matched.bases)
    elif matched.pack and asked.pack is not None:
        receipts["pack"] = move(Path(asked.pack), matched.pack, memory, reading)
    if matched.residual:
        if reading.preverified:
            require_residual(manifest, directory / RESIDUAL)
        receipts["residual"] = move(directory / RESIDUAL, matched.residual, memory, reading)
    memory.synchronize()
    if reading.library is not None:
        reading.library.release()  # its page-locked ring, which nothing reads through again
    return receipts


def _reading(asked: StartRequest) -> Reading:
    backend = asked.hydration_backend("auto")
    return Reading(
        library=None if backend == "python" else _library(asked),
        backend=backend,
        preverified=asked.verify_mode == "preverified",
        tuning=asked.tuning,
    )


def _library(asked: StartRequest) -> NativeLibrary:
    return NativeLibrary.load(asked.native_library, sha256=asked.native_sha256)


def _told(receipt: Receipt) -> Reply:
    return {
        "requested": receipt.requested,
        "effective": receipt.effective,
        "reason": receipt.reason,
        "bytes": receipt.bytes,
        "verified_extents": receipt.verified_extents,
        **receipt.details(),
    }


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    seconds[phase] = time.monotonic() - began
