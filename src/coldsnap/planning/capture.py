"""Plans of a capture, of an engine that is launched for it or of one that serves already."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from attrs import evolve

from coldsnap.admission import host_problems, require
from coldsnap.behaviour import Context
from coldsnap.drivers import sequence
from coldsnap.drivers.image_profile import image_compression
from coldsnap.engines.base import Engine
from coldsnap.engines.caches import managed
from coldsnap.engines.specs import spec_of_running, was_launched_releasing
from coldsnap.errors import UnsupportedError
from coldsnap.host.facts import Facts, HostFacts
from coldsnap.operation import Capture, EngineHandle, Placement
from coldsnap.plan import Choice, Plan
from coldsnap.planning.caches import cache_environment, collect_steps, launched_caches
from coldsnap.planning.decisions import decide
from coldsnap.planning.launch import launch_steps
from coldsnap.planning.placing import (
    UNIT,
    admit_host,
    chosen_driver,
    criu_path,
    cuda_decision,
    devices_for,
    driver_decision,
    placed,
)
from coldsnap.planning.template import capture_weights, refuse_for_driver, start_step, stop_of, template_steps
from coldsnap.planning.weights import (
    PlacedWeights,
    at_capture,
    export_steps,
    hydrate_step,
    release_step,
    store_beside,
    weights_choices,
)
from coldsnap.policy import Policy, ResolvedPolicy
from coldsnap.steps import (
    AdmitOutput,
    AttachEngine,
    AwaitReady,
    CommitArtifact,
    LaunchTemplate,
    OrderExport,
    Quiesce,
    RecordAnswer,
    ReportLoad,
    ResumeEngine,
    SealArtifact,
    SettleWorkload,
    ShrinkPages,
    StageStartFiles,
    StartEngine,
    Step,
)

__all__ = ["plan_capture"]


def plan_capture(policy: Policy, operation: Capture, facts: Facts) -> Plan:
    """Plan a capture.

    Raises:
        AdmissionError: Not on this host, with every reason.
    """
    if isinstance(operation.engine, EngineHandle):
        unit, host, workers = None, facts.host("local"), 1
        driver, why = chosen_driver(policy, facts, unit, workers)
        _require_launched_as_template(driver, why)
        weights, first, subject = _attached(policy, operation.engine, host)
        caches = launched_caches(weights.resolved, operation.engine.labels, run_dir=operation.engine.run_dir)
        ready_after = "attach"
    else:
        placement = cast("Placement", operation.placement)
        unit, host = placed(placement, facts)
        engine = cast("Engine", operation.engine)
        workers = engine.world_size
        driver, why = chosen_driver(policy, facts, unit, workers)
        settle = capture_weights if driver == "n580" else at_capture
        weights = settle(policy, engine, gpu=bool(host.gpus))
        require(f"{engine.kind} cannot be captured", host_problems(weights.resolved, host, unit))
        stop = stop_of(weights.resolved, engine) if driver == "n580" else ""
        first = launch_steps(weights, engine, placement, host, after=("admit-output",), driver=driver, stop=stop)
        ready_after = "launch"
        if stop:
            held = template_steps(operation, UNIT, criu_path(host), stop, devices_for(unit, host, workers))
            start = start_step(unit, UNIT, stop, after=(held[-1].id,))
            ordered = export_steps(weights.resolved, operation, facts, after="launch") if weights.ordered else None
            first = _as_template(first, held, start, ordered)
            ready_after = "start"
        caches = managed(cache_environment(weights.resolved, engine))
        subject = f"{engine.kind} {engine.model} on {unit.host}, {unit.address}:{unit.port}"
    refuse_for_driver(policy, driver)
    resolved, store = weights.resolved, store_beside(operation, facts, operation.output)
    context = Context(
        operation="capture",
        gpu=bool(host.gpus),
        workers=workers,
        native=weights.native,
        store=store,
        reason=weights.reason,
        driver=driver,
    )
    decisions = decide(resolved, context)
    return Plan(
        operation="capture",
        driver=driver,
        subject=f"{subject} into {operation.output}",
        steps=(
            AdmitOutput(id="admit-output", output=operation.output),
            *first,
            *(
                accepted := _accepted(
                    operation, ready_after, quiet=driver == "n610" or (weights.native and not weights.ordered)
                )
            ),
            *(seeded := collect_steps(weights.resolved, caches, output=operation.output, after=accepted[-1].id)),
            *_dumped(
                operation,
                weights,
                store,
                host=host,
                devices=devices_for(unit, host, workers),
                driver=driver,
                quiet=seeded[-1].id if seeded else "quiesce",
            ),
            *_committed(operation, weights, where=context.weights, driver=driver, seeded=bool(seeded)),
        ),
        decisions=(
            driver_decision(driver, why),
            cuda_decision(host, held=driver == "n610" or _holds_driver(first)),
            *decisions,
        ),
        choices=_choices(operation, weights),
    )


def _holds_driver(steps: Iterable[Step]) -> bool:
    return any(isinstance(step, LaunchTemplate) and step.stop == "imported" for step in steps)


def _as_template(
    first: list[Step],
    held: tuple[Step, ...],
    start: StartEngine,
    ordered: tuple[StageStartFiles, OrderExport] | None,
) -> list[Step]:
    """Return the steps of a launch that waits as a template, and then goes on; the last is ``start``."""
    if ordered is None:
        return [*first, *held, start]
    staged, order = ordered
    # The command names the directory of the start files, so that these come first.
    *before, launch = first
    launch = evolve(launch, after=(*launch.after, staged.id))
    return [*before, staged, launch, *held, order, evolve(start, after=(*start.after, order.id))]


def _attached(policy: Policy, handle: EngineHandle, host: HostFacts) -> tuple[PlacedWeights, list[Step], str]:
    engine = spec_of_running(handle.labels, run_dir=handle.run_dir)
    releasing = was_launched_releasing(handle.labels)
    weights = at_capture(policy, engine, gpu=bool(host.gpus), releasing=releasing)
    require("this host cannot capture", host_problems(weights.resolved, host, None))
    _require_as_launched(weights.resolved, host)
    steps: list[Step] = [
        admit_host(host, weights.resolved["process.namespace"]),
        AttachEngine(id="attach", after=("admit-host", "admit-output"), run_dir=str(handle.run_dir)),
    ]
    return weights, steps, f"the engine in {handle.run_dir}"


def _require_launched_as_template(driver: str, why: str) -> None:
    if driver == "n580":
        raise UnsupportedError(
            f"the snapshot driver would be n580 ({why}), and an engine that runs already has no template any more",
            field="compatibility.driver",
            works='capturing an engine that is launched for it; compatibility.driver = "probed" with one worker',
        )


def _is_quiesced(weights: PlacedWeights, driver: str) -> bool:
    return driver == "n610" or (weights.native and not weights.ordered)


def _accepted(operation: Capture, ready_after: str, *, quiet: bool) -> tuple[Step, ...]:
    steps: tuple[Step, ...] = (
        AwaitReady(id="ready", after=(ready_after,), timeout_s=operation.ready_timeout_s),
        RecordAnswer(
            id="answer",
            after=("ready",),
            prompt=operation.prompt,
            tokens=operation.answer_tokens,
            timeout_s=operation.quiesce_timeout_s,
        ),
    )
    if not quiet:  # nothing of it leaves the process any more
        return steps
    return (*steps, Quiesce(id="quiesce", after=("answer", "admit-output"), timeout_s=operation.quiesce_timeout_s))


def _dumped(
    operation: Capture,
    weights: PlacedWeights,
    store: str,
    *,
    host: HostFacts,
    devices: tuple[int, ...],
    driver: str,
    quiet: str,
) -> tuple[Step, ...]:
    """Return the steps from a quiet engine to its image, and, where it is kept, back to one that serves."""
    before: tuple[Step, ...] = ()
    if weights.ordered:
        return (ReportLoad(id="report", after=("answer",), task="export", timeout_s=operation.dump_timeout_s),)
    if weights.native:
        before = (release_step(weights.resolved, operation, store, after=quiet),)
    if driver == "n580":  # whose image is there already
        return (*before, *_back(operation, weights, after="release")) if before else ()
    image = sequence.capture_steps(
        after="release" if before else quiet,
        unit=UNIT,
        criu=criu_path(host),
        devices=devices,
        leave="running" if operation.then == "keep" else "stopped",
        timeout_s=operation.dump_timeout_s,
    )
    if operation.then == "stop":
        return (*before, *image)
    return (*before, *image, *_back(operation, weights, after=image[-1].id))


def _back(operation: Capture, weights: PlacedWeights, *, after: str) -> tuple[Step, ...]:
    """Return the steps after which an engine that is kept serves again."""
    if operation.then == "stop":
        return ()
    back: tuple[Step, ...] = ()
    if weights.native:
        back = (hydrate_step(weights.resolved, "", after=(after,), timeout_s=operation.dump_timeout_s),)
        after = "hydrate"
    return (*back, ResumeEngine(id="resume", after=(after,)))


def _committed(
    operation: Capture, weights: PlacedWeights, *, where: str, driver: str, seeded: bool
) -> tuple[Step, ...]:
    # A kept workload serves again before its artifact is sealed; with its memory back, nothing needs the files alone.
    released = weights.native and not weights.ordered
    kept = operation.then == "keep" and (driver == "n610" or released)
    # What a template becomes afterwards must have answered, and its weights be written, before there is an artifact.
    done: tuple[str, ...] = (
        () if driver == "n610" else ("report",) if weights.ordered else ("release",) if released else ("answer",)
    )
    done += ("caches",) if seeded else ()
    compression, _ = image_compression(weights.resolved["io.image_compression"])
    return (
        ShrinkPages(
            id="shrink",
            after=("dump", "resume") if kept else ("dump",),
            unit=UNIT,
            compression=compression,
            zero_pages="many" if compression == "none" else "drop",
            workers=0,
        ),
        SealArtifact(
            id="seal",
            after=("shrink", *done),
            output=operation.output,
            weights="packs" if where == "native" else where,
            image_compression=compression,
        ),
        CommitArtifact(id="commit", after=("seal",), output=operation.output),
        SettleWorkload(id="settle", after=("commit", "resume") if kept else ("commit",), then=operation.then),
    )


def _choices(operation: Capture, weights: PlacedWeights) -> tuple[Choice, ...]:
    filled = weights.native and not weights.ordered and operation.then == "keep"
    return weights_choices(weights.resolved) if filled else ()


def _require_as_launched(resolved: ResolvedPolicy, host: HostFacts) -> None:
    if resolved["graphs.policy"] == "disabled" and host.gpus:
        raise UnsupportedError(
            "an engine that runs already cannot be made to run eagerly",
            field="graphs.policy",
            works='launching it with graphs.policy = "disabled", then capturing the handle with "auto"',
        )
