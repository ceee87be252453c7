"""Target-local overlays: a second capture of a portable artifact that fits one target exactly.

The one rule: an overlay is a cache. One that does not fit is passed over with the reason in the receipt; one that is
damaged is an error (rules overlay.1 to overlay.5, ``docs/format/overlay.md``).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from attrs import field, frozen

from coldsnap.artifact import canonical, record
from coldsnap.artifact.canonical import hex_of
from coldsnap.artifact.capsule import UNIT
from coldsnap.artifact.committed import Artifact
from coldsnap.artifact.durable import FaultPoint, is_committed, remove_committed, unharmed, write_file_durably
from coldsnap.artifact.private import open_directory, read_small
from coldsnap.errors import ArtifactError, FormatError

__all__ = ["Overlay", "OverlayTarget", "Overlays", "Selection", "TargetAccelerator", "TargetHost"]

MAX_OVERLAY_BYTES = 1 << 20
_KEY_DIGITS = 24


@frozen(kw_only=True, order=True)
class TargetAccelerator:
    """Accelerators of one kind."""

    gpu_name: str
    compute_capability: str
    capacity_class_bytes: int
    count: int = field(validator=record.at_least(1))


@frozen(kw_only=True)
class TargetHost:
    """The machine of one unit.

    Attributes:
        unit: Name.
        host: What identifies the machine to its manager; compared, never interpreted.
        nvidia_driver: Exact version; None without a GPU.
        accelerators: Sorted.
    """

    unit: str = field(validator=UNIT)
    host: str
    nvidia_driver: str | None = None
    accelerators: tuple[TargetAccelerator, ...] = ()

    def __attrs_post_init__(self) -> None:
        """Check json.11."""
        if list(self.accelerators) != sorted(self.accelerators):
            raise record.Broken("json.11", "accelerators must be sorted")


@frozen(kw_only=True)
class OverlayTarget:
    """Exactly where an overlay fits."""

    format: Literal[1] = 1
    kind: Literal["coldsnap-overlay-target"] = "coldsnap-overlay-target"
    snapshot_driver: Literal["n580", "n610"]
    units: tuple[TargetHost, ...] = field(validator=record.one_of_each(lambda unit: unit.unit, "unit"))

    @property
    def key(self) -> str:
        """The name of the directory of overlays for this target."""
        return hex_of(canonical.digest(record.write(self)))[:_KEY_DIGITS]


@frozen(kw_only=True)
class Overlay:
    """``overlay.json``: what an overlay is bound to."""

    format: Literal[1] = 1
    kind: Literal["coldsnap-local-residual-overlay"] = "coldsnap-local-residual-overlay"
    target: OverlayTarget
    target_key: str = field(validator=record.matching(r"[0-9a-f]{24}", "24 hex digits"))
    portable_sha256: str = field(validator=record.sha256)
    overlay_sha256: str = field(validator=record.sha256)
    packs_retained: Literal[True] = True
    changed: tuple[str, ...]
    created_unix_ns: int = field(validator=record.at_least(1))

    def __attrs_post_init__(self) -> None:
        """Check overlay.5."""
        if self.target_key != self.target.key:
            raise record.Broken("overlay.5", "the target key is not made of the target")


@frozen(kw_only=True)
class Selection:
    """What a restore uses.

    Attributes:
        artifact: The overlay's, or the portable one.
        overlay: Whether it is the overlay's.
        reason: ``matched``, ``missing``, or ``stale: …``.
    """

    artifact: Artifact
    overlay: bool
    reason: str


class Overlays:
    """The overlays of one machine.

    Args:
        root: Their directory; made private when first written to.
        at: Fault point.
    """

    def __init__(self, root: Path, *, at: FaultPoint = unharmed) -> None:
        self.root = root
        self._at = at

    def directory(self, portable: Artifact, target: OverlayTarget) -> Path:
        """Return where the overlay of an artifact for a target is, or would be."""
        return self.root / hex_of(portable.digest) / target.key

    def select(self, portable: Artifact, target: OverlayTarget) -> Selection:
        """Choose the overlay for a target if there is one that fits, else the portable artifact.

        Args:
            portable: The artifact to restore.
            target: Where.

        Raises:
            ArtifactError: The overlay is damaged; remove it, or restore without overlays.
        """
        directory = self.directory(portable, target)
        if not (directory / "overlay.json").exists() or not is_committed(directory / "artifact"):
            return Selection(artifact=portable, overlay=False, reason="missing")
        binding = _read(directory)
        local = Artifact.open(directory / "artifact")
        stale = _stale(binding, portable, local, target)
        if stale:
            return Selection(artifact=portable, overlay=False, reason=f"stale: {stale}")
        return Selection(artifact=local, overlay=True, reason="matched")

    def add(self, portable: Artifact, target: OverlayTarget, capture: Callable[[Path], Artifact]) -> Overlay | None:
        """Capture an overlay and bind it, or discard it when it changes nothing.

        Args:
            portable: The artifact it accelerates.
            target: Where it was captured.
            capture: Makes the artifact at the given path.

        Returns:
            The binding; None when the capture turned out identical.

        Raises:
            ArtifactError: Its packs are not the portable artifact's; it was removed.
        """
        directory = self.directory(portable, target)
        self.remove(portable, target)
        for path in (self.root, directory.parent, directory):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        local = capture(directory / "artifact")
        changed = _changed(portable, local)
        if not changed:
            self.remove(portable, target)
            return None
        if _packs(portable) != _packs(local):
            self.remove(portable, target)
            raise ArtifactError(
                "the capture's packs are not those of the portable artifact (rule overlay.3); discarded"
            )
        binding = Overlay(
            target=target,
            target_key=target.key,
            portable_sha256=portable.digest,
            overlay_sha256=local.digest,
            changed=changed,
            created_unix_ns=time.time_ns(),
        )
        write_file_durably(directory / "overlay.json", canonical.encode(record.write(binding)), at=self._at)
        return binding

    def remove(self, portable: Artifact, target: OverlayTarget) -> bool:
        """Remove the overlay of an artifact for a target; tell whether there was anything."""
        directory = self.directory(portable, target)
        if not directory.is_dir():
            return False
        (directory / "overlay.json").unlink(missing_ok=True)
        if is_committed(directory / "artifact"):
            remove_committed(directory / "artifact", at=self._at)
        shutil.rmtree(directory)
        return True


def _read(directory: Path) -> Overlay:
    os.close(open_directory(directory))
    path = directory / "overlay.json"
    data = read_small(path, max_bytes=MAX_OVERLAY_BYTES)
    value = canonical.decode(data, path=str(path), max_bytes=MAX_OVERLAY_BYTES)
    binding = record.read(Overlay, value, path=str(path))
    if binding.target_key != directory.name:
        raise FormatError("the overlay lies in the directory of another target", path=str(path), rule="overlay.5")
    return binding


def _stale(binding: Overlay, portable: Artifact, local: Artifact, target: OverlayTarget) -> str:
    if binding.target != target:
        return "target"
    if binding.portable_sha256 != portable.digest:
        return "portable_sha256"
    if binding.overlay_sha256 != local.digest:
        return "overlay_sha256"
    return "packs" if _packs(portable) != _packs(local) else ""


def _packs(artifact: Artifact) -> frozenset[tuple[str, str, int, str]]:
    payloads = artifact.descriptor.weights.payloads
    objects = payloads.objects if payloads is not None else ()
    return frozenset((item.worker, item.role, item.bytes, item.sha256) for item in objects)


def _changed(portable: Artifact, local: Artifact) -> tuple[str, ...]:
    """Return the kinds of files whose contents differ. Manifests name their capture, so that they always do."""
    mine, theirs = (
        {(kind, sha256) for kind, sha256, _ in artifact.contents() if kind not in {"packs", "manifests"}}
        for artifact in (portable, local)
    )
    return tuple(sorted({kind for kind, _ in mine ^ theirs}))
