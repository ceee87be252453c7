"""The steps of a driver: a tree is locked, dumped and its pages shrunk; staged, thawed and unlocked. Plain fields.

The one rule: nothing here knows an engine; what comes before and after is the plan's.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from attrs import frozen

from coldsnap.phases import BaseStep, Phase

__all__ = [
    "CheckpointCuda",
    "CollectCaches",
    "DumpTree",
    "FreezingStep",
    "LockCuda",
    "PlantCaches",
    "RestoreCuda",
    "ShrinkPages",
    "StageCapsule",
    "ThawTree",
    "UnlockCuda",
]


@frozen(kw_only=True)
class LockCuda(BaseStep):
    """Lock CUDA in every process that holds the driver open."""

    phase: ClassVar[Phase] = "QUIESCE"
    devices: tuple[int, ...]
    timeout_s: float


@frozen(kw_only=True)
class CheckpointCuda(BaseStep):
    """Move CUDA state of every locked process into host memory."""

    phase: ClassVar[Phase] = "QUIESCE"
    timeout_s: float


@frozen(kw_only=True)
class DumpTree(BaseStep):
    """Write the process image and the volatile files while the tree is frozen.

    Attributes:
        criu: The CRIU executable.
        leave: stopped (until the artifact is committed) or running.
        timeout_s: Deadline, s.
    """

    phase: ClassVar[Phase] = "DUMP"
    unit: str
    criu: str
    leave: Literal["stopped", "running"]
    timeout_s: float


@frozen(kw_only=True)
class ShrinkPages(BaseStep):
    """Leave zero pages out of the process image, and compress it; a workload that is kept runs on meanwhile.

    Attributes:
        compression: none or lz4.
        zero_pages: Those of anonymous private memory. drop: left out; many: left out of a file of which they are a
            sixteenth or more; keep.
        workers: Threads that compress; 0: one for each processor.
    """

    phase: ClassVar[Phase] = "SEAL"
    unit: str
    compression: Literal["none", "lz4"]
    zero_pages: Literal["drop", "many", "keep"]
    workers: int


@frozen(kw_only=True)
class StageCapsule(BaseStep):
    """Put the volatile files back, write the directive, and move ports that are taken.

    Attributes:
        pages: How the memory of processes reaches CRIU: stored (the artifact's own files), rebuilt (compressed ones
            become files in memory) or stream (through pipes while CRIU restores).
        workers: Threads that decompress.
    """

    phase: ClassVar[Phase] = "STAGE"
    unit: str
    address: str
    port: int
    pages: Literal["stored", "rebuilt", "stream"]
    workers: int


@frozen(kw_only=True)
class ThawTree(BaseStep):
    """Bring the process tree back from its image."""

    phase: ClassVar[Phase] = "THAW"
    unit: str
    criu: str
    timeout_s: float


@frozen(kw_only=True)
class RestoreCuda(BaseStep):
    """Move CUDA state back to the devices, in every process that had some.

    Attributes:
        devices: Ordinals of the devices to restore to.
        timeout_s: Deadline, s.
        chosen: Whether the placement names them; else the devices of the capture are taken where they are present.
    """

    phase: ClassVar[Phase] = "THAW"
    devices: tuple[int, ...]
    timeout_s: float
    chosen: bool = False


@frozen(kw_only=True)
class UnlockCuda(BaseStep):
    """Let every process call CUDA again."""

    phase: ClassVar[Phase] = "THAW"
    timeout_s: float


@frozen(kw_only=True)
class CollectCaches(BaseStep):
    """Copy derived caches into the artifact, while the engine is quiet and nothing writes them.

    Attributes:
        output: The artifact's directory.
        caches: Name and directory of each.
    """

    phase: ClassVar[Phase] = "QUIESCE"
    output: str
    caches: tuple[tuple[str, str], ...]


@frozen(kw_only=True)
class PlantCaches(BaseStep):
    """Put derived caches back to where processes map files of them; what is there stays, nothing is replaced.

    Attributes:
        targets: Their directories.
    """

    phase: ClassVar[Phase] = "STAGE"
    targets: tuple[str, ...]


FreezingStep = (
    CollectCaches
    | PlantCaches
    | LockCuda
    | CheckpointCuda
    | DumpTree
    | ShrinkPages
    | StageCapsule
    | ThawTree
    | RestoreCuda
    | UnlockCuda
)
