"""A fresh start: the bytes of a pack, brought into parameters that were allocated a moment ago.

The one rule: a byte reaches a parameter by the parameter's name. The layout of this process is compared with the
captured one before anything moves, and each extent of the pack is matched by its semantic id, computed from the tensors
that are here.
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
from coldsnap.artifact.manifest import ModelExtent, NativeManifest, read_document
from coldsnap.engines.weights.generation import NATIVE_MANIFEST, RESIDUAL
from coldsnap.engines.weights.layout import Layout
from coldsnap.engines.weights.native import Reading, admit_pack, move, require_residual
from coldsnap.engines.weights.requests import HydrateRequest
from coldsnap.engines.weights.split import semantic_id
from coldsnap.errors import ContractError, FormatError
from coldsnap.transfer.backend import FileExtent, HydrationReceipt
from coldsnap.transfer.native import NativeLibrary

__all__ = ["Matched", "StartRequest", "match", "start"]

Reply = Mapping[str, Any]


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
        pack: Extents of the pack, in the order of the file.
        residual: Extents of the residual.
        zeros: Address and size of what is in no file; memory of a new engine holds anything.
        tensors: How many tensors the layout has.
    """

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
    directory, pack, manifest_sha256 = asked.place
    seconds: dict[str, float] = {}
    with _timed(seconds, "admit"):
        manifest = read_document(NativeManifest, directory / NATIVE_MANIFEST, sha256=manifest_sha256)
        index = BootstrapIndex.read(directory / BOOTSTRAP_INDEX, sha256=asked.index_sha256)
        index.require_same_capture(manifest)
        if manifest.worker != worker:
            raise ContractError(f"the generation in {directory} is {manifest.worker}'s, this is {worker}")
        admit_pack(manifest, pack, asked.verify)
    with _timed(seconds, "match"):
        derived = {one.name for one in index.tensors if one.role == "buffer"}
        layout = Layout.of(model, derived)
        matched = match(index, manifest, layout)
    reading = _reading(asked)
    receipts = _fill(matched, manifest, layout, (pack, directory / RESIDUAL), reading)
    if reading.library is not None:
        reading.library.release()  # its page-locked ring, which nothing reads through again
    return {
        "task": "start",
        "worker": worker,
        "provider": "native",
        "bytes": {name: receipts[name].bytes if name in receipts else 0 for name in ("pack", "residual")},
        "pack_bytes": manifest.pack.bytes,
        "matched": {"extents": len(matched.pack), "tensors": matched.tensors},
        "seconds": {**seconds, **{name: receipt.seconds for name, receipt in receipts.items()}},
        "receipts": {name: _told(receipt) for name, receipt in receipts.items()},
    }


def match(index: BootstrapIndex, manifest: NativeManifest, layout: Layout) -> Matched:
    """Find the place of every captured byte in this process.

    Raises:
        AdmissionError: The layouts differ.
        FormatError: An extent of the pack is of no tensor (bootstrap.3).
    """
    bases = layout.bases(index, [allocation.size for allocation in manifest.allocations])
    tensors: dict[int, list[BootstrapTensor]] = {}
    for tensor in index.tensors:
        tensors.setdefault(tensor.allocation, []).append(tensor)
    ordered = sorted(manifest.model_extents, key=lambda one: one.pack_offset)
    for one in ordered:
        _require_named(one, tensors[one.allocation])
    return Matched(
        pack=tuple(
            FileExtent(
                file_offset=one.pack_offset,
                address=bases[one.allocation] + one.offset,
                length=one.size,
                crc32=one.crc32,
            )
            for one in ordered
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


def _require_named(extent: ModelExtent, tensors: Sequence[BootstrapTensor]) -> None:
    # The tensors of the index are those of this process by now, name for name and byte for byte. Most extents begin
    # where their tensor does.
    for tensor in sorted(tensors, key=lambda one: one.offset != extent.offset):
        if semantic_id(tensor.name, extent.offset - tensor.offset, extent.size) == extent.semantic_id:
            return
    where = f"{extent.size} bytes at byte {extent.offset} of allocation {extent.allocation}"
    raise FormatError(f"{where} belong to no tensor of this model", path=NATIVE_MANIFEST, rule="bootstrap.3")


def _fill(
    matched: Matched,
    manifest: NativeManifest,
    layout: Layout,
    files: tuple[Path | None, Path],
    reading: Reading,
) -> Mapping[str, HydrationReceipt]:
    receipts: dict[str, HydrationReceipt] = {}
    pack, residual = files
    for address, size in matched.zeros:
        layout.memory.zero(address, size)
    if matched.pack and pack is not None:
        receipts["pack"] = move(pack, matched.pack, layout.memory, reading)
    if matched.residual:
        if reading.preverified:
            require_residual(manifest, residual)
        receipts["residual"] = move(residual, matched.residual, layout.memory, reading)
    layout.memory.synchronize()
    return receipts


def _reading(asked: StartRequest) -> Reading:
    backend = asked.hydration_backend("auto")
    library = None
    if backend != "python":
        library = NativeLibrary.load(asked.native_library, sha256=asked.native_sha256)
    return Reading(
        library=library, backend=backend, preverified=asked.verify_mode == "preverified", tuning=asked.tuning
    )


def _told(receipt: HydrationReceipt) -> Reply:
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
