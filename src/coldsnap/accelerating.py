"""The CUDA steps of a capture and a restore, through the resident helper.

The one rule: the helper is started before anything waits for it, and closed before anything else is undone: closing it
brings back every process that it locked or checkpointed.
"""

from __future__ import annotations

import os
import sys

from coldsnap.drivers import n610
from coldsnap.drivers.cuda import CudaHelper
from coldsnap.engines.settings import inherited_environment
from coldsnap.receipts import Receipt
from coldsnap.session import Session
from coldsnap.steps import CheckpointCuda, LockCuda, RestoreCuda, UnlockCuda

__all__ = ["checkpoint", "lock", "prepare", "restore", "unlock"]


def prepare(session: Session) -> None:
    """Start the helper if the plan has CUDA steps: it initialises CUDA, 0.3 to 0.7 s, while other steps run."""
    if session.cuda is None and any(isinstance(step, LockCuda | RestoreCuda) for step in session.plan):
        # It must find the driver, this library and cuda-bindings where this process found them.
        environment = inherited_environment() | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        session.cuda = CudaHelper.start(session.living, environment=environment)


def lock(session: Session, step: LockCuda) -> Receipt:
    """Lock CUDA in every process that holds the driver open."""
    helper = session.need(session.cuda, "a CUDA helper")
    pids = n610.prepare_dump(session.living).nvidia_pids
    helper.lock(pids, timeout_s=step.timeout_s)
    return Receipt(step=step.id, effective=f"{len(pids)} processes locked")


def checkpoint(session: Session, step: CheckpointCuda) -> Receipt:
    """Move their device memory into host memory."""
    helper = session.need(session.cuda, "a CUDA helper")
    helper.checkpoint(timeout_s=step.timeout_s)
    return Receipt(step=step.id, effective=f"{len(helper.pids)} processes checkpointed")


def restore(session: Session, step: RestoreCuda) -> Receipt:
    """Move device memory back: of a thawed tree, or of one that serves on after its dump."""
    helper = session.need(session.cuda, "a CUDA helper")
    pids = helper.pids if session.thawed is None else session.thawed.nvidia_pids
    helper.restore(pids, timeout_s=step.timeout_s)
    return Receipt(step=step.id, effective=f"{len(pids)} processes restored")


def unlock(session: Session, step: UnlockCuda) -> Receipt:
    """Let them call CUDA again; nothing is left for the helper to undo."""
    helper = session.need(session.cuda, "a CUDA helper")
    helper.unlock(timeout_s=step.timeout_s)
    session.cuda = None
    helper.close()
    return Receipt(step=step.id, effective=f"{len(helper.pids)} processes unlocked")
