"""The steps of what is done to artifacts at rest: open, verify, delete, collect, publish.

The one rule: what a capture may still need is not touched: neither a directory that one holds, nor a pack that one
may name.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from attrs import evolve

from coldsnap.artifact import Artifact, remove_committed
from coldsnap.artifact.collect import (
    STAMP_ERROR_NS,
    Deleted,
    captures_below,
    delete_artifact,
    unfinished,
    verify_artifact,
)
from coldsnap.artifact.held import user_of
from coldsnap.artifact.hub import Hub
from coldsnap.artifact.oci import push
from coldsnap.artifact.store import Store
from coldsnap.errors import AdmissionError, ArtifactError
from coldsnap.receipts import Receipt
from coldsnap.session import Session
from coldsnap.steps import (
    AdmitDeletion,
    CollectPacks,
    DeleteArtifact,
    OpenArtifact,
    PublishPacks,
    PushArtifact,
    VerifyArtifact,
)

__all__ = [
    "admit_deletion",
    "collect_packs",
    "delete",
    "open_artifact",
    "publish_packs",
    "push_artifact",
    "verify",
]


def open_artifact(session: Session, step: OpenArtifact) -> Receipt:
    """Open what was planned for; it may have been replaced since."""
    opened = Artifact.open(step.artifact)
    if opened.digest != step.digest:
        raise AdmissionError(
            f"{step.artifact} is not the artifact of the plan: expected {step.digest}, found {opened.digest}; "
            "resolve again"
        )
    session.artifact, session.report.artifact = opened, opened.path
    return Receipt(step=step.id, effective=opened.descriptor.capture_id)


def verify(session: Session, step: VerifyArtifact) -> Receipt:
    """Admit every file and pack, and prove coverage."""
    lanes = session.library
    found = verify_artifact(
        _opened(session), Store(step.store, lanes=lanes) if step.store else None, step.mode, lanes=lanes
    )
    files, packs = found.files.files, found.packs
    hashed = found.files.bytes_hashed + sum(pack.validation.bytes_hashed for pack in packs)
    unchanged = sum(file.reason == "unchanged" for file in files)
    return Receipt(
        step=step.id,
        requested=step.mode,
        effective=f"{len(files)} files and {len(packs)} packs are what was captured",
        reason=f"{unchanged} files unchanged by stat, {hashed / 1e6:,.1f} MB digested",
        bytes=hashed,
        details={"files": len(files), "packs": len(packs), "coverage": "; ".join(found.coverage)},
    )


# -- delete -----------------------------------------------------------------------------------------------------------


def admit_deletion(session: Session, step: AdmitDeletion) -> Receipt:
    """Refuse before anything is gone: a capture in flight, an owner of the packs that cannot be read."""
    opened = _opened(session)
    if user := user_of(opened.path):
        raise ArtifactError(f"{opened.path} is in use by {user}; wait for its end and delete again")
    if writing := next(captures_below(map(Path, step.roots)), None):
        raise ArtifactError(
            f"{unfinished(writing)}, which may name the packs of {opened.path}; wait for its end and delete "
            "again, or delete without a store"
        )
    _verdict(opened, None, step.roots)
    return Receipt(step=step.id, effective="no capture holds it")


def delete(session: Session, step: DeleteArtifact) -> Receipt:
    """Delete the directory, or tell."""
    opened = _opened(session)
    if not step.dry_run:
        remove_committed(opened.path)
        session.report.artifact = None
    word = "would delete" if step.dry_run else "deleted"
    return Receipt(
        step=step.id,
        effective=f"{word} {opened.path}",
        reason=f"{len(opened.descriptor.files)} files",
        bytes=_verdict(opened, None, ()).bytes,
        details={"dry_run": int(step.dry_run)},
    )


def collect_packs(session: Session, step: CollectPacks) -> Receipt:
    """Delete the packs that nothing names now, or tell; one that a capture came to use meanwhile stays."""
    opened, store = _opened(session), Store(step.store)
    # Whoever came after the look at captures in flight leaves a stamp, under the pack's lock, on what it found there.
    since_ns = session.report.timeline.origin_unix_ns - STAMP_ERROR_NS
    writing = next(captures_below(map(Path, step.roots)), None)
    found = _verdict(opened, store, step.roots)
    left, gone = dict(found.packs_left), []
    sizes = {pack.sha256: pack.bytes for pack in store.packs()}
    for sha256 in found.packs_deleted:
        if writing is not None:
            left[sha256] = unfinished(writing)
        elif sha256 not in sizes:
            left[sha256] = "not in this store"
        elif step.dry_run or store.delete(sha256, unless_used_since_ns=since_ns):
            gone.append(sha256)
        else:
            left[sha256] = "used since the deletion began"
    word = "would delete" if step.dry_run else "deleted"
    return Receipt(
        step=step.id,
        effective=f"{word} {len(gone)} of {len(opened.packs)} packs",
        reason="; ".join(f"{sha256} stays: {why}" for sha256, why in sorted(left.items())),
        bytes=sum(sizes[sha256] for sha256 in gone),
        details={"dry_run": int(step.dry_run), **dict.fromkeys(gone, word), **left},
    )


def _verdict(artifact: Artifact, store: Store | None, roots: Sequence[str]) -> Deleted:
    """Tell what a deletion would free. Roots may be reached through links: real paths tell the artifact from others."""
    real = evolve(artifact, path=Path(os.path.realpath(artifact.path)))
    return delete_artifact(real, store, [Path(os.path.realpath(root)) for root in roots], dry_run=True)


# -- publish ----------------------------------------------------------------------------------------------------------


def publish_packs(session: Session, step: PublishPacks) -> Receipt:
    """Send packs to the hub; one that it has is not sent again."""
    payloads = session.need(_opened(session).descriptor.weights.payloads, "an artifact with packs")
    hub = Hub(repository=step.repository, endpoint=step.endpoint or None)
    done = hub.publish(payloads.objects, Store(step.store), create=step.create)
    return Receipt(
        step=step.id,
        effective=f"{len(done.uploaded)} packs sent, {len(done.present)} were there",
        reason=f"revision {done.revision}",
        bytes=done.bytes,
        details={"repository": done.repository, "revision": done.revision},
    )


def push_artifact(session: Session, step: PushArtifact) -> Receipt:
    """Push everything but the packs."""
    opened = _opened(session)
    exact = push(opened, step.reference, insecure=step.insecure)
    size = sum(file.bytes for file in opened.descriptor.files)
    return Receipt(step=step.id, effective=exact, reason=f"artifact {opened.digest}", bytes=size)


def _opened(session: Session) -> Artifact:
    return session.need(session.artifact, "an artifact")
