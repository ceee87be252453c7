"""Weights on their way back: packs admitted, read ahead, verified, and brought to their addresses.

The one rule: a pack is what the artifact names by digest, or the restore ends; nothing is taken in its place.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coldsnap.artifact import Artifact
from coldsnap.artifact.admission import record_path
from coldsnap.artifact.manifest import HibernateState, NativeManifest, read_document
from coldsnap.artifact.payloads import PayloadObject, WorkerWeights
from coldsnap.artifact.private import open_private
from coldsnap.artifact.store import Store
from coldsnap.errors import AdmissionError, EngineError, FormatError, IntegrityError, PayloadMissingError
from coldsnap.moving import ReadingStep
from coldsnap.planning.selecting import fetch_required, published_in
from coldsnap.receipts import Receipt
from coldsnap.recovering import admit_checkpoint, loading_of, recovery_places
from coldsnap.session import Session
from coldsnap.steps import AdmitPacks, HydrateWeights, PrefetchWeights, VerifyPacks
from coldsnap.transfer.prefetch import prefetch

__all__ = [
    "BUDGET_SHARE",
    "admit_packs",
    "checkpoint_figures",
    "hydrate",
    "mapped_bytes",
    "payloads_of",
    "prefetch_weights",
    "reading_of",
    "require_awake",
    "verify_packs",
]

# Of what is available when the read-ahead begins: the thaw needs memory too, and must not wait for pages to be dropped.
BUDGET_SHARE = 0.5


def admit_packs(session: Session, step: AdmitPacks) -> Receipt:
    """Refuse what is missing, cut short or open to others, before anything starts; or admit the checkpoint instead."""
    store = Store(step.store)
    opened = session.need(session.artifact, "an artifact")
    discarded, weights = _require_asleep(opened), opened.descriptor.weights
    if step.provider == "recovery":
        return _recovers(session, step, requested="recovery", reason="no pack was looked at")
    if step.provider == "either" and weights.payloads is None:  # of a warm engine, whose plan did not know it
        return _recovers(session, step, requested="auto", reason="the artifact names no packs")
    payloads = payloads_of(session)
    if step.provider == "either" and weights.recovery is not None and (absent := _absent(store, payloads)):
        if repository := step.repository or (published_in(opened) if step.published else ""):
            raise fetch_required(absent, step.store, repository)
        return _recovers(session, step, requested="auto", reason=f"the pack {absent} is not in the store {store.root}")
    for payload in payloads:
        path = store.path(payload.sha256)
        if not os.path.lexists(path):
            raise PayloadMissingError(
                f"the pack {payload.sha256} of {payload.worker} is not in the store {store.root} (looked for {path}); "
                "bring it there, or name the store that has it",
                digest=payload.sha256,
            )
        with open_private(path) as (_, status):
            if status.st_size != payload.bytes:
                raise IntegrityError(
                    "the pack is not whole",
                    path=str(path),
                    expected=f"{payload.bytes} bytes",
                    actual=f"{status.st_size} bytes",
                )
        if step.evidence and not os.path.lexists(record_path(path)):
            raise AdmissionError(
                f"nobody has verified {path} yet, and with io.verify_mode = 'preverified' nothing compares its bytes "
                "on their way; verify the artifact first (Verify), or set io.verify_mode = 'inline'"
            )
    total = sum(payload.bytes for payload in payloads)
    return Receipt(
        step=step.id,
        effective=f"{len(payloads)} packs in {store.root}",
        bytes=total,
        details={f"{region}_discarded_bytes": size for region, size in discarded.items()},
    )


def _require_asleep(opened: Artifact) -> dict[str, int]:
    """Refuse a worker that did not sleep when this capture was taken; return what sleeping threw away, by region."""
    states = []
    for one in opened.descriptor.weights.workers:
        if (file := one.hibernate_state) is not None:
            path = Path(opened.path, file.path)
            state = read_document(HibernateState, path, sha256=file.sha256)
            expected, found = (one.worker, opened.descriptor.capture_id), (state.worker, state.capture_id)
            if found != expected:
                text = f"it is of {found[0]} in the capture {found[1]}, expected {expected[0]} in {expected[1]}"
                raise FormatError(text, path=str(path), rule="manifest.7")
            states.append(state)
    return _total(state.discarded for state in states)


def _absent(store: Store, payloads: Sequence[PayloadObject]) -> str:
    """Return the first pack that is not there at all; one that is there and is another is no absent one."""
    return next((one.sha256 for one in payloads if not os.path.lexists(store.path(one.sha256))), "")


def _recovers(session: Session, step: AdmitPacks, *, requested: str, reason: str) -> Receipt:
    total = admit_checkpoint(session)
    return Receipt(
        step=step.id,
        requested=requested,
        effective="recovery",
        reason=f"{reason}; {len(session.checkpoint)} files of the checkpoint are as captured",
        bytes=total,
    )


def verify_packs(session: Session, step: VerifyPacks) -> Receipt:
    """Admit every pack: by its record when it is unchanged, else by all of its bytes."""
    if session.checkpoint:
        return Receipt(
            step=step.id, requested=step.mode, effective="no pack is used", reason="the weights are recovered"
        )
    opened, store = session.need(session.artifact, "an artifact"), Store(step.store)
    hashed = 0
    for payload in payloads_of(session):
        known = step.mode == "evidence" and os.path.lexists(record_path(store.path(payload.sha256)))
        index = None if known else _manifest(opened, payload.worker).index
        hashed += store.admit(payload, step.mode, index=index).validation.bytes_hashed
    return Receipt(
        step=step.id,
        requested=step.mode,
        effective="unchanged by stat" if not hashed else "digested",
        reason=f"{hashed / 1e6:,.1f} MB digested",
        bytes=hashed,
    )


def prefetch_weights(session: Session, step: PrefetchWeights) -> Receipt:
    """Begin to read packs, then residuals, into the page cache; the hydrate ends it."""
    opened, store = session.need(session.artifact, "an artifact"), Store(step.store)
    available = session.need(session.host, "the host's facts").memory.available_bytes
    images = sum(file.bytes for unit in opened.descriptor.capsule.units for file in unit.files)
    left = max(0, int((available - images) * BUDGET_SHARE))
    if session.checkpoint:
        paths = dict.fromkeys(session.checkpoint if step.checkpoint else ())
    else:
        paths = dict.fromkeys(str(store.path(payload.sha256)) for payload in payloads_of(session))
    paths |= dict.fromkeys(str(opened.path / one.residual.path) for one in opened.descriptor.weights.workers)
    planned = 0
    for path in paths:
        budget = min(left - planned, os.stat(path).st_size)
        if budget <= 0:
            break
        ahead = prefetch(path, budget_bytes=budget)
        session.stack.callback(ahead.cancel)
        session.prefetches.append(ahead)
        planned += budget
    return Receipt(
        step=step.id,
        effective=f"{len(session.prefetches)} of {len(paths)} files begun",
        reason=f"at most {left / 1e6:,.0f} MB, {BUDGET_SHARE:.0%} of what the image leaves available",
        details={"planned_bytes": planned},
    )


def hydrate(session: Session, step: HydrateWeights) -> Receipt:
    """Map and fill every worker's memory; what was being read ahead is left to the transfer from here on."""
    ahead = [one.cancel() for one in session.prefetches]
    workers = session.ranks.workers()
    own = _places_of(session, step) if step.store else {}
    reading = reading_of(step) | {
        "native_library": step.native_library or None,
        "native_sha256": step.native_sha256 or None,
    }
    if own and set(own) != set(workers.values()):
        raise EngineError(f"the artifact has weights of {', '.join(own)}, the engine has {', '.join(workers.values())}")
    if session.checkpoint:
        reading |= loading_of(step)
    requests = {rank: {**reading, **own.get(worker, {})} for rank, worker in workers.items()}
    replies = session.ranks.hydrate(requests, timeout_s=step.timeout_s)
    require_awake(session)
    moved = _total(reply["bytes"] for reply in replies.values())
    seconds = _slowest(reply["seconds"] for reply in replies.values())
    receipts = [reply["receipt"] for reply in replies.values() if reply.get("receipt")]
    return Receipt(
        step=step.id,
        requested=step.loader_backend if session.checkpoint else step.backend,
        effective=", ".join(sorted({str(one["effective"]) for one in receipts})) or "nothing to do",
        reason="; ".join(sorted({str(one["reason"]) for one in receipts if one["reason"]})),
        bytes=sum(moved.values()),
        details={
            **{f"{name}_bytes": size for name, size in moved.items()},
            **{f"{name}_s": value for name, value in seconds.items()},
            "prefetched_bytes": sum(one.bytes for one in ahead),
            **checkpoint_figures(replies),
        },
    )


def mapped_bytes(opened: Artifact) -> tuple[int, ...]:
    """Return how much each worker of an artifact maps when it is hydrated, at least, in the order of the ranks.

    What lies in packs and residuals is counted from the descriptor, what was discarded from the workers' notes. The
    manifests, which would say it to the byte, are as long as the engine has tensors.
    """
    packs = opened.descriptor.weights.payloads
    sizes = {} if packs is None else {payload.worker: payload.bytes for payload in packs.objects}
    workers = sorted(opened.descriptor.weights.workers, key=lambda one: (len(one.worker), one.worker))
    return tuple(sizes.get(one.worker, 0) + one.residual.bytes + _discarded_bytes(opened, one) for one in workers)


def _discarded_bytes(opened: Artifact, one: WorkerWeights) -> int:
    file = one.hibernate_state
    if file is None:
        return 0
    return sum(read_document(HibernateState, opened.path / file.path, sha256=file.sha256).discarded.values())


def checkpoint_figures(replies: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the figures of what was read of the checkpoint, all workers together."""
    told = [reply["receipts"]["checkpoint"] for reply in replies.values() if "checkpoint" in reply.get("receipts", {})]
    counted = ("files", "tensors", "plain_copies", "staged_copies", "local_read_bytes", "verified_sample_bytes")
    return {f"checkpoint_{name}": sum(one[name] for one in told) for name in counted if told}


def reading_of(step: ReadingStep) -> dict[str, Any]:
    """Return how bytes reach memory, as a worker is told."""
    return {
        "backend": step.backend,
        "read_mode": step.read_mode,
        "verify_mode": step.verify_mode,
        # Inline, the checksum of every extent is compared on its way, and the digest of the pack beside the thaw.
        "verify": "evidence" if step.verify_mode == "preverified" else "none",
        "queue_depth": step.queue_depth,
        "chunk_bytes": step.chunk_bytes,
    }


def require_awake(session: Session) -> None:
    """Refuse an engine of which a part still sleeps: it would answer from zeros.

    Raises:
        EngineError: Named by rank.
    """
    asleep = {rank: reply["state"] for rank, reply in session.ranks.memory().items() if reply["state"] != "awake"}
    if asleep:
        told = ", ".join(f"{rank} is {state}" for rank, state in sorted(asleep.items()))
        raise EngineError(f"the engine's memory is not back: {told}; nothing it answered could be trusted")


def _places_of(session: Session, step: HydrateWeights) -> Mapping[str, Mapping[str, Any]]:
    if session.checkpoint:
        return recovery_places(session)
    opened, store = session.need(session.artifact, "an artifact"), Store(step.store)
    packs = {payload.worker: str(store.path(payload.sha256)) for payload in payloads_of(session)}
    return {
        one.worker: {
            "directory": os.path.dirname(opened.path / one.native_manifest.path),
            "pack": packs[one.worker],
            "manifest_sha256": one.native_manifest.sha256,
        }
        for one in opened.descriptor.weights.workers
    }


def payloads_of(session: Session) -> tuple[PayloadObject, ...]:
    """Return the packs that the opened artifact names."""
    opened = session.need(session.artifact, "an artifact")
    return session.need(opened.descriptor.weights.payloads, "an artifact with packs").objects


def _manifest(opened: Artifact, worker: str) -> NativeManifest:
    (own,) = (one for one in opened.descriptor.weights.workers if one.worker == worker)
    file = own.native_manifest
    return read_document(NativeManifest, Path(opened.path, file.path), sha256=file.sha256)


def _total(each: Any) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in each:
        for name, size in one.items():
            total[name] = total.get(name, 0) + int(size)
    return total


def _slowest(each: Any) -> dict[str, float]:
    slowest: dict[str, float] = {}
    for one in each:
        for name, value in one.items():
            slowest[name] = max(slowest.get(name, 0.0), float(value))
    return slowest
