"""Weights on their way out of an engine: the release, and what the descriptor says of it.

The one rule: before a worker gives anything away, the way back is journaled.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coldsnap import artifact as format9
from coldsnap.admission import require
from coldsnap.artifact.bootstrap import BOOTSTRAP_INDEX
from coldsnap.artifact.canonical import hex_of
from coldsnap.artifact.manifest import NativeManifest, read_document
from coldsnap.artifact.payloads import ModelPayloads, PayloadObject, Recovery, WorkerWeights
from coldsnap.artifact.store import PACKS, Store
from coldsnap.describe import described_model
from coldsnap.errors import EngineError
from coldsnap.keeper.undo import control
from coldsnap.moving import WritingStep
from coldsnap.receipts import Receipt
from coldsnap.session import Released, Session
from coldsnap.steps import OrderExport, ReleaseWeights

__all__ = [
    "WEIGHTS",
    "describe_weights",
    "manifest_of",
    "recorded",
    "release",
    "release_request",
    "require_seen",
    "store_of",
]

WEIGHTS = "weights"
"""The directory of an artifact with a directory for each worker."""

RESIDUAL, NATIVE = "weights.blob", "native-manifest.json"
RECOVERY, HIBERNATE = "recovery-manifest.json", "hibernate-state.json"


def release(session: Session, step: ReleaseWeights) -> Receipt:
    """Have every worker write its weights and give the memory away; whatever fails from here on brings them back."""
    writer = session.need(session.writer, "an output")
    ranks = session.ranks
    workers = ranks.workers()
    if step.discard:
        ranks.reset_prefix_cache()  # no block of it may refer to what is thrown away
    requests = {
        rank: release_request(session, step, worker, writer.directory(f"{WEIGHTS}/{worker}")) | _recording(step)
        for rank, worker in workers.items()
    }
    require_seen(session, [Store(step.store).prepare(), writer.path])
    if session.serving:
        session.living.undo(control("hydrate"))
    replies = ranks.release(requests, timeout_s=step.timeout_s)
    session.released = {
        workers[rank]: _released(rank, requests[rank]["directory"], reply) for rank, reply in replies.items()
    }
    return _receipt(step, session.released, replies)


def _recording(step: ReleaseWeights) -> dict[str, Any]:
    return {
        "recovery": step.recovery,
        "derived_buffer_max_bytes": step.derived_buffer_max_bytes,
        "verify_model_bytes": step.verify_model_bytes,
    }


def release_request(session: Session, step: WritingStep, worker: str, directory: Path) -> dict[str, Any]:
    """Return what a worker is asked (docs/weights.md)."""
    model = session.model and described_model(session.model)
    source = model and {"model_id": model.id, "revision": model.revision}
    return {
        "worker": worker,
        "directory": str(directory),
        "store": step.store,
        "capture_id": session.name_capture(),
        "model": source,
        "discard": list(step.discard),
        "backend": step.backend,
        "write_mode": step.write_mode,
        "reuse_blob": step.reuse_blob,
        "queue_depth": step.queue_depth,
        "chunk_bytes": step.chunk_bytes,
        "native_library": step.native_library or None,
        "native_sha256": step.native_sha256 or None,
    }


def require_seen(session: Session, directories: Sequence[Path], *, what: str = "weights cannot be released") -> None:
    """Refuse directories that the engine would find elsewhere than this process does.

    Private namespaces keep the mounts of the moment they were made. What is mounted later covers a directory here and
    not there, so a worker would write into the one underneath, where nobody looks.

    Args:
        session: With a keeper, whose mounts are the engine's.
        directories: They are there.
        what: What the error begins with.

    Raises:
        AdmissionError: Each is named.
    """
    root = f"/proc/{session.living.keeper_pid}/root"
    require(
        what,
        [
            f"{path} lies on a filesystem that was mounted or unmounted after the engine was started, and the engine, "
            "in mounts of its own, finds another directory there or none; name one elsewhere, or launch it anew"
            for path in directories
            if not _is_same(path.resolve(), root)
        ],
    )


def _is_same(path: Path, root: str) -> bool:
    try:
        return os.path.samefile(path, f"{root}{path}")
    except FileNotFoundError:
        return False


def _released(rank: str, directory: str, reply: Mapping[str, Any]) -> Released:
    pack = reply["pack"]
    if not pack:
        raise EngineError(
            f"{rank} has seen no byte that its load copied, so nothing of it is the model's: kept {reply['kept']}; "
            'capture with weights.mode = "image"'
        )
    return Released(
        rank=rank,
        directory=directory,
        manifest_sha256=reply["manifest_sha256"],
        pack_sha256=pack["sha256"],
        pack_bytes=pack["bytes"],
        new_pack_bytes=pack["new_bytes"],
        residual_bytes=reply["residual"]["bytes"],
        seconds=sum(reply["seconds"].get(name, 0.0) for name in ("write", "release")),
    )


def _receipt(
    step: ReleaseWeights, released: Mapping[str, Released], replies: Mapping[str, Mapping[str, Any]]
) -> Receipt:
    every = released.values()
    pack, new, residual = (
        sum(getattr(one, name) for one in every) for name in ("pack_bytes", "new_pack_bytes", "residual_bytes")
    )
    return Receipt(
        step=step.id,
        requested=step.backend,
        effective=", ".join(sorted({str(reply["backend"]) for reply in replies.values()})),
        reason=f"{pack / 1e6:,.1f} MB in packs ({new / 1e6:,.1f} MB new), {residual / 1e6:,.1f} MB beside them",
        bytes=pack + residual,
        details={
            "pack_bytes": pack,
            "new_pack_bytes": new,
            "residual_bytes": residual,
            "discarded_bytes": sum(sum(reply["discarded"].values()) for reply in replies.values()),
            "coverage": "; ".join(str(reply["coverage"]) for reply in replies.values()),
            **recorded(replies),
        },
    )


def store_of(session: Session) -> str:
    """Return the root of the store that got the packs of a capture."""
    return next(step.store for step in session.plan if isinstance(step, ReleaseWeights | OrderExport))


def recorded(replies: Mapping[str, Mapping[str, Any]]) -> dict[str, str | int]:
    """Say what a recovery could use, and why there is none where there is none."""
    recorded = [reply.get("recovery") or {} for reply in replies.values()]
    reasons = sorted({str(one["reason"]) for one in recorded if one.get("reason")})
    counts = {name: sum(int(one.get(name, 0)) for one in recorded) for name in ("copies", "plain", "derived_bytes")}
    return {"recovery": "; ".join(reasons) or "recorded", **counts}


def describe_weights(session: Session, files: Mapping[str, format9.FileRecord], store: str) -> format9.Weights:
    """Return the weights section of the descriptor, and leave evidence of every pack in the store.

    Args:
        session: The capture's.
        files: What was sealed below ``weights``, by path.
        store: The root of the store.
    """
    listed, payloads = [], []
    for worker, one in sorted(session.released.items()):
        own = {path.rpartition("/")[2]: file for path, file in files.items() if path.startswith(f"{WEIGHTS}/{worker}/")}
        listed.append(
            WorkerWeights(
                worker=worker,
                residual=own[RESIDUAL],
                native_manifest=own[NATIVE],
                recovery_manifest=own.get(RECOVERY),
                hibernate_state=own.get(HIBERNATE),
                bootstrap_index=own.get(BOOTSTRAP_INDEX),
            )
        )
        payloads.append(
            PayloadObject(
                worker=worker,
                path=f"{PACKS.as_posix()}/{hex_of(one.pack_sha256)}.pack",
                bytes=one.pack_bytes,
                sha256=one.pack_sha256,
            )
        )
        Store(store).admit(payloads[-1], index=manifest_of(one).index)
    model = described_model(session.need(session.model, "a model"))
    recoverable = all(one.recovery_manifest is not None for one in listed)
    return format9.Weights(
        kind="packs",
        payloads=ModelPayloads(objects=tuple(payloads)),
        workers=tuple(listed),
        recovery=Recovery(model_id=model.id, revision=model.revision) if recoverable else None,
        start_files=files.get(f"{WEIGHTS}/start-files.tar"),
    )


def manifest_of(one: Released) -> NativeManifest:
    """Return the native manifest that a worker wrote."""
    return read_document(NativeManifest, Path(one.directory, NATIVE), sha256=one.manifest_sha256)
