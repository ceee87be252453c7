"""Run a plan: the only place that acts.

One branch for each step class; mypy proves that none is missing. The sequence is the plan's, the acting is done by the
packages that the steps are named after, and what is chosen is chosen among the options that the plan lists.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Literal, Protocol, assert_never

from coldsnap import (
    accelerating,
    anew,
    capturing,
    curating,
    dozing,
    hydrating,
    launching,
    materializing,
    releasing,
    repacking,
    restoring,
    sealing,
    seeding,
    shrinking,
    starting,
    warming,
)
from coldsnap.plan import Plan
from coldsnap.receipts import Event, EventSink, Receipt, Report
from coldsnap.runner import run
from coldsnap.session import Session
from coldsnap.steps import (
    AdmitArtifact,
    AdmitDeletion,
    AdmitEngine,
    AdmitHost,
    AdmitOutput,
    AdmitPacks,
    AdmitPlacement,
    AdmitWarm,
    AttachEngine,
    AwaitReady,
    CheckpointCuda,
    CollectCaches,
    CollectPacks,
    CommitArtifact,
    CompareAnswer,
    DeleteArtifact,
    DumpTemplate,
    DumpTree,
    FetchPacks,
    HandOver,
    HydrateWeights,
    InspectEngine,
    LaunchEngine,
    LeaveWarm,
    LockCuda,
    MaterializeEngine,
    MaterializePacks,
    OpenArtifact,
    OrderExport,
    OrderHydration,
    PlantCaches,
    PrefetchWeights,
    ProveTemplate,
    PublishPacks,
    PushArtifact,
    Quiesce,
    ReadAhead,
    Reconnect,
    RecordAnswer,
    ReleaseWeights,
    RepackCheckpoint,
    ReportLoad,
    RestoreCuda,
    ResumeEngine,
    SealArtifact,
    SettleWorkload,
    ShrinkPages,
    SleepEngine,
    StageCapsule,
    StageRuntime,
    StageStartFiles,
    StartEngine,
    StartKeeper,
    Step,
    StopEngine,
    TakeWarm,
    ThawTree,
    UnlockCuda,
    VerifyArtifact,
    VerifyCheckpoint,
    VerifyFiles,
    VerifyPacks,
    WakeEngine,
)

__all__ = ["execute"]


class FaultPoint(Protocol):
    """What is called at every boundary of a step; ``coldsnap.testing.faults.FaultPlan`` is one."""

    def __call__(self, step: str, when: Literal["before", "after"], *, keeper_pid: int | None) -> None:
        """Let something go wrong: raise, or kill this process or the keeper."""


def execute(plan: Plan, *, on_event: EventSink | None = None, fault_point: FaultPoint | None = None) -> Report:
    """Do what the plan says.

    Args:
        plan: From ``resolve``.
        on_event: Called at the start and end of every step; ``progress()`` gives one that prints.
        fault_point: Called before and after every step with its id and the keeper's pid; for tests of failures.

    Returns:
        The report: receipts, timeline, the engine that runs now.

    Raises:
        AdmissionError: Refused before anything was started.
        ArtifactError: Bytes at rest are not what they should be.
        StepError: A step failed after something had been started; ``.report`` tells everything, ``.report.workload``
            what became of the workload. Every other exception, KeyboardInterrupt too, carries ``.report`` as well.
    """
    report = Report(operation=plan.operation, plan=plan)
    session = Session(plan=plan, report=report)
    _tell(on_event, Event(kind="plan", text=plan.subject, total=len(plan.steps)))

    def fault(step: str, when: Literal["before", "after"]) -> None:
        if fault_point is not None:
            fault_point(step, when, keeper_pid=session.keeper_pid)

    try:
        restoring.start_ahead(session)
        run(
            plan,
            lambda step: _act(session, step),
            report,
            interrupt=session.interrupt,
            on_event=on_event,
            fault_point=fault,
        )
    except BaseException as error:
        _fail(session, error)
        _tell(on_event, Event(kind="done", status="error", at_ns=report.timeline.now_ns(), text=report.workload))
        raise
    session.close()
    report.state = "succeeded"
    _tell(on_event, Event(kind="done", at_ns=report.timeline.now_ns(), text=report.workload))
    return report


def _fail(session: Session, error: BaseException) -> None:
    report = session.report
    try:
        report.workload = session.undo()
    finally:
        session.close()
    report.state, report.error = "failed", str(error) or type(error).__name__
    error.__dict__["report"] = report
    error.add_note(report.workload)


def _tell(sink: EventSink | None, event: Event) -> None:
    if sink is not None:
        with suppress(Exception):  # a progress display must never fail an operation
            sink(event)


def _act(session: Session, step: Step) -> Receipt:
    match step:
        case AdmitHost():
            return launching.admit_host(session, step)
        case AdmitOutput():
            return capturing.admit_output(session, step)
        case AdmitEngine():
            return launching.admit_engine(session, step)
        case AdmitPlacement():
            return launching.admit_placement(session, step)
        case AdmitArtifact():
            return restoring.admit_artifact(session, step)
        case LaunchEngine():
            return launching.launch(session, step)
        case AttachEngine():
            return capturing.attach(session, step)
        case AwaitReady():
            return launching.ready(session, step)
        case RecordAnswer():
            return capturing.record_answer(session, step)
        case Quiesce():
            return capturing.quiesce(session, step)
        case CollectCaches():
            return seeding.collect(session, step)
        case PlantCaches():
            return seeding.plant(session, step)
        case LockCuda():
            return accelerating.lock(session, step)
        case CheckpointCuda():
            return accelerating.checkpoint(session, step)
        case RestoreCuda():
            return accelerating.restore(session, step)
        case UnlockCuda():
            return accelerating.unlock(session, step)
        case DumpTree():
            return capturing.dump(session, step)
        case ResumeEngine():
            return capturing.resume(session, step)
        case ShrinkPages():
            return shrinking.shrink(session, step)
        case SealArtifact():
            return sealing.seal(session, step)
        case CommitArtifact():
            return sealing.commit(session, step)
        case SettleWorkload():
            return capturing.settle(session, step)
        case StartKeeper():
            return restoring.start_keeper(session, step)
        case VerifyFiles():
            return restoring.verify(session, step)
        case StageCapsule():
            return restoring.stage(session, step)
        case ThawTree():
            return restoring.thaw(session, step)
        case Reconnect():
            return restoring.reconnect(session, step)
        case CompareAnswer():
            return restoring.compare_answer(session, step)
        case HandOver():
            return launching.hand_over(session, step)
        case ProveTemplate():
            return starting.prove(session, step)
        case DumpTemplate():
            return starting.dump_template(session, step)
        case StartEngine():
            return starting.start_engine(session, step)
        case VerifyCheckpoint():
            return starting.verify_checkpoint(session, step)
        case StageRuntime():
            return anew.stage_runtime(session, step)
        case StageStartFiles():
            return anew.stage_start_files(session, step)
        case OrderExport():
            return anew.order_export(session, step)
        case OrderHydration():
            return anew.order_hydration(session, step)
        case ReportLoad():
            return anew.report_load(session, step)
        case StopEngine():
            return launching.stop(session, step)
        case ReleaseWeights():
            return releasing.release(session, step)
        case AdmitPacks():
            return hydrating.admit_packs(session, step)
        case PrefetchWeights():
            return hydrating.prefetch_weights(session, step)
        case VerifyPacks():
            return hydrating.verify_packs(session, step)
        case HydrateWeights():
            return hydrating.hydrate(session, step)
        case ReadAhead():
            return warming.read_ahead(session, step)
        case LeaveWarm():
            return warming.leave(session, step)
        case AdmitWarm():
            return warming.admit(session, step)
        case TakeWarm():
            return warming.take(session, step)
        case MaterializeEngine():
            return materializing.materialize_engine(session, step)
        case MaterializePacks():
            return materializing.materialize(session, step)
        case SleepEngine():
            return dozing.sleep(session, step)
        case WakeEngine():
            return dozing.wake(session, step)
        case InspectEngine():
            return dozing.inspect(session, step)
        case OpenArtifact():
            return curating.open_artifact(session, step)
        case VerifyArtifact():
            return curating.verify(session, step)
        case AdmitDeletion():
            return curating.admit_deletion(session, step)
        case DeleteArtifact():
            return curating.delete(session, step)
        case CollectPacks():
            return curating.collect_packs(session, step)
        case PublishPacks():
            return curating.publish_packs(session, step)
        case FetchPacks():
            return repacking.fetch(session, step)
        case RepackCheckpoint():
            return repacking.repack(session, step)
        case PushArtifact():
            return curating.push_artifact(session, step)
        case _:
            assert_never(step)
