"""Plans of a launch, and of the launch that a capture begins with."""

from __future__ import annotations

from typing import Literal, cast

from attrs import asdict

from coldsnap.admission import command_problems, host_problems, require
from coldsnap.behaviour import Context, runs_eagerly
from coldsnap.engines import settings
from coldsnap.engines.base import Engine, raise_refusals
from coldsnap.engines.caches import planned
from coldsnap.engines.specs import spec_to_text
from coldsnap.host.facts import Facts, HostFacts
from coldsnap.keeper.directive import Endpoint
from coldsnap.operation import Launch, Placement
from coldsnap.plan import Plan
from coldsnap.planning.caches import cache_environment, require_bound
from coldsnap.planning.decisions import decide
from coldsnap.planning.placing import admit_host, chosen_driver, devices_for, driver_decision, placed
from coldsnap.planning.weights import PlacedWeights, at_capture
from coldsnap.policy import Policy
from coldsnap.steps import AdmitEngine, AdmitPlacement, AwaitReady, HandOver, LaunchEngine, LaunchTemplate, Step

__all__ = ["launch_steps", "plan_launch"]

_TOLD = ("weights.mode", "process.namespace")


def plan_launch(policy: Policy, operation: Launch, facts: Facts) -> Plan:
    """Plan a launch.

    Raises:
        AdmissionError: Not on this host, with every reason.
    """
    unit, host = placed(operation.placement, facts)
    gpu = bool(host.gpus)
    engine = cast("Engine", operation.engine)
    weights = at_capture(policy, engine, gpu=gpu, captures=False)
    resolved = weights.resolved
    require(f"{engine.kind} cannot be launched", host_problems(resolved, host, unit))
    driver, why = chosen_driver(policy, facts, unit, engine.world_size)
    devices_for(unit, host, engine.world_size)
    steps = [
        *launch_steps(weights, engine, operation.placement, host, driver=driver),
        AwaitReady(id="ready", after=("launch",), timeout_s=operation.ready_timeout_s),
        HandOver(id="hand-over", after=("ready",)),
    ]
    context = Context(
        operation="launch",
        gpu=gpu,
        workers=engine.world_size,
        native=weights.native,
        reason=weights.reason,
    )
    return Plan(
        operation="launch",
        driver=driver,
        subject=f"{engine.kind} {engine.model} on {unit.host}, {unit.address}:{unit.port}",
        steps=tuple(steps),
        decisions=(driver_decision(driver, why), *(d for d in decide(resolved, context) if d.name in _TOLD)),
    )


def launch_steps(
    weights: PlacedWeights,
    engine: Engine,
    placement: Placement,
    host: HostFacts,
    after: tuple[str, ...] = (),
    *,
    driver: str,
    stop: Literal["", "pre_exec", "imported"] = "",
) -> list[Step]:
    """Return the steps from nothing to a started engine; the last is ``launch``.

    Raises:
        AdmissionError: The engine or its command is refused, with every reason.
    """
    unit, gpu, resolved = placement.front, bool(host.gpus), weights.resolved
    raise_refusals(f"{engine.kind} {engine.model}", engine.refusals(gpu=gpu))
    if runs_eagerly(resolved, Context(operation="launch", gpu=gpu, workers=engine.world_size, driver=driver)):
        engine = engine.eager()
    endpoint = Endpoint(host=unit.address, port=unit.port)
    # With EXPORT_MODEL_PAYLOAD among them (specs.RELEASING), without which no load is observed.
    told = settings.project(resolved.policy, cast("settings.Engine", engine.kind), {}) if weights.native else {}
    caches = cache_environment(resolved, engine)
    command = engine.launch_command(
        endpoint, environ={**told, **caches, **(planned(engine.kind) if caches else {})}, gpu=gpu
    )
    require_bound(caches, command.env)
    require(f"{engine.kind} {engine.model} cannot be launched", command_problems(resolved, command))
    environment = {**command.env, **(engine.imported_environment if stop == "imported" else {})}
    launch = LaunchEngine(
        id="launch",
        after=("admit-host", "admit-engine", "admit-placement", *after),
        kind=engine.kind,
        argv=command.argv,
        environment=tuple(sorted(environment.items())),
        cwd=command.cwd,
        namespace=resolved["process.namespace"],
        name=placement.name or "",
        run_dir=placement.run_dir or "",
        address=unit.address,
        port=unit.port,
        spec=spec_to_text(engine),
    )
    return [
        admit_host(host, resolved["process.namespace"]),
        AdmitEngine(id="admit-engine", kind=engine.kind, python=engine.python, model=engine.model, revision=""),
        AdmitPlacement(id="admit-placement", address=unit.address, port=unit.port),
        LaunchTemplate(stop=stop, **asdict(launch)) if stop else launch,
    ]
