"""The steps a plan is made of: small frozen classes with imperative names, and nothing else.

Every field is a plain value, so that a step prints, compares, serialises and takes part in the plan's digest. What a
step *does* is in the package that its name belongs to; ``execute`` has one branch for each class.
"""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

from attrs import frozen

from coldsnap.freezing import (
    CheckpointCuda,
    CollectCaches,
    DumpTree,
    FreezingStep,
    LockCuda,
    PlantCaches,
    RestoreCuda,
    ShrinkPages,
    StageCapsule,
    ThawTree,
    UnlockCuda,
)
from coldsnap.moving import (
    AdmitPacks,
    AdmitWarm,
    HydrateWeights,
    InspectEngine,
    LeaveWarm,
    MaterializeEngine,
    MaterializePacks,
    MovingStep,
    PrefetchWeights,
    ReadAhead,
    ReleaseWeights,
    SleepEngine,
    TakeWarm,
    VerifyPacks,
    WakeEngine,
)
from coldsnap.phases import BaseStep, Phase
from coldsnap.shelving import (
    AdmitDeletion,
    CollectPacks,
    DeleteArtifact,
    FetchPacks,
    OpenArtifact,
    PublishPacks,
    PushArtifact,
    RepackCheckpoint,
    ShelvingStep,
    VerifyArtifact,
)
from coldsnap.templating import (
    DumpTemplate,
    OrderExport,
    OrderHydration,
    ProveTemplate,
    ReportLoad,
    StageRuntime,
    StageStartFiles,
    StartEngine,
    TemplatingStep,
    VerifyCheckpoint,
)

__all__ = [
    "AdmitArtifact",
    "AdmitDeletion",
    "AdmitEngine",
    "AdmitHost",
    "AdmitOutput",
    "AdmitPacks",
    "AdmitPlacement",
    "AdmitWarm",
    "AttachEngine",
    "AwaitReady",
    "CheckpointCuda",
    "CollectCaches",
    "CollectPacks",
    "CommitArtifact",
    "CompareAnswer",
    "DeleteArtifact",
    "DumpTemplate",
    "DumpTree",
    "FetchPacks",
    "HandOver",
    "HydrateWeights",
    "InspectEngine",
    "LaunchEngine",
    "LaunchTemplate",
    "LeaveWarm",
    "LockCuda",
    "MaterializeEngine",
    "MaterializePacks",
    "OpenArtifact",
    "OrderExport",
    "OrderHydration",
    "Phase",
    "PlantCaches",
    "PrefetchWeights",
    "ProveTemplate",
    "PublishPacks",
    "PushArtifact",
    "Quiesce",
    "ReadAhead",
    "Reconnect",
    "RecordAnswer",
    "ReleaseWeights",
    "RepackCheckpoint",
    "ReportLoad",
    "RestoreCuda",
    "ResumeEngine",
    "SealArtifact",
    "SettleWorkload",
    "ShrinkPages",
    "SleepEngine",
    "StageCapsule",
    "StageRuntime",
    "StageStartFiles",
    "StartEngine",
    "StartKeeper",
    "Step",
    "StopEngine",
    "TakeWarm",
    "ThawTree",
    "UnlockCuda",
    "VerifyArtifact",
    "VerifyCheckpoint",
    "VerifyFiles",
    "VerifyPacks",
    "WakeEngine",
]


@frozen(kw_only=True)
class AdmitHost(BaseStep):
    """Check that the host is still the one whose facts were resolved, and that CRIU may run."""

    phase: ClassVar[Phase] = "ADMIT"
    host: str
    boot_id: str
    criu: str
    criu_digest: str
    namespace: Literal["private", "host"]


@frozen(kw_only=True)
class AdmitOutput(BaseStep):
    """Check that nothing is at the output and that it can be written."""

    phase: ClassVar[Phase] = "ADMIT"
    output: str


@frozen(kw_only=True)
class AdmitEngine(BaseStep):
    """Check the engine's environment: the interpreter, the engine, and the same coldsnap in it; and the model."""

    phase: ClassVar[Phase] = "ADMIT"
    kind: str
    python: str
    model: str
    revision: str


@frozen(kw_only=True)
class AdmitPlacement(BaseStep):
    """Check that the port is free and the run directory is not in use."""

    phase: ClassVar[Phase] = "ADMIT"
    address: str
    port: int


@frozen(kw_only=True)
class AdmitArtifact(BaseStep):
    """Check format, identity and compatibility of the artifact, all mismatches at once."""

    phase: ClassVar[Phase] = "ADMIT"
    artifact: str
    digest: str
    kernel: str
    enforce_captured_driver_floor: bool


@frozen(kw_only=True)
class LaunchEngine(BaseStep):
    """Start a keeper, and the engine under it.

    Attributes:
        kind: The engine's kind.
        argv: Its command.
        environment: What it gets beyond the allow-listed names of the caller's environment.
        cwd: Its working directory.
        namespace: private or host.
        name: The run directory's name, empty when made up.
        run_dir: The run directory itself, empty when below the run root.
        spec: The engine as the user described it, as JSON text; kept beside the running engine.
    """

    phase: ClassVar[Phase] = "LAUNCH"
    kind: str
    argv: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    cwd: str
    namespace: Literal["private", "host"]
    name: str
    run_dir: str
    address: str
    port: int
    spec: str


@frozen(kw_only=True)
class LaunchTemplate(LaunchEngine):
    """Start a keeper, and under it a process that has the engine's command and stops before it.

    Attributes:
        stop: Where it stops: pre_exec (before the engine's interpreter begins) or imported (modules are loaded).
    """

    stop: Literal["pre_exec", "imported"]


@frozen(kw_only=True)
class AttachEngine(BaseStep):
    """Take up the keeper of an engine that serves already."""

    phase: ClassVar[Phase] = "LAUNCH"
    run_dir: str


@frozen(kw_only=True)
class AwaitReady(BaseStep):
    """Wait until the port is open and the engine says it is healthy; end at once when it dies."""

    phase: ClassVar[Phase] = "ACCEPT"
    timeout_s: float


@frozen(kw_only=True)
class RecordAnswer(BaseStep):
    """Empty the prefix cache, ask, and record token ids and text; ask twice: an answer that varies proves nothing.

    Attributes:
        prompt: What is asked.
        tokens: How many tokens of the answer are recorded.
        timeout_s: How long requests in flight, which hold parts of the cache, may take to end, s.
    """

    phase: ClassVar[Phase] = "ACCEPT"
    prompt: str
    tokens: int
    timeout_s: float


@frozen(kw_only=True)
class Quiesce(BaseStep):
    """Let requests in flight end and start no new ones."""

    phase: ClassVar[Phase] = "QUIESCE"
    timeout_s: float


@frozen(kw_only=True)
class ResumeEngine(BaseStep):
    """Let a workload that is kept take work again, while its artifact is still being sealed."""

    phase: ClassVar[Phase] = "DUMP"


@frozen(kw_only=True)
class SealArtifact(BaseStep):
    """Digest every file and write descriptor and evidence."""

    phase: ClassVar[Phase] = "SEAL"
    output: str
    weights: str
    image_compression: str


@frozen(kw_only=True)
class CommitArtifact(BaseStep):
    """Make the artifact exist: one rename."""

    phase: ClassVar[Phase] = "PUBLISH"
    output: str


@frozen(kw_only=True)
class SettleWorkload(BaseStep):
    """Stop the captured workload, or let it serve on."""

    phase: ClassVar[Phase] = "SETTLE"
    then: Literal["stop", "keep"]


@frozen(kw_only=True)
class StartKeeper(BaseStep):
    """Start the keeper that will own the restored tree."""

    phase: ClassVar[Phase] = "THAW"
    namespace: Literal["private", "host"]
    name: str
    run_dir: str


@frozen(kw_only=True)
class VerifyFiles(BaseStep):
    """Compare every file of the artifact with its evidence: by stat when unchanged, by digest otherwise."""

    phase: ClassVar[Phase] = "STAGE"
    artifact: str
    mode: Literal["evidence", "full"]


@frozen(kw_only=True)
class Reconnect(BaseStep):
    """Have every rank read its new directive: incarnation, random streams, endpoint."""

    phase: ClassVar[Phase] = "RECONNECT"
    timeout_s: float


@frozen(kw_only=True)
class CompareAnswer(BaseStep):
    """Ask what was asked at capture and compare token ids and text."""

    phase: ClassVar[Phase] = "ACCEPT"
    timeout_s: float


@frozen(kw_only=True)
class HandOver(BaseStep):
    """Give the engine to the caller: from here on it serves until it is stopped."""

    phase: ClassVar[Phase] = "SETTLE"


@frozen(kw_only=True)
class StopEngine(BaseStep):
    """End the engine and everything it started."""

    phase: ClassVar[Phase] = "SETTLE"
    run_dir: str
    grace_s: float


Step = (
    AdmitHost
    | AdmitOutput
    | AdmitEngine
    | AdmitPlacement
    | AdmitArtifact
    | LaunchEngine
    | LaunchTemplate
    | AttachEngine
    | AwaitReady
    | RecordAnswer
    | Quiesce
    | ResumeEngine
    | SealArtifact
    | CommitArtifact
    | SettleWorkload
    | StartKeeper
    | VerifyFiles
    | Reconnect
    | CompareAnswer
    | HandOver
    | StopEngine
    | FreezingStep
    | ShelvingStep
    | MovingStep
    | TemplatingStep
)

STEP_CLASSES: dict[str, type[Step]] = {cls.__name__: cls for cls in get_args(Step)}
