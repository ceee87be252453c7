"""The steps of a template: it is proven, dumped, and started, at its capture and wherever it comes back. Plain fields.

The one rule: a template goes on only after its dump; so whatever these steps name lies before the engine begins.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from attrs import frozen

from coldsnap.moving import ReadingStep, WritingStep
from coldsnap.phases import BaseStep, Phase

__all__ = [
    "DumpTemplate",
    "ExportLoad",
    "FillLoad",
    "ProveTemplate",
    "ReportLoad",
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
        provider: Where its weights come from: checkpoint (the engine's own loader), native or recovery.
        devices: Ordinals of the GPUs that it sees, where the placement names some.
    """

    phase: ClassVar[Phase] = "LAUNCH"
    unit: str
    stop: Stop
    address: str
    port: int
    provider: Literal["checkpoint", "native", "recovery"]
    devices: tuple[int, ...] = ()


@frozen(kw_only=True)
class ExportLoad(WritingStep):
    """Let the template go on: it becomes the engine, whose load leaves packs, residuals and manifests behind.

    Attributes:
        unit: Like the five after it as for ``StartEngine``.
        output: The artifact's directory, which gets residuals and manifests.
    """

    phase: ClassVar[Phase] = "LAUNCH"
    unit: str
    stop: Stop
    address: str
    port: int
    provider: Literal["checkpoint", "native", "recovery"]
    devices: tuple[int, ...]
    output: str


@frozen(kw_only=True)
class FillLoad(ReadingStep):
    """Let the template go on: it becomes the engine, whose load fills its parameters out of packs.

    Attributes:
        unit: Like the five after it as for ``StartEngine``.
        store: The root of the store that has the packs.
        native_library: The I/O library, empty for the packaged one.
        native_sha256: Its digest, empty when any will do.
    """

    phase: ClassVar[Phase] = "LAUNCH"
    unit: str
    stop: Stop
    address: str
    port: int
    provider: Literal["checkpoint", "native", "recovery"]
    devices: tuple[int, ...]
    store: str
    native_library: str
    native_sha256: str


@frozen(kw_only=True)
class ReportLoad(BaseStep):
    """Ask every worker what its load wrote, or read; one that did something else than it was told ends the operation.

    Attributes:
        task: export (at a capture) or start (at a restore).
        timeout_s: Deadline, s.
    """

    phase: ClassVar[Phase] = "HYDRATE"
    task: Literal["export", "start"]
    timeout_s: float


@frozen(kw_only=True)
class VerifyCheckpoint(BaseStep):
    """Compare the model that the engine loads with the captured one; runs beside the load.

    Attributes:
        revision: Of the captured model.
    """

    phase: ClassVar[Phase] = "STAGE"
    revision: str


TemplatingStep = ProveTemplate | DumpTemplate | StartEngine | ExportLoad | FillLoad | ReportLoad | VerifyCheckpoint
