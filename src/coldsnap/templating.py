"""The steps of a template: it is proven, dumped, and started, at its capture and wherever it comes back. Plain fields.

The one rule: a template goes on only after its dump; so whatever these steps name lies before the engine begins.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from attrs import frozen

from coldsnap.moving import FillingStep, WritingStep
from coldsnap.phases import BaseStep, Phase

__all__ = [
    "DumpTemplate",
    "OrderExport",
    "OrderHydration",
    "ProveTemplate",
    "ReportLoad",
    "StageRuntime",
    "StageStartFiles",
    "StartEngine",
    "TemplatingStep",
    "VerifyCheckpoint",
]

Stop = Literal["pre_exec", "imported"]


@frozen(kw_only=True)
class ProveTemplate(BaseStep):
    """Wait until the template stands still, and prove that no process of it has anything of an accelerator.

    Attributes:
        stop: Where it stops: pre_exec (before the engine's interpreter begins) or imported (modules are loaded).
        timeout_s: How long it may take to get there, s.
    """

    phase: ClassVar[Phase] = "TEMPLATE"
    stop: Stop
    timeout_s: float


@frozen(kw_only=True)
class DumpTemplate(BaseStep):
    """Write the process image of the template, which goes on waiting, and note what its engine's files are.

    Attributes:
        unit: Its unit.
        criu: The CRIU executable.
        stop: As for ``ProveTemplate``.
        timeout_s: Deadline, s.
    """

    phase: ClassVar[Phase] = "TEMPLATE"
    unit: str
    criu: str
    stop: Stop
    timeout_s: float


@frozen(kw_only=True)
class StartEngine(BaseStep):
    """Let the template go on: it takes its place and becomes the engine, which loads.

    Attributes:
        unit: Its unit.
        stop: Where it stopped.
        address: Where the engine is to listen.
        port: As above.
        provider: Where its weights come from: checkpoint (the engine's own loader), native, recovery, or either of the
            two, as was found when the packs were looked for.
        devices: Ordinals of the GPUs that it sees, where the placement names some.
    """

    phase: ClassVar[Phase] = "LAUNCH"
    unit: str
    stop: Stop
    address: str
    port: int
    provider: Literal["checkpoint", "native", "recovery", "either"]
    devices: tuple[int, ...] = ()


@frozen(kw_only=True)
class VerifyCheckpoint(BaseStep):
    """Compare the model that the engine loads with the captured one; runs beside the load.

    Attributes:
        revision: Of the captured model.
    """

    phase: ClassVar[Phase] = "STAGE"
    revision: str


@frozen(kw_only=True)
class StageRuntime(BaseStep):
    """Where the engine's environment has another coldsnap than the one that restores, stage and place this one.

    Attributes:
        store: The root of the store, which has the trees.
    """

    phase: ClassVar[Phase] = "STAGE"
    store: str


@frozen(kw_only=True)
class StageStartFiles(BaseStep):
    """Stage what an engine starts with besides tensors, read-only: of its model at a capture, else of the artifact.

    Attributes:
        store: The root of the store, which has the trees.
    """

    phase: ClassVar[Phase] = "STAGE"
    store: str


@frozen(kw_only=True)
class OrderExport(WritingStep):
    """Say in the directive that the load is to write what it leaves: pack, rest, manifests and index of the layout.

    Attributes:
        recovery: Whether what a recovery from the checkpoint needs is kept, too: off, auto (where it can be), required.
        derived_buffer_max_bytes: How much of parameters and buffers may be no copy of the checkpoint.
    """

    phase: ClassVar[Phase] = "TEMPLATE"
    recovery: Literal["off", "auto", "required"]
    derived_buffer_max_bytes: int


@frozen(kw_only=True)
class OrderHydration(FillingStep):
    """Say in the directive which packs, or which files of the checkpoint, the load is to read."""

    phase: ClassVar[Phase] = "HYDRATE"


@frozen(kw_only=True)
class ReportLoad(BaseStep):
    """Ask every worker what its load wrote (export) or read (start).

    Attributes:
        task: What it was ordered to do.
        timeout_s: Deadline, s.
    """

    phase: ClassVar[Phase] = "HYDRATE"
    task: Literal["export", "start"]
    timeout_s: float


TemplatingStep = (
    ProveTemplate
    | DumpTemplate
    | StartEngine
    | VerifyCheckpoint
    | StageRuntime
    | StageStartFiles
    | OrderExport
    | OrderHydration
    | ReportLoad
)
