"""What is done ahead of an engine's need: files brought near, processes left warm, and a warm engine taken up.

The one rule: an engine that has not given the captured answer is never open to anybody; it waits behind its door, or it
is no more.
"""

from __future__ import annotations

import os
from pathlib import Path

from coldsnap.artifact import Artifact
from coldsnap.artifact.held import reading
from coldsnap.artifact.store import Store
from coldsnap.engines.specs import EngineRecord, spec_from_text
from coldsnap.errors import AdmissionError
from coldsnap.hydrating import BUDGET_SHARE, payloads_of
from coldsnap.keeper.client import Keeper
from coldsnap.keeper.handle import Engine as Handle
from coldsnap.keeper.undo import KILL
from coldsnap.keeper.warm import Warm, mark_warm, unmark_warm, warm_of
from coldsnap.launching import ENVIRONMENT
from coldsnap.planning.materialize import require_materializable
from coldsnap.planning.selecting import provider_of
from coldsnap.receipts import Receipt
from coldsnap.session import Session
from coldsnap.steps import AdmitWarm, LeaveWarm, ReadAhead, TakeWarm
from coldsnap.transfer.prefetch import prefetch

__all__ = ["admit", "leave", "read_ahead", "take"]


def read_ahead(session: Session, step: ReadAhead) -> Receipt:
    """Read what a restore reads through the page cache, images first, to its end or to that of the budget."""
    opened = session.need(session.artifact, "an artifact")
    left = int(session.need(session.host, "the host's facts").memory.available_bytes * BUDGET_SHARE)
    paths = [opened.path / file.path for unit in opened.descriptor.capsule.units for file in unit.files]
    if step.store:
        packs = [Store(step.store).path(payload.sha256) for payload in payloads_of(session)]
        paths += [Path(path) for path in session.checkpoint] or packs
    if step.residuals:
        paths += [opened.path / one.residual.path for one in opened.descriptor.weights.workers]
    read, whole = 0, 0
    for path in dict.fromkeys(paths):
        with prefetch(path, budget_bytes=min(left - read, os.stat(path).st_size)) as ahead:
            receipt = ahead.wait()
        read += receipt.bytes
        whole += receipt.outcome == "complete"
    session.report.workload = "nothing was started"
    return Receipt(
        step=step.id,
        effective=f"{whole} of {len(paths)} files in the page cache",
        reason=f"at most {left / 1e6:,.0f} MB, {BUDGET_SHARE:.0%} of the memory that is available",
        bytes=read,
        details={
            "provider": session.provider,
            "capture_id": opened.descriptor.capture_id,
            "driver": opened.descriptor.snapshot_driver.id,
            "images": sum(len(unit.files) for unit in opened.descriptor.capsule.units),
        },
    )


def leave(session: Session, step: LeaveWarm) -> Receipt:
    """Mark the engine as warm, and give it to the caller with its door closed."""
    keeper, opened = session.living, session.need(session.artifact, "an artifact")
    mark_warm(keeper.run_dir, Warm(artifact=str(opened.path), digest=opened.digest))
    keeper.end()
    session.keeper = None
    session.report.engine = handle = Handle(keeper)
    session.report.workload = f"the engine is warm: restore it, Restore(engine), and it serves at {handle.endpoint.url}"
    return Receipt(step=step.id, effective="warm", reason=f"run directory {handle.run_dir}")


def admit(session: Session, step: AdmitWarm) -> Receipt:
    """Look at engine and artifact; whatever is refused here and before the take leaves the engine warm."""
    session.serving = True
    keeper = session.take(Keeper.connect(step.run_dir))
    warm = _require_warm(step.run_dir)
    session.stack.enter_context(reading(Path(step.artifact)))
    opened = Artifact.open(step.artifact)
    if opened.digest != warm.digest:
        raise AdmissionError(
            f"{step.artifact} is not the artifact that the engine in {step.run_dir} came from: expected {warm.digest}, "
            f"found {opened.digest}; bring that one back, or stop the engine"
        )
    provider_of(opened, step.mode)
    require_materializable(step.materialize, opened)
    record = EngineRecord.from_text(keeper.labels[ENVIRONMENT], path=f"{step.run_dir}/keeper.json")
    session.artifact, session.engine = opened, spec_from_text(record.spec)
    session.environment, session.report.artifact = record.environment, opened.path
    return Receipt(step=step.id, effective=f"warm, {opened.descriptor.capture_id}")


def take(session: Session, step: TakeWarm) -> Receipt:
    """Begin: the mark goes, and a failure or a dead caller takes everything with it from here on."""
    keeper = session.living
    keeper.begin("restore", [])  # another's is refused with its name, and the engine stays as it is
    _require_warm(keeper.run_dir)
    keeper.undo(KILL)
    session.serving = False
    unmark_warm(keeper.run_dir)
    session.ranks.require(session.spec.roles(gpu=session.gpu))
    session.ranks.admit(session.key, timeout_s=step.timeout_s)
    return Receipt(step=step.id, effective="taken", reason=f"run directory {keeper.run_dir}")


def _require_warm(run_dir: str | os.PathLike[str]) -> Warm:
    warm = warm_of(run_dir)
    if warm is None:
        raise AdmissionError(f"the engine in {run_dir} is not warm; only a warm one is restored by its handle")
    return warm
