"""Plans of a restore."""

from __future__ import annotations

from typing import Literal, cast

from attrs import evolve

from coldsnap.admission import host_problems, namespace_problems, require
from coldsnap.artifact import Artifact, Comparison, Target
from coldsnap.behaviour import Context
from coldsnap.describe import target_unit
from coldsnap.drivers import sequence
from coldsnap.drivers.image_profile import stored_as
from coldsnap.errors import CompatibilityError
from coldsnap.host.facts import Facts, HostFacts
from coldsnap.keeper.activation import finds_activation
from coldsnap.operation import Placement, Restore, UnitPlacement
from coldsnap.plan import Choice, Decision, Plan
from coldsnap.planning.caches import plant_steps
from coldsnap.planning.decisions import decide
from coldsnap.planning.materialize import materialize_steps, require_materializable, require_warm
from coldsnap.planning.placing import admit_host, criu_path, cuda_decision, devices_for, placed
from coldsnap.planning.selecting import at_restore, foresee, provider_choices
from coldsnap.planning.template import refuse_other_driver, start_step, verify_steps
from coldsnap.planning.weights import (
    PlacedWeights,
    hydrate_step,
    pack_steps,
    start_steps,
    store_beside,
    weights_choices,
)
from coldsnap.policy import Policy, ResolvedPolicy
from coldsnap.steps import (
    AdmitArtifact,
    AdmitPlacement,
    AwaitReady,
    CompareAnswer,
    HandOver,
    LeaveWarm,
    PrefetchWeights,
    Reconnect,
    ReportLoad,
    StageRuntime,
    StartKeeper,
    Step,
    VerifyFiles,
)

__all__ = ["plan_restore"]

RECONNECT_TIMEOUT_S = 30.0
WARM = Decision(
    name="state",
    requested="warm",
    layer="operation",
    effective="warm",
    reason="processes come back; weights and KV cache wait for a restore of the warm engine, which compares the answer",
)


def plan_restore(policy: Policy, operation: Restore, facts: Facts) -> Plan:
    """Plan a restore.

    Raises:
        AdmissionError: Not on this host, with every reason.
        PayloadMissingError: The probed store lacks a pack.
    """
    artifact = cast("Artifact", operation.artifact)
    descriptor = artifact.descriptor
    placement = cast("Placement", operation.placement)
    unit, host = placed(placement, facts)
    refuse_other_driver(policy, artifact)
    weights = at_restore(policy, artifact, gpu=bool(host.gpus and descriptor.compatibility.units[0].devices))
    resolved, native = weights.resolved, weights.native
    require_materializable(resolved["weights.native.materialize"], artifact)
    if operation.state == "warm":
        require_warm(resolved, artifact, driver=descriptor.snapshot_driver.id, native=native)
    comparison = _compared(resolved, operation, unit, host)
    store = store_beside(operation, facts, str(artifact.path)) if native else ""
    weights = foresee(weights, artifact, store, facts)
    captured = descriptor.compatibility.units[0].devices
    devices = unit.devices if captured and unit.devices else devices_for(unit, host, len(captured))
    if len(devices) != len(captured):
        require(
            f"the artifact {artifact.path} cannot be restored on {unit.host}",
            [f"it was captured on {len(captured)} GPUs, the placement names {len(devices)}; name as many"],
        )
    driver, scope = descriptor.snapshot_driver.id, descriptor.compatibility.policy
    # A template holds the driver only where it has imported what loads it.
    thawed_on = devices if driver == "n610" or scope == "target-local-v1" else ()
    packs = pack_steps(weights, artifact, store, facts) if native else ()
    if operation.state == "warm":  # what is read ahead would be forgotten by the time that it is wanted
        packs = tuple(step for step in packs if not isinstance(step, PrefetchWeights))
    steps: list[Step] = [
        admit_host(host, resolved["process.namespace"]),
        AdmitPlacement(id="admit-placement", address=unit.address, port=unit.port),
        AdmitArtifact(
            id="admit-artifact",
            artifact=str(artifact.path),
            digest=artifact.digest,
            kernel=resolved["compatibility.kernel"],
            enforce_captured_driver_floor=resolved["compatibility.enforce_captured_driver_floor"],
        ),
        *packs,
        *(planted := plant_steps(artifact, after="admit-artifact")),
        StartKeeper(
            id="keeper",
            after=(
                "admit-host",
                "admit-placement",
                "admit-artifact",
                *(("admit-packs",) if native else ()),
                *(one.id for one in planted),
            ),
            namespace=resolved["process.namespace"],
            name=placement.name or "",
            run_dir=placement.run_dir or "",
        ),
        VerifyFiles(
            id="verify", after=("admit-artifact",), artifact=str(artifact.path), mode=resolved["weights.verify"]
        ),
        *sequence.restore_steps(
            after="keeper",
            unit=descriptor.capsule.units[0].unit,
            criu=criu_path(host),
            devices=thawed_on,
            address=unit.address,
            port=unit.port,
            timeout_s=operation.thaw_timeout_s,
            chosen=bool(unit.devices),
            compression=descriptor.capsule.units[0].pages.compression,
        ),
        *(
            _started(operation, weights, store, unit, facts, thawed="unlock-cuda" if thawed_on else "thaw")
            if driver == "n580"
            else _woken(weights, operation, store, thawed="unlock-cuda" if devices else "thaw")
        ),
    ]
    context = Context(
        operation="restore",
        gpu=bool(host.gpus),
        workers=len(descriptor.topology.workers),
        native=native,
        store=store,
        reason=weights.reason,
        driver=driver,
        provider=weights.effective if native else "",
        recoverable=native and weights.provider != "native",
    )
    stored = stored_as(descriptor.capsule.units[0].pages.compression)
    pages = Decision(name="pages", requested="", layer="", **stored)
    notes = [
        Decision(name="compatibility", requested="", layer="", effective="admitted", reason=note)
        for note in comparison.notes
    ]
    return Plan(
        operation="restore",
        driver=driver,
        subject=f"{descriptor.engine.kind} {descriptor.engine.model.id} from {artifact.path} on {unit.host}, "
        f"{unit.address}:{unit.port}",
        steps=tuple(steps),
        decisions=(
            cuda_decision(host, captured=bool(captured)),
            *decide(resolved, context),
            pages,
            *notes,
            *([WARM] if operation.state == "warm" else []),
        ),
        choices=(
            Choice(
                name="ports",
                step="stage",
                options=("as captured", "moved"),
                rule="a port of the captured tree that something else uses is moved to a free one, on both ends",
            ),
            *(weights_choices(resolved) if native and not weights.ordered else ()),
            *provider_choices(weights),
        ),
    )


def _further(*, native: bool, planted: bool) -> tuple[str, ...]:
    """Return what else must be there before a keeper is started."""
    return (*(("admit-packs",) if native else ()), *(("caches",) if planted else ()))


def _compared(resolved: ResolvedPolicy, operation: Restore, unit: UnitPlacement, host: HostFacts) -> Comparison:
    artifact = cast("Artifact", operation.artifact)
    (capsule,) = artifact.descriptor.capsule.units
    comparison = artifact.compare(
        Target(units=(target_unit(capsule.unit, host, unit.devices),)), resolved.policy.compatibility
    )
    reasons = [
        *host_problems(resolved, host, unit),
        *namespace_problems(capsule, resolved["process.namespace"], cast("Placement", operation.placement)),
    ]
    what = f"the artifact {artifact.path} cannot be restored on {unit.host}"
    if comparison.mismatches:
        raise CompatibilityError(what, [*comparison.mismatches, *reasons])
    require(what, reasons)
    return comparison


def _started(
    operation: Restore, weights: PlacedWeights, store: str, unit: UnitPlacement, facts: Facts, *, thawed: str
) -> tuple[Step, ...]:
    """Return the steps from a thawed template to an engine that has given the captured answer."""
    artifact = cast("Artifact", operation.artifact)
    stop: Literal["pre_exec", "imported"] = (
        "imported" if artifact.descriptor.compatibility.policy == "target-local-v1" else "pre_exec"
    )
    name = artifact.descriptor.capsule.units[0].unit
    checked: tuple[str, ...] = ("verify",)
    runtime: tuple[StageRuntime, ...] = ()
    if stop == "pre_exec" and finds_activation(artifact.descriptor.engine.environment):
        trees = store_beside(operation, facts, str(artifact.path))
        runtime = (StageRuntime(id="stage-runtime", after=("keeper",), store=trees),)
    if weights.ordered:
        # Nothing compares preverified bytes on their way: their evidence must have been looked at.
        first = ("verify", "verify-packs") if weights.resolved["io.verify_mode"] == "preverified" else ()
        fed: tuple[Step, ...] = start_steps(
            weights.resolved, store, timeout_s=operation.ready_timeout_s, checkpoint=weights.provider != "native"
        )
        start = start_step(unit, name, stop, after=(thawed, "order", *first), provider=weights.provider)
        report = ReportLoad(id="report", after=("ready",), task="start", timeout_s=operation.answer_timeout_s)
        told: tuple[Step, ...] = (report,)
        checked += ("verify-packs", report.id)
    else:
        fed, start, told = verify_steps(artifact), start_step(unit, name, stop, after=(thawed,)), ()
        checked += tuple(step.id for step in fed)
    return (
        *fed,
        *runtime,
        evolve(start, after=(*start.after, *(step.id for step in runtime))),
        AwaitReady(id="ready", after=("start",), timeout_s=operation.ready_timeout_s),
        *told,
        Reconnect(id="reconnect", after=("ready",), timeout_s=RECONNECT_TIMEOUT_S),
        CompareAnswer(id="answer", after=("reconnect", *checked), timeout_s=operation.answer_timeout_s),
        HandOver(id="hand-over", after=("answer",)),
    )


def _woken(weights: PlacedWeights, operation: Restore, store: str, *, thawed: str) -> tuple[Step, ...]:
    """Return the steps from a thawed tree to an engine that has given the captured answer."""
    resolved, native = weights.resolved, weights.native
    reconnected: tuple[Step, ...] = (Reconnect(id="reconnect", after=(thawed,), timeout_s=RECONNECT_TIMEOUT_S),)
    if operation.state == "warm":
        return (*reconnected, LeaveWarm(id="hand-over", after=("reconnect", "verify", "verify-packs")))
    if native:
        # Nothing compares preverified bytes on their way: their evidence must have been looked at.
        verified = ("verify", "verify-packs") if resolved["io.verify_mode"] == "preverified" else ()
        after = ("reconnect", *verified)
        hydrate = hydrate_step(
            resolved,
            store,
            after=after,
            timeout_s=operation.thaw_timeout_s,
            checkpoint=weights.provider != "native",
        )
        reconnected += (hydrate,)
    return (
        *reconnected,
        AwaitReady(id="ready", after=("hydrate" if native else "reconnect",), timeout_s=operation.answer_timeout_s),
        CompareAnswer(
            id="answer",
            after=("ready", "verify", *(("verify-packs",) if native else ())),
            timeout_s=operation.answer_timeout_s,
        ),
        *(materialized := materialize_steps(resolved, store, after="answer", timeout_s=operation.thaw_timeout_s)),
        HandOver(id="hand-over", after=(materialized[-1].id if materialized else "answer",)),
    )
