"""Policy, operation and facts come in; a plan comes out, or a refusal with every reason.

The one rule: pure. Nothing here reads a machine, so a plan for a fleet is made on a laptop, and the same arguments give
the same plan, byte for byte.
"""

from __future__ import annotations

from typing import Literal, assert_never, cast

from coldsnap.admission import command_problems, host_problems, namespace_problems, require
from coldsnap.artifact import Artifact, Target
from coldsnap.behaviour import Context, decide, engine_defaults, refuse_without_behaviour, runs_eagerly
from coldsnap.describe import target_unit
from coldsnap.drivers import sequence
from coldsnap.engines.base import Engine, raise_refusals
from coldsnap.engines.specs import spec_to_text
from coldsnap.errors import CompatibilityError, UnsupportedError
from coldsnap.host.facts import Facts, HostFacts
from coldsnap.host.selection import select_driver
from coldsnap.keeper.directive import Endpoint
from coldsnap.operation import (
    Capture,
    Delete,
    EngineHandle,
    Launch,
    Operation,
    Placement,
    Publish,
    Restore,
    Stop,
    UnitPlacement,
    Verify,
)
from coldsnap.plan import Choice, Decision, Plan
from coldsnap.policy import Policy, ResolvedPolicy
from coldsnap.steps import (
    AdmitArtifact,
    AdmitEngine,
    AdmitHost,
    AdmitOutput,
    AdmitPlacement,
    AttachEngine,
    AwaitReady,
    CommitArtifact,
    CompareAnswer,
    HandOver,
    LaunchEngine,
    Quiesce,
    Reconnect,
    RecordAnswer,
    SealArtifact,
    SettleWorkload,
    StartKeeper,
    Step,
    StopEngine,
    VerifyFiles,
)
from coldsnap.upkeep import plan_deletion, plan_publication, plan_verification

__all__ = ["resolve"]

RECONNECT_TIMEOUT_S = 30.0
UNIT = "unit-0"


def resolve(policy: Policy, operation: Operation, facts: Facts) -> Plan:
    """Turn what is wanted into what will be done.

    Args:
        policy: What the user wants.
        operation: Launch, Capture, Restore, Stop, Verify, Delete or Publish.
        facts: What the machines are; see ``probe``.

    Returns:
        The plan. ``execute`` runs it.

    Raises:
        AdmissionError: Not on these machines, with every reason. Its subclasses say what kind: UnsupportedError (this
            version cannot), CompatibilityError (the artifact was made for something else).
        PolicyError: The policy's layers together break a rule.
    """
    refuse_without_behaviour(policy)
    resolved = policy.resolved(engine_defaults=engine_defaults())
    match operation:
        case Launch():
            return _launch(resolved, operation, facts)
        case Capture():
            return _capture(resolved, operation, facts)
        case Restore():
            return _restore(resolved, operation, facts)
        case Stop():
            return _stop(operation)
        case Verify():
            return plan_verification(resolved, operation)
        case Delete():
            return plan_deletion(operation)
        case Publish():
            return plan_publication(operation)
        case _:
            assert_never(operation)


# -- launch -----------------------------------------------------------------------------------------------------------


def _launch(resolved: ResolvedPolicy, operation: Launch, facts: Facts) -> Plan:
    engine = cast("Engine", operation.engine)
    unit, host = _placed(operation.placement, facts)
    require(f"{engine.kind} cannot be launched", host_problems(resolved, host, unit))
    driver, why = _driver(resolved, facts, unit, engine.world_size)
    _devices(unit, host, engine.world_size)
    steps = [
        *_launch_steps(resolved, engine, operation.placement, host),
        AwaitReady(id="ready", after=("launch",), timeout_s=operation.ready_timeout_s),
        HandOver(id="hand-over", after=("ready",)),
    ]
    context = Context(operation="launch", gpu=bool(host.gpus), workers=engine.world_size)
    return Plan(
        operation="launch",
        driver=driver,
        subject=f"{engine.kind} {engine.model} on {unit.host}, {unit.address}:{unit.port}",
        steps=tuple(steps),
        decisions=(_chosen(driver, why), *(d for d in decide(resolved, context) if d.name == "process.namespace")),
    )


def _launch_steps(
    resolved: ResolvedPolicy, engine: Engine, placement: Placement, host: HostFacts, after: tuple[str, ...] = ()
) -> list[Step]:
    unit, gpu = placement.front, bool(host.gpus)
    raise_refusals(f"{engine.kind} {engine.model}", engine.refusals(gpu=gpu))
    if runs_eagerly(resolved, Context(operation="launch", gpu=gpu, workers=engine.world_size)):
        engine = engine.eager()
    endpoint = Endpoint(host=unit.address, port=unit.port)
    command = engine.launch_command(endpoint, environ={}, gpu=gpu)
    require(f"{engine.kind} {engine.model} cannot be launched", command_problems(resolved, command))
    return [
        _admit_host(host, resolved["process.namespace"]),
        AdmitEngine(id="admit-engine", kind=engine.kind, python=engine.python, model=engine.model, revision=""),
        AdmitPlacement(id="admit-placement", address=unit.address, port=unit.port),
        LaunchEngine(
            id="launch",
            after=("admit-host", "admit-engine", "admit-placement", *after),
            kind=engine.kind,
            argv=command.argv,
            environment=tuple(sorted(command.env.items())),
            cwd=command.cwd,
            namespace=resolved["process.namespace"],
            name=placement.name or "",
            run_dir=placement.run_dir or "",
            address=unit.address,
            port=unit.port,
            spec=spec_to_text(engine),
        ),
    ]


# -- capture ----------------------------------------------------------------------------------------------------------


def _capture(resolved: ResolvedPolicy, operation: Capture, facts: Facts) -> Plan:
    if isinstance(operation.engine, EngineHandle):
        host = facts.host("local")
        require("this host cannot capture", host_problems(resolved, host, None))
        _require_as_launched(resolved, host)
        first: list[Step] = [
            _admit_host(host, resolved["process.namespace"]),
            AttachEngine(id="attach", after=("admit-host", "admit-output"), run_dir=str(operation.engine.run_dir)),
        ]
        ready_after, subject, workers, unit = "attach", f"the engine in {operation.engine.run_dir}", 1, None
    else:
        engine = cast("Engine", operation.engine)
        placement = cast("Placement", operation.placement)
        unit, host = _placed(placement, facts)
        require(f"{engine.kind} cannot be captured", host_problems(resolved, host, unit))
        first = _launch_steps(resolved, engine, placement, host, after=("admit-output",))
        ready_after, workers = "launch", engine.world_size
        subject = f"{engine.kind} {engine.model} on {unit.host}, {unit.address}:{unit.port}"
    driver, why = _driver(resolved, facts, unit, workers)
    context = Context(operation="capture", gpu=bool(host.gpus), workers=workers)
    decisions = decide(resolved, context)
    steps = [
        AdmitOutput(id="admit-output", output=operation.output),
        *first,
        AwaitReady(id="ready", after=(ready_after,), timeout_s=operation.ready_timeout_s),
        RecordAnswer(
            id="answer",
            after=("ready",),
            prompt=operation.prompt,
            tokens=operation.answer_tokens,
            timeout_s=operation.quiesce_timeout_s,
        ),
        Quiesce(id="quiesce", after=("answer", "admit-output"), timeout_s=operation.quiesce_timeout_s),
        *sequence.capture_steps(
            after="quiesce",
            unit=UNIT,
            criu=_criu_path(host),
            devices=_devices(unit, host, workers),
            leave="running" if operation.then == "keep" else "stopped",
            timeout_s=operation.dump_timeout_s,
        ),
        SealArtifact(
            id="seal",
            after=("dump",),
            output=operation.output,
            weights="image",
            image_compression="none",
        ),
        CommitArtifact(id="commit", after=("seal",), output=operation.output),
        SettleWorkload(
            id="settle", after=("commit", "resume") if operation.then == "keep" else ("commit",), then=operation.then
        ),
    ]
    return Plan(
        operation="capture",
        driver=driver,
        subject=f"{subject} into {operation.output}",
        steps=tuple(steps),
        decisions=(_chosen(driver, why), _cuda(host), *decisions),
    )


# -- restore ----------------------------------------------------------------------------------------------------------


def _restore(resolved: ResolvedPolicy, operation: Restore, facts: Facts) -> Plan:
    artifact = cast("Artifact", operation.artifact)
    descriptor = artifact.descriptor
    unit, host = _placed(operation.placement, facts)
    (capsule,) = descriptor.capsule.units
    comparison = artifact.compare(
        Target(units=(target_unit(capsule.unit, host, unit.devices),)), resolved.policy.compatibility
    )
    namespace, placement = resolved["process.namespace"], operation.placement
    reasons = [*host_problems(resolved, host, unit), *namespace_problems(capsule, namespace, placement)]
    if comparison.mismatches:
        raise CompatibilityError(
            f"the artifact {artifact.path} cannot be restored on {unit.host}", [*comparison.mismatches, *reasons]
        )
    require(f"the artifact {artifact.path} cannot be restored on {unit.host}", reasons)
    captured = descriptor.compatibility.units[0].devices
    devices = unit.devices if captured and unit.devices else _devices(unit, host, len(captured))
    if len(devices) != len(captured):
        require(
            f"the artifact {artifact.path} cannot be restored on {unit.host}",
            [f"it was captured on {len(captured)} GPUs, the placement names {len(devices)}; name as many"],
        )
    steps = [
        _admit_host(host, resolved["process.namespace"]),
        AdmitPlacement(id="admit-placement", address=unit.address, port=unit.port),
        AdmitArtifact(
            id="admit-artifact",
            artifact=str(artifact.path),
            digest=artifact.digest,
            kernel=resolved["compatibility.kernel"],
            enforce_captured_driver_floor=resolved["compatibility.enforce_captured_driver_floor"],
        ),
        StartKeeper(
            id="keeper",
            after=("admit-host", "admit-placement", "admit-artifact"),
            namespace=namespace,
            name=placement.name or "",
            run_dir=placement.run_dir or "",
        ),
        VerifyFiles(
            id="verify", after=("admit-artifact",), artifact=str(artifact.path), mode=resolved["weights.verify"]
        ),
        *sequence.restore_steps(
            after="keeper",
            unit=capsule.unit,
            criu=_criu_path(host),
            devices=devices,
            address=unit.address,
            port=unit.port,
            timeout_s=operation.thaw_timeout_s,
            chosen=bool(unit.devices),
        ),
        Reconnect(id="reconnect", after=("thaw" if not devices else "unlock-cuda",), timeout_s=RECONNECT_TIMEOUT_S),
        AwaitReady(id="ready", after=("reconnect",), timeout_s=operation.answer_timeout_s),
        CompareAnswer(id="answer", after=("ready", "verify"), timeout_s=operation.answer_timeout_s),
        HandOver(id="hand-over", after=("answer",)),
    ]
    context = Context(operation="restore", gpu=bool(host.gpus), workers=len(descriptor.topology.workers))
    notes = [
        Decision(name="compatibility", requested="", layer="", effective="admitted", reason=note)
        for note in comparison.notes
    ]
    return Plan(
        operation="restore",
        driver=descriptor.snapshot_driver.id,
        subject=f"{descriptor.engine.kind} {descriptor.engine.model.id} from {artifact.path} on {unit.host}, "
        f"{unit.address}:{unit.port}",
        steps=tuple(steps),
        decisions=(_cuda(host, captured=bool(captured)), *decide(resolved, context), *notes),
        choices=(
            Choice(
                name="ports",
                step="stage",
                options=("as captured", "moved"),
                rule="a port of the captured tree that something else uses is moved to a free one, on both ends",
            ),
        ),
    )


def _stop(operation: Stop) -> Plan:
    run_dir = str(operation.engine.run_dir)
    return Plan(
        operation="stop",
        driver="none",
        subject=f"the engine in {run_dir}",
        steps=(StopEngine(id="stop", run_dir=run_dir, grace_s=operation.grace_s),),
    )


# -- shared -----------------------------------------------------------------------------------------------------------


def _placed(placement: Placement, facts: Facts) -> tuple[UnitPlacement, HostFacts]:
    if len(placement.units) > 1:
        raise UnsupportedError(
            f"a placement of {len(placement.units)} units", field="placement.units", works="one unit on one host"
        )
    return placement.front, facts.host(placement.front.host)


def _driver(resolved: ResolvedPolicy, facts: Facts, unit: UnitPlacement | None, workers: int) -> tuple[str, str]:
    rule = resolved["compatibility.driver"]
    hosts = ["local" if unit is None else unit.host]
    driver, why = select_driver(facts, hosts, compatibility_driver=rule, workers=workers)
    if driver != "n610":
        raise UnsupportedError(
            f"the snapshot driver would be {driver}: {why}",
            field="compatibility.driver",
            works='NVIDIA driver >= 610; compatibility.driver = "probed" with one worker; a host without GPU',
        )
    return driver, why


def _chosen(driver: str, why: str) -> Decision:
    return Decision(name="driver", requested="", layer="", effective=driver, reason=why)


def _cuda(host: HostFacts, *, captured: bool = True) -> Decision:
    if host.gpus and not captured:
        effective, reason = "left out", "the artifact was captured on a host without GPU"
    elif host.gpus:
        effective, reason = "in the plan", f"{host.name} has {len(host.gpus)} GPU{'s' * (len(host.gpus) > 1)}"
    else:
        effective, reason = "left out", f"no GPU on {host.name}: {host.gpu_reason}"
    return Decision(name="cuda steps", requested="", layer="", effective=effective, reason=reason)


def _devices(unit: UnitPlacement | None, host: HostFacts, workers: int) -> tuple[int, ...]:
    first = tuple(gpu.index for gpu in host.gpus)[:workers]
    if unit is not None and unit.devices and unit.devices != first:
        raise UnsupportedError(
            f"the GPUs {', '.join(map(str, unit.devices))}, where the engine would take {', '.join(map(str, first))}",
            field="placement.devices",
            works="no devices in the placement; CUDA_VISIBLE_DEVICES chooses which GPUs an engine sees",
        )
    return first


def _admit_host(host: HostFacts, namespace: Literal["private", "host"]) -> AdmitHost:
    criu = host.criu
    return AdmitHost(
        id="admit-host",
        host=host.name,
        boot_id=host.boot_id,
        criu=_criu_path(host),
        criu_digest="" if criu is None else criu.build_digest,
        namespace=namespace,
    )


def _criu_path(host: HostFacts) -> str:
    return "" if host.criu is None else host.criu.path


def _require_as_launched(resolved: ResolvedPolicy, host: HostFacts) -> None:
    if resolved["graphs.policy"] == "disabled" and host.gpus:
        raise UnsupportedError(
            "an engine that runs already cannot be made to run eagerly",
            field="graphs.policy",
            works='launching it with graphs.policy = "disabled", then capturing the handle with "auto"',
        )
