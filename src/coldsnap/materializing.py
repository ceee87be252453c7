"""Packs that a store lacks, written by the workers of an engine that runs.

The one rule: the engine is never worse off: writing that fails leaves it serving as it did, unless the restore that
asked for the packs says that they are required.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coldsnap.artifact import Artifact
from coldsnap.artifact.held import reading
from coldsnap.artifact.store import Store
from coldsnap.errors import ColdSnapError, EngineError, StepTimeout
from coldsnap.keeper.client import Keeper
from coldsnap.receipts import Receipt
from coldsnap.releasing import require_seen
from coldsnap.session import Session
from coldsnap.steps import MaterializeEngine, MaterializePacks

__all__ = ["materialize", "materialize_engine"]

Replies = Mapping[str, Mapping[str, Any]]
POLL_S = 1.0
"""How long a worker may keep one answer back, s: between two, a stop gets through."""

BEGIN_S = 30.0


def materialize(session: Session, step: MaterializePacks) -> Receipt:
    """Have the packs of a restored engine written that the store lacks; begun only, unless they are required."""
    try:
        return _materialize(session, step, session.need(session.artifact, "an artifact"))
    except ColdSnapError as error:
        if step.wait:
            raise
        # The engine has answered as it did at its capture: it is whole, and worth more than a pack.
        return Receipt(step=step.id, requested="async", effective="not begun", reason=str(error))


def materialize_engine(session: Session, step: MaterializeEngine) -> Receipt:
    """Have the packs of an engine written that was restored earlier; it serves on whatever comes of it."""
    session.serving = True
    with Keeper.connect(step.run_dir) as keeper, reading(Path(step.artifact)):
        session.keeper = keeper
        try:
            session.report.workload = f"the engine is {keeper.status().state}"
            return _materialize(session, step, Artifact.open(step.artifact))
        finally:
            session.keeper = None  # nothing was begun at the keeper, so there is nothing to undo


def _materialize(session: Session, step: MaterializePacks, opened: Artifact) -> Receipt:
    directory = Store(step.store).prepare()
    require_seen(session, [directory], what="packs cannot be written")
    requests = _requests(session, step, opened)
    replies = session.ranks.materialize(
        {rank: dict(one, wait_s=0.0) for rank, one in requests.items()}, timeout_s=BEGIN_S
    )
    if step.wait:
        replies = _awaited(session, step, requests, replies)
    failed = [f"{rank}: {reply['error']}" for rank, reply in replies.items() if reply["state"] == "failed"]
    if failed:
        raise EngineError(f"packs could not be written into {step.store}: {'; '.join(failed)}")
    return _receipt(step, replies)


def _requests(session: Session, step: MaterializePacks, opened: Artifact) -> Mapping[str, dict[str, Any]]:
    own = {one.worker: one.native_manifest for one in opened.descriptor.weights.workers}
    workers = session.ranks.workers()
    if set(own) != set(workers.values()):
        raise EngineError(f"the artifact has weights of {', '.join(own)}, the engine has {', '.join(workers.values())}")
    return {
        rank: {
            "worker": worker,
            "directory": os.path.dirname(opened.path / own[worker].path),
            "manifest_sha256": own[worker].sha256,
            "store": step.store,
            "native_library": step.native_library or None,
            "native_sha256": step.native_sha256 or None,
        }
        for rank, worker in workers.items()
    }


def _awaited(
    session: Session, step: MaterializePacks, requests: Mapping[str, dict[str, Any]], replies: Replies
) -> Replies:
    """Ask until every pack is there or one has failed.

    Raises:
        StepTimeout: They were not, in time; the writing goes on.
    """
    deadline = time.monotonic() + step.timeout_s
    while {str(reply["state"]) for reply in replies.values()} - {"ready", "failed"}:
        if time.monotonic() > deadline:
            states = ", ".join(f"{rank} is {reply['state']}" for rank, reply in sorted(replies.items()))
            raise StepTimeout(
                f"the packs were not in {step.store} within {step.timeout_s:.0f} s: {states}; allow more time",
                seconds=step.timeout_s,
            )
        ask = {rank: dict(one, wait_s=POLL_S) for rank, one in requests.items()}
        replies = session.ranks.materialize(ask, timeout_s=POLL_S + BEGIN_S)
    return replies


def _receipt(step: MaterializePacks, replies: Replies) -> Receipt:
    new = sum(int(reply["new_bytes"]) for reply in replies.values())
    states = ", ".join(sorted({str(reply["state"]) for reply in replies.values()}))
    written = f"{new / 1e6:,.1f} MB written into {step.store}" if new else f"the packs are in {step.store} already"
    return Receipt(
        step=step.id,
        requested="required" if step.wait else "async",
        effective=states,
        reason=written if states == "ready" else f"goes on in the background, into {step.store}",
        bytes=new,
        details={
            "pack_bytes": sum(int(reply["bytes"]) for reply in replies.values()),
            "new_pack_bytes": new,
            **{f"{rank} pack": str(reply["sha256"]) for rank, reply in replies.items()},
        },
    )
