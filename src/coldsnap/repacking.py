"""Packs that a store lacks, brought from where they can be had without an engine: a hub, or the pinned checkpoint.

The one rule: a pack that is there is admitted and left alone, and what is brought has the digest that the artifact
names, or there is none.
"""

from __future__ import annotations

import os
from pathlib import Path

from coldsnap.artifact.checkpoint_source import CheckpointSources, require_tensors
from coldsnap.artifact.held import reading
from coldsnap.artifact.hub import Hub
from coldsnap.artifact.manifest import NativeManifest, read_document
from coldsnap.artifact.payloads import WorkerWeights
from coldsnap.artifact.rebuild import rebuild_pack
from coldsnap.artifact.store import Store
from coldsnap.engines.weights.room import require_room
from coldsnap.errors import IntegrityError
from coldsnap.hydrating import payloads_of
from coldsnap.receipts import Receipt
from coldsnap.recovering import admit_checkpoint, recovery_manifest
from coldsnap.session import Session
from coldsnap.steps import FetchPacks, RepackCheckpoint

__all__ = ["fetch", "repack"]

RESERVE_BYTES = 1 << 30
"""What stays free beside a pack, as where an engine writes it."""


def fetch(session: Session, step: FetchPacks) -> Receipt:
    """Bring every pack that the store lacks from the hub; what was interrupted goes on where it ended."""
    store, hub = Store(step.store), Hub(repository=step.repository, endpoint=step.endpoint or None)
    payloads = {one.sha256: one for one in payloads_of(session)}
    missing = [one for one in payloads.values() if not os.path.lexists(store.path(one.sha256))]
    if missing:
        store.prepare()
        room = [(store.directory, one.bytes) for one in missing]
        require_room(room, reserve_bytes=RESERVE_BYTES, what="what is fetched")
    for one in missing:
        hub.stage(one, store, step.revision, files_by_worker=dict(step.files))
    return Receipt(
        step=step.id,
        effective=f"{len(missing)} packs fetched, {len(payloads) - len(missing)} were there",
        reason=f"{step.repository} at {step.revision}",
        bytes=sum(one.bytes for one in missing),
        details={one.sha256: "fetched" for one in missing},
    )


def repack(session: Session, step: RepackCheckpoint) -> Receipt:
    """Write the packs that the store lacks out of the checkpoint."""
    opened = session.need(session.artifact, "an artifact")
    session.stack.enter_context(reading(opened.path))
    admit_checkpoint(session)
    store, payloads = Store(step.store, lanes=session.library), payloads_of(session)
    store.prepare()
    missing = {one.sha256: one for one in payloads if not os.path.lexists(store.path(one.sha256))}
    require_room(
        [(store.directory, one.bytes) for one in missing.values()],
        reserve_bytes=RESERVE_BYTES if missing else 0,
        what="the pack",
    )
    new = {one.worker: _repacked(session, store, one) for one in opened.descriptor.weights.workers}
    session.report.workload = "nothing was started"
    written = sum(new.values())
    return Receipt(
        step=step.id,
        effective="ready",
        reason=f"{written / 1e6:,.1f} MB written into {step.store}"
        if written
        else f"the packs are in {step.store} already",
        bytes=written,
        details={"new_pack_bytes": written, **{f"{one.worker} pack": one.sha256 for one in payloads}},
    )


def _repacked(session: Session, store: Store, one: WorkerWeights) -> int:
    """Write one worker's pack unless it is there; return what was written, bytes.

    Raises:
        IntegrityError: The checkpoint has other bytes; the tensor is named where a checksum of its own tells it.
        UnsupportedError: The load did more than move bytes.
    """
    opened = session.need(session.artifact, "an artifact")
    native = read_document(
        NativeManifest, Path(opened.path, one.native_manifest.path), sha256=one.native_manifest.sha256
    )
    recovery = recovery_manifest(session, one)
    recovery.require_same_memory(native)
    with CheckpointSources(native, recovery) as checkpoint:
        try:
            return rebuild_pack(
                store, checkpoint.sources(), native.index, sha256=native.pack.sha256, size=native.pack.bytes
            ).new_bytes
        except IntegrityError:
            require_tensors(recovery)
            raise
