"""The CUDA steps of a capture and a restore, through the resident helper.

The one rule: the helper is started before anything waits for it, and closed before anything else is undone: closing it
brings back every process that it locked or checkpointed.
"""

from __future__ import annotations

import os
import sys

from coldsnap.drivers import n610
from coldsnap.drivers.cuda import CudaHelper
from coldsnap.drivers.devices import moves_to, needs_by_ordinal, with_hydration
from coldsnap.engines.settings import inherited_environment
from coldsnap.errors import DriverError
from coldsnap.hydrating import mapped_bytes
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
        if session.plan.operation == "restore":
            session.cuda.measure_ahead()


def lock(session: Session, step: LockCuda) -> Receipt:
    """Lock CUDA in every process that holds the driver open."""
    helper = session.need(session.cuda, "a CUDA helper")
    audit = n610.prepare_dump(session.living)
    states = dict(zip(audit.nvidia_pids, helper.probe(audit.nvidia_pids), strict=True))
    if lost := [pid for pid, state in states.items() if state is None and pid in audit.cuda_pids]:
        raise DriverError(
            f"the processes {', '.join(map(str, lost))} have loaded libcuda, but the driver knows nothing of them; "
            "capture with the driver that the engine was started with",
            command="cuda lock",
        )
    # What only asked NVML, of which the driver has no state, is left out; `checkpoint` sees whether it is in the way.
    pids = [pid for pid, state in states.items() if state is not None]
    helper.lock(pids, timeout_s=step.timeout_s)
    without = len(states) - len(pids)
    reason = f"{without} hold devices open without CUDA" if without else ""
    return Receipt(step=step.id, effective=f"{len(pids)} processes locked", reason=reason)


def checkpoint(session: Session, step: CheckpointCuda) -> Receipt:
    """Move their device memory into host memory."""
    helper = session.need(session.cuda, "a CUDA helper")
    helper.checkpoint(timeout_s=step.timeout_s)
    if still := n610.prepare_dump(session.living).nvidia_pids:
        raise DriverError(
            f"the processes {', '.join(map(str, still))} hold NVIDIA devices open after the checkpoint, and CRIU "
            "cannot dump those: end what watches the GPU inside the engine (NVML)",
            command="cuda checkpoint",
        )
    size = sum(device.needs_bytes for device in helper.held)
    return Receipt(step=step.id, effective=f"{len(helper.pids)} processes checkpointed", bytes=size)


def restore(session: Session, step: RestoreCuda) -> Receipt:
    """Move device memory back: of a thawed tree, or of one that serves on after its dump."""
    helper = session.need(session.cuda, "a CUDA helper")
    thawed = session.thawed
    if thawed is None:
        helper.restore(helper.pids, timeout_s=step.timeout_s)
        return Receipt(step=step.id, effective=f"{len(helper.pids)} processes restored")
    gpus = session.need(session.host, "the host's facts").gpus
    placed = [gpu.uuid for ordinal in step.devices for gpu in gpus if gpu.index == ordinal]
    present = {gpu.uuid for gpu in gpus}
    moves = moves_to(thawed.devices, placed, present=present, chosen=step.chosen)
    # A restore that fits and a hydrate that then does not would fail late, with everything else done.
    hydrated = () if session.artifact is None else mapped_bytes(session.artifact)
    held = with_hydration(thawed.devices, hydrated)
    needs = needs_by_ordinal(held, moves, helper.devices()) if thawed.devices else ()
    helper.restore(thawed.nvidia_pids, timeout_s=step.timeout_s, needs_bytes=needs, moves=moves)
    return Receipt(
        step=step.id,
        effective=f"{len(thawed.nvidia_pids)} processes restored",
        reason=", ".join(f"{old} to {new}" for old, new in moves),
        bytes=sum(device.needs_bytes for device in thawed.devices),
    )


def unlock(session: Session, step: UnlockCuda) -> Receipt:
    """Let them call CUDA again; nothing is left for the helper to undo."""
    helper = session.need(session.cuda, "a CUDA helper")
    helper.unlock(timeout_s=step.timeout_s)
    session.cuda = None
    helper.close()
    return Receipt(step=step.id, effective=f"{len(helper.pids)} processes unlocked")
