"""The steps that n610 contributes to a plan: pure, and in the order that the module ``n610`` tells.

The one rule: CUDA steps are in a plan exactly when the placement has devices.
"""

from __future__ import annotations

from typing import Literal

from coldsnap.drivers.image_profile import FEED, WORKERS
from coldsnap.steps import (
    CheckpointCuda,
    DumpTree,
    LockCuda,
    RestoreCuda,
    StageCapsule,
    Step,
    ThawTree,
    UnlockCuda,
)

__all__ = ["ABI", "capture_steps", "restore_steps"]

ABI = 1
"""Version of the layout inside a capsule of this driver."""

CUDA_TIMEOUT_S = 120.0


def capture_steps(
    *,
    after: str,
    unit: str,
    criu: str,
    devices: tuple[int, ...],
    leave: Literal["stopped", "running"],
    timeout_s: float,
) -> tuple[Step, ...]:
    """Return the steps from a quiet engine to a process image.

    The image is there after ``dump``; with ``leave="running"`` the processes run as before after the last step.
    """
    cuda: tuple[Step, ...] = ()
    if devices:
        cuda = (
            LockCuda(id="lock-cuda", after=(after,), devices=devices, timeout_s=CUDA_TIMEOUT_S),
            CheckpointCuda(id="checkpoint-cuda", after=("lock-cuda",), timeout_s=timeout_s),
        )
        after = "checkpoint-cuda"
    dump = DumpTree(id="dump", after=(after,), unit=unit, criu=criu, leave=leave, timeout_s=timeout_s)
    if leave == "stopped":
        return (*cuda, dump)
    back: tuple[Step, ...] = ()
    if devices:
        # The processes run after the dump, but their device memory is still in host memory.
        back = (
            RestoreCuda(id="restore-cuda", after=("dump",), devices=devices, timeout_s=timeout_s),
            UnlockCuda(id="unlock-cuda", after=("restore-cuda",), timeout_s=CUDA_TIMEOUT_S),
        )
    return (*cuda, dump, *back)


def restore_steps(
    *,
    after: str,
    unit: str,
    criu: str,
    devices: tuple[int, ...],
    address: str,
    port: int,
    timeout_s: float,
    chosen: bool = False,
    compression: Literal["none", "lz4"] = "none",
) -> tuple[Step, ...]:
    """Return the steps from a keeper to a running tree; the last is ``thaw``, or ``unlock-cuda`` with devices."""
    steps: tuple[Step, ...] = (
        StageCapsule(
            id="stage",
            after=(after,),
            unit=unit,
            address=address,
            port=port,
            pages="stored" if compression == "none" else FEED,
            workers=WORKERS,
        ),
        ThawTree(id="thaw", after=("stage",), unit=unit, criu=criu, timeout_s=timeout_s),
    )
    if devices:
        steps += (
            RestoreCuda(id="restore-cuda", after=("thaw",), devices=devices, timeout_s=timeout_s, chosen=chosen),
            UnlockCuda(id="unlock-cuda", after=("restore-cuda",), timeout_s=CUDA_TIMEOUT_S),
        )
    return steps
