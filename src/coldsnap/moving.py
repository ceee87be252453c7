"""The steps that move weights out of an engine and back, and those that let one sleep. Plain fields, like every step.

The one rule: nothing here names a byte; which bytes go where is said by the workers, and by the manifests that they
write.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from attrs import frozen

from coldsnap.phases import BaseStep, Phase

__all__ = [
    "AdmitPacks",
    "AdmitWarm",
    "FillingStep",
    "HydrateWeights",
    "InspectEngine",
    "LeaveWarm",
    "MaterializeEngine",
    "MaterializePacks",
    "MovingStep",
    "PrefetchWeights",
    "ReadAhead",
    "ReadingStep",
    "ReleaseWeights",
    "SleepEngine",
    "TakeWarm",
    "VerifyPacks",
    "WakeEngine",
    "WritingStep",
]

CaptureBackend = Literal["auto", "python", "buffered", "direct"]
Mode = Literal["direct", "buffered"]
HydrationBackend = Literal["auto", "python", "buffered", "direct", "gds"]
LoaderBackend = Literal["", "auto", "direct", "buffered", "mmap", "torch"]


@frozen(kw_only=True)
class WritingStep(BaseStep):
    """What every step says that lets memory leave.

    Attributes:
        store: The root of the store, which gets the packs.
        discard: Regions whose contents go nowhere.
        backend: How bytes leave memory.
        write_mode: Whether residuals go through the page cache, where the backend leaves it open.
        reuse_blob: Whether a pack that is there is looked for before one is written.
        queue_depth: Requests in flight.
        chunk_bytes: Size of a request.
        native_library: The I/O library, empty for the packaged one.
        native_sha256: Its digest, empty when any will do.
        timeout_s: Deadline, s.
    """

    store: str
    discard: tuple[str, ...]
    backend: CaptureBackend
    write_mode: Mode
    reuse_blob: bool
    queue_depth: int
    chunk_bytes: int
    native_library: str
    native_sha256: str
    timeout_s: float


@frozen(kw_only=True)
class ReadingStep(BaseStep):
    """What every step says that brings memory back.

    Attributes:
        backend: How bytes reach memory.
        read_mode: Whether residuals come through the page cache, where the backend leaves it open.
        verify_mode: inline (compared on their way) or preverified.
        queue_depth: Requests in flight.
        chunk_bytes: Size of a request.
        timeout_s: Deadline, s.
    """

    backend: HydrationBackend
    read_mode: Mode
    verify_mode: Literal["inline", "preverified"]
    queue_depth: int
    chunk_bytes: int
    timeout_s: float


@frozen(kw_only=True)
class ReleaseWeights(WritingStep):
    """Have every worker write its weights outside the image, durable, and give their memory away.

    Attributes:
        output: The artifact's directory, which gets residuals and manifests.
        recovery: Whether what a recovery from the checkpoint needs is kept, too: off, auto (where it can be), required.
        derived_buffer_max_bytes: How much of parameters and buffers may be no copy of the checkpoint.
        verify_model_bytes: How much of both ends of each is sampled, to be compared after a recovery.
    """

    phase: ClassVar[Phase] = "QUIESCE"
    output: str
    recovery: Literal["off", "auto", "required"]
    derived_buffer_max_bytes: int
    verify_model_bytes: int


@frozen(kw_only=True)
class AdmitPacks(BaseStep):
    """Check that the store has every pack that the artifact names, whole and private, before anything starts.

    Attributes:
        store: The root of the store.
        packs: Their digests.
        evidence: Whether each must have been verified before, because nothing compares the bytes on their way.
        provider: native: all of them, or nothing. either: where one is absent, the checkpoint, file by file as it was.
            recovery: the checkpoint, and no pack is looked at.
        repository: With either: where an absent pack is to be fetched from, before anybody recovers.
        published: With either: whether the repository that the artifact names counts, too; a plan that knows the
            artifact names it itself.
    """

    phase: ClassVar[Phase] = "ADMIT"
    store: str
    packs: tuple[str, ...]
    evidence: bool
    provider: Literal["native", "either", "recovery"] = "native"
    repository: str = ""
    published: bool = False


@frozen(kw_only=True)
class PrefetchWeights(BaseStep):
    """Begin to read packs and residuals into the page cache, while processes come back; never more than memory allows.

    Attributes:
        store: The root of the store.
        checkpoint: Whether the checkpoint is read ahead where the weights come from there.
    """

    phase: ClassVar[Phase] = "STAGE"
    store: str
    checkpoint: bool = False


@frozen(kw_only=True)
class VerifyPacks(BaseStep):
    """Compare every pack that is used with its evidence: by stat when unchanged, by digest otherwise.

    Attributes:
        store: The root of the store.
        mode: evidence, or full (digest all).
    """

    phase: ClassVar[Phase] = "STAGE"
    store: str
    mode: Literal["evidence", "full"]


@frozen(kw_only=True)
class FillingStep(ReadingStep):
    """What every step says that brings a model's weights out of a store or its checkpoint.

    Attributes:
        store: The root of the store with the packs; empty: from the files that the capture has just written.
        native_library: The I/O library, empty for the packaged one.
        native_sha256: Its digest, empty when any will do.
        loader_backend: How a checkpoint is read; empty when weights come from packs alone.
        loader_chunk_bytes: Size of a request to it.
        loader_queue_depth: Requests in flight.
        staging_bytes: Largest slab of what cannot go straight to its address.
        verify_bytes: How much of both ends of each tensor is compared with the file.
        verify_model_bytes: How much of both ends of each parameter is compared with what the capture sampled.
    """

    store: str
    native_library: str
    native_sha256: str
    loader_backend: LoaderBackend = ""
    loader_chunk_bytes: int = 0
    loader_queue_depth: int = 0
    staging_bytes: int = 0
    verify_bytes: int = 0
    verify_model_bytes: int = 0


@frozen(kw_only=True)
class HydrateWeights(FillingStep):
    """Have every worker map its memory again at the same addresses and fill it: pack, residual, KV cache zeroed."""

    phase: ClassVar[Phase] = "HYDRATE"


@frozen(kw_only=True)
class SleepEngine(WritingStep):
    """Close the door, write weights to files, and give the memory away; an engine that sleeps already sleeps on.

    Attributes:
        run_dir: The engine's run directory, which gets the residuals.
        quiesce_timeout_s: How long requests in flight may take to end, s.
    """

    phase: ClassVar[Phase] = "QUIESCE"
    run_dir: str
    quiesce_timeout_s: float


@frozen(kw_only=True)
class WakeEngine(ReadingStep):
    """Bring memory back, and open the door once all of it is there; an engine that is awake stays so.

    Attributes:
        run_dir: The engine's run directory.
        tags: The regions that come back.
    """

    phase: ClassVar[Phase] = "HYDRATE"
    run_dir: str
    tags: tuple[str, ...]


@frozen(kw_only=True)
class InspectEngine(BaseStep):
    """Ask keeper and ranks how the engine is."""

    phase: ClassVar[Phase] = "ADMIT"
    run_dir: str
    timeout_s: float


@frozen(kw_only=True)
class MaterializePacks(BaseStep):
    """Have every worker write its pack out of its memory, unless the store has it.

    Attributes:
        store: The root of the store.
        wait: Whether the restore waits for the packs; else it only has them begun.
        native_library: The I/O library, empty for the packaged one.
        native_sha256: Its digest, empty when any will do.
        timeout_s: Deadline, s.
    """

    phase: ClassVar[Phase] = "SETTLE"
    store: str
    wait: bool
    native_library: str
    native_sha256: str
    timeout_s: float


@frozen(kw_only=True)
class MaterializeEngine(MaterializePacks):
    """Have the workers of a restored engine write their packs, while it serves on.

    Attributes:
        run_dir: The engine's run directory.
        artifact: What it was restored from.
    """

    run_dir: str
    artifact: str


@frozen(kw_only=True)
class ReadAhead(BaseStep):
    """Read images, packs and residuals into the page cache, to their end; never more than memory allows.

    Attributes:
        store: The root of the store, empty when the artifact has no packs, or they are read around the page cache.
        residuals: Whether residuals are read through the page cache.
    """

    phase: ClassVar[Phase] = "STAGE"
    store: str
    residuals: bool


@frozen(kw_only=True)
class LeaveWarm(BaseStep):
    """Give the engine to the caller without its weights: its door stays closed until a restore brings them."""

    phase: ClassVar[Phase] = "SETTLE"


@frozen(kw_only=True)
class AdmitWarm(BaseStep):
    """Find a warm engine, and open the artifact that it came from.

    Attributes:
        run_dir: The engine's run directory.
        artifact: The artifact's directory.
        mode: ``weights.mode``: how the weights are to come, which must be one that the artifact knows.
        materialize: ``weights.native.materialize``.
    """

    phase: ClassVar[Phase] = "ADMIT"
    run_dir: str
    artifact: str
    mode: str
    materialize: str


@frozen(kw_only=True)
class TakeWarm(BaseStep):
    """Take the warm engine: from here on it runs in the end, or is no more."""

    phase: ClassVar[Phase] = "RECONNECT"
    timeout_s: float


MovingStep = (
    ReleaseWeights
    | AdmitPacks
    | PrefetchWeights
    | VerifyPacks
    | HydrateWeights
    | SleepEngine
    | WakeEngine
    | InspectEngine
    | MaterializePacks
    | MaterializeEngine
    | ReadAhead
    | LeaveWarm
    | AdmitWarm
    | TakeWarm
)
