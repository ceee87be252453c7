"""What is reachable, what is garbage, and what an operation on whole artifacts does: verify, delete, collect.

The one rule: a pack goes only when every artifact that could name it was read and none does (rule store.5,
``docs/format/store.md``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from attrs import frozen

from coldsnap.artifact.admission import Admission
from coldsnap.artifact.committed import Artifact
from coldsnap.artifact.durable import COMMITTED, is_uncommitted, remove_committed, remove_partials
from coldsnap.artifact.evidence import TreeAdmission, Verify
from coldsnap.artifact.held import is_held, is_kept, kept_for
from coldsnap.artifact.lanes import Lanes
from coldsnap.artifact.manifest import NativeManifest, read_document
from coldsnap.artifact.store import Store, StoredPack, sizes_of
from coldsnap.errors import ArtifactError

__all__ = [
    "Collected",
    "Deleted",
    "Verified",
    "artifacts_below",
    "captures_below",
    "collect",
    "delete_artifact",
    "unfinished",
    "verify_artifact",
]

DEFAULT_GRACE_S = 24 * 3600.0
# The kernel stamps files with a clock that ticks every 1 to 10 ms, so a stamp may be older than the call that made it.
STAMP_ERROR_NS = 100_000_000


@frozen(kw_only=True)
class Verified:
    """The receipt of :func:`verify_artifact`.

    Attributes:
        files: Every file of the artifact.
        packs: Every pack, once for each worker.
        coverage: The receipt of the coverage proof of each worker, in words.
        seconds: s.
    """

    files: TreeAdmission
    packs: tuple[Admission, ...]
    coverage: tuple[str, ...]
    seconds: float


@frozen(kw_only=True)
class Deleted:
    """The receipt of :func:`delete_artifact`.

    Attributes:
        artifact: Its identity.
        bytes: Freed.
        packs_left: Packs it named that stay in the store, with the reason.
        packs_deleted: Packs that no other artifact names.
    """

    artifact: str
    bytes: int
    packs_left: tuple[tuple[str, str], ...]
    packs_deleted: tuple[str, ...]


@frozen(kw_only=True)
class Collected:
    """The receipt of :func:`collect`.

    Attributes:
        removed: Packs without an owner.
        kept: Packs that stay, with the reason: ``named by …`` or ``recent``.
        partials: Stale partial names and abandoned downloads.
        bytes: Freed, or to be freed.
        dry_run: Nothing was touched.
    """

    removed: tuple[StoredPack, ...]
    kept: tuple[tuple[str, str], ...]
    partials: tuple[Path, ...]
    bytes: int
    dry_run: bool


def verify_artifact(
    artifact: Artifact, store: Store | None, verify: Verify = "evidence", *, lanes: Lanes | None = None
) -> Verified:
    """Admit every file of an artifact and every pack it names, and prove coverage again.

    Args:
        artifact: What to verify.
        store: Where its packs are; None: it names none.
        verify: ``evidence`` or ``full``.
        lanes: Who hashes several files at once on each core; None: nobody. The packs have those of the store.

    Raises:
        ArtifactError: Something is missing, wrong, or not private.
    """
    begin = time.perf_counter()
    files = artifact.verify(verify, lanes=lanes)
    manifests = {
        worker.worker: read_document(
            NativeManifest, artifact.path / worker.native_manifest.path, sha256=worker.native_manifest.sha256
        )
        for worker in artifact.descriptor.weights.workers
    }
    payloads = artifact.descriptor.weights.payloads
    objects = payloads.objects if payloads else ()
    if objects and store is None:
        raise ArtifactError(f"{artifact.path} needs packs; say in which store they are")
    packs = [store.admit(item, verify, index=manifests[item.worker].index) for item in objects] if store else []
    return Verified(
        files=files,
        packs=tuple(packs),
        coverage=tuple(f"worker {worker}: {manifest.prove()}" for worker, manifest in manifests.items()),
        seconds=time.perf_counter() - begin,
    )


def artifacts_below(roots: Iterable[Path]) -> Iterator[Artifact]:
    """Open every committed artifact at or below the roots.

    Raises:
        ArtifactError: One of them cannot be read; a root does not exist.
    """
    for root in map(Path, roots):
        if not root.is_dir():
            raise ArtifactError(f"{root} is not a directory; name the places that hold artifacts")
        for directory, names, _ in os.walk(root, onerror=_refuse):
            if os.path.exists(os.path.join(directory, COMMITTED)):
                names.clear()  # artifacts are not nested
                yield Artifact.open(directory)


def _refuse(error: OSError) -> None:
    raise ArtifactError(f"{error.filename} cannot be read ({error.strerror}); nothing was removed") from error


def _owners(roots: Iterable[Path]) -> dict[str, Path]:
    return {sha256: artifact.path for artifact in artifacts_below(roots) for sha256 in artifact.packs}


def collect(
    store: Store, roots: Iterable[Path], *, grace_s: float = DEFAULT_GRACE_S, dry_run: bool = False
) -> Collected:
    """Remove packs that no artifact names, and what killed processes left.

    Args:
        store: The store.
        roots: Directories that hold all artifacts and overlays of this store.
        grace_s: Packs published less than this many seconds ago stay.
        dry_run: Only tell.

    Raises:
        ArtifactError: A root or an artifact cannot be read, or a capture is writing one; nothing was removed.
    """
    roots = list(roots)
    if not roots:
        raise ArtifactError("no root was named, so that every pack would be garbage; name the places of the artifacts")
    _require_no_capture(roots)
    owners = _owners(roots)
    youngest_ns = time.time_ns() - int(grace_s * 1e9)
    removed, kept = [], []
    for pack in store.packs():
        if pack.sha256 in owners:
            kept.append((pack.sha256, f"named by {owners[pack.sha256]}"))
        elif pack.used_ns > youngest_ns or not (dry_run or store.delete(pack.sha256, unless_used_since_ns=youngest_ns)):
            kept.append((pack.sha256, "recent"))
        else:
            removed.append(pack)
    sizes = {path: sum(sizes_of(path)) for path in store.directory.glob(".*")}
    stale = [*remove_partials(store.directory, dry_run=dry_run), *store.drop_staging(youngest_ns, dry_run=dry_run)]
    freed = sum(pack.bytes for pack in removed) + sum(sizes.get(path, 0) for path in stale)
    return Collected(removed=tuple(removed), kept=tuple(kept), partials=tuple(stale), bytes=freed, dry_run=dry_run)


def captures_below(roots: Iterable[Path]) -> Iterator[Path]:
    """Yield the directories that captures are writing now, or that are kept for an engine whose capture failed."""
    for root in roots:
        for directory, names, _ in os.walk(root):
            path = Path(directory)
            if is_uncommitted(path):
                names.clear()
                if is_held(path) or is_kept(path):
                    yield path


def unfinished(path: Path) -> str:
    """Say what is the matter with one of :func:`captures_below`."""
    if is_held(path):
        return f"a capture is writing {path}"
    return f"the engine in {kept_for(path)}, whose memory is not back, needs {path}"


def _require_no_capture(roots: Iterable[Path]) -> None:
    """Refuse while an artifact is being written: it may name packs that nobody else does, and cannot be read yet."""
    if writing := next(captures_below(roots), None):
        raise ArtifactError(f"{unfinished(writing)}, which may name packs of the store; wait for its end")


def delete_artifact(
    artifact: Artifact, store: Store | None = None, roots: Collection[Path] = (), *, dry_run: bool = False
) -> Deleted:
    """Delete an artifact, and the packs that no other artifact names.

    Args:
        artifact: What to delete.
        store: Its packs are deleted too when no artifact below ``roots`` names them; None: they stay.
        roots: Directories that hold all artifacts of the store.
        dry_run: Only tell.

    Raises:
        ArtifactError: A root or another artifact cannot be read, or a capture is writing one; nothing was deleted.
    """
    mine = artifact.packs
    others = [other for other in artifacts_below(roots) if other.path != artifact.path]
    owners = {sha256: other.path for other in others for sha256 in other.packs}
    searched = store is not None and bool(roots)
    unsearched = "no store was given" if store is None else "no root was given to look for other owners"
    left = {sha256: f"named by {owners[sha256]}" for sha256 in mine & owners.keys()}
    left |= {} if searched else dict.fromkeys(mine - owners.keys(), unsearched)
    gone = sorted(mine - left.keys())
    freed = sum(size for kind, size in artifact.size_bytes.items() if kind != "packs")
    # Whoever finds a pack in the store from here on stamps it, under the pack's lock.
    began_ns = time.time_ns() - STAMP_ERROR_NS
    if not dry_run:
        if store is not None:
            _require_no_capture(roots)
        remove_committed(artifact.path)
    if store is not None:
        present = {pack.sha256: pack.bytes for pack in store.packs()}
        for sha256 in list(gone):
            went = present.get(sha256, 0) if dry_run else store.delete(sha256, unless_used_since_ns=began_ns)
            freed += went
            if not went and sha256 in present:
                gone.remove(sha256)
                left[sha256] = "used since the deletion began"
    return Deleted(
        artifact=artifact.digest, bytes=freed, packs_left=tuple(sorted(left.items())), packs_deleted=tuple(gone)
    )
