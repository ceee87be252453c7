"""The weights section of a descriptor: in the image, or in shared packs with residuals here.

The one rule: a pack is named by its digest and by nothing else, so that captures, drivers and workers share it
whenever, and only when, the bytes are the same.
"""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen

from coldsnap.artifact import canonical, record
from coldsnap.artifact.capsule import WORKER, FileRecord

__all__ = ["COMMIT", "REVISION", "ModelPayloads", "PayloadObject", "Recovery", "Weights", "WorkerWeights"]

REVISION = record.matching(r"[0-9a-f]{40}|sha256:[0-9a-f]{64}", "a 40-hex commit or a sha256 digest")
COMMIT = record.matching(r"[0-9a-f]{40}", "a 40-hex commit")
PACK_PATH = record.matching(r"model-payloads/sha256/[0-9a-f]{64}\.pack", "model-payloads/sha256/<hex>.pack")


@frozen(kw_only=True)
class PayloadObject:
    """One worker's share of the model, in the store.

    Attributes:
        worker: Owner; several owners may name one object.
        path: ``model-payloads/sha256/<hex>.pack``.
        bytes: Size.
        sha256: Digest of the file, the same as in ``path``.
    """

    worker: str = field(validator=WORKER)
    role: Literal["model-weight-payload"] = "model-weight-payload"
    path: str = field(validator=PACK_PATH)
    bytes: int = field(validator=record.at_least(1))
    sha256: str = field(validator=record.sha256)

    def __attrs_post_init__(self) -> None:
        """Check descriptor.7: the path is made of the digest."""
        if self.path != f"model-payloads/sha256/{canonical.hex_of(self.sha256)}.pack":
            raise record.Broken("descriptor.7", f"the path {self.path!r} is not made of the digest {self.sha256}")


@frozen(kw_only=True)
class ModelPayloads:
    """Where the packs of all workers can be had.

    Attributes:
        repository: Hub repository, when published.
        revision: Its commit, when published.
        objects: Exactly one for each worker.
    """

    repository: str | None = None
    revision: str | None = field(default=None, validator=record.optional(COMMIT))
    objects: tuple[PayloadObject, ...] = field(validator=record.one_of_each(lambda item: item.worker, "worker"))

    def __attrs_post_init__(self) -> None:
        """Check descriptor.7: two owners of one object agree about it."""
        sizes = {item.path: item.bytes for item in self.objects}
        for item in self.objects:
            if sizes[item.path] != item.bytes:
                raise record.Broken("descriptor.7", f"two workers disagree about the size of {item.path}")


@frozen(kw_only=True)
class WorkerWeights:
    """The files of one worker that a hydration needs besides the pack."""

    worker: str = field(validator=WORKER)
    residual: FileRecord
    native_manifest: FileRecord
    recovery_manifest: FileRecord | None = None
    hibernate_state: FileRecord | None = None
    bootstrap_index: FileRecord | None = None

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """Every file that is there."""
        every = (
            self.residual,
            self.native_manifest,
            self.recovery_manifest,
            self.hibernate_state,
            self.bootstrap_index,
        )
        return tuple(file for file in every if file is not None)


@frozen(kw_only=True)
class Recovery:
    """Where model bytes come from when there is no pack."""

    source: Literal["huggingface-safetensors"] = "huggingface-safetensors"
    model_id: str
    revision: str = field(validator=REVISION)


@frozen(kw_only=True)
class Weights:
    """Where the weights are.

    Attributes:
        kind: ``image``: inside the process image; ``packs``: in model payloads, with residuals here; ``checkpoint``:
            nowhere but in the model's own files, whose identity is the engine's model.
        payloads: The packs, for kind packs.
        workers: The files of each worker, for kind packs.
        recovery: The checkpoint, when recovery is possible.
        start_files: The archive of what an engine needs to start without its checkpoint (``docs/format/tree.md``).
    """

    kind: Literal["image", "packs", "checkpoint"] = "image"
    payloads: ModelPayloads | None = None
    workers: tuple[WorkerWeights, ...] = field(
        default=(), validator=record.one_of_each(lambda item: item.worker, "worker")
    )
    recovery: Recovery | None = None
    start_files: FileRecord | None = None

    @property
    def starts(self) -> bool:
        """Tell whether an engine can be started anew from the packs, without the checkpoint."""
        indexed = all(worker.bootstrap_index is not None for worker in self.workers)
        return self.payloads is not None and self.start_files is not None and indexed

    def __attrs_post_init__(self) -> None:
        """Check descriptor.8: packs come with residuals, images with neither."""
        owners = tuple(item.worker for item in self.payloads.objects) if self.payloads else ()
        if self.kind != "packs" and (owners or self.workers or self.recovery or self.start_files):
            raise record.Broken("descriptor.8", f"weights in the {self.kind} have neither payloads nor residuals")
        if self.kind == "packs" and (not self.workers or (self.payloads is None and self.recovery is None)):
            raise record.Broken("descriptor.8", "weights outside the image need residuals, and payloads or recovery")
        if owners and sorted(owners) != sorted(item.worker for item in self.workers):
            raise record.Broken("descriptor.8", "payloads and residuals must name the same workers")
