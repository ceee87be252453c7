"""What a plan with the driver n580 has of its own: where a template stops, its steps, and where weights come from.

The one rule: pure; and whatever a template cannot do is refused by the leaf that asks for it.
"""

from __future__ import annotations

from typing import Literal

from attrs import asdict, evolve

from coldsnap.artifact import Artifact
from coldsnap.behaviour import engine_defaults
from coldsnap.drivers import sequence
from coldsnap.engines.base import Engine
from coldsnap.errors import UnsupportedError
from coldsnap.operation import Capture, Restore, UnitPlacement
from coldsnap.planning.weights import PlacedWeights, reading, require_places, writing
from coldsnap.policy import Policy, ResolvedPolicy
from coldsnap.steps import (
    CheckpointCuda,
    DumpTemplate,
    ExportLoad,
    FillLoad,
    LockCuda,
    ProveTemplate,
    ReportLoad,
    RestoreCuda,
    StartEngine,
    Step,
    UnlockCuda,
    VerifyCheckpoint,
)

__all__ = [
    "capture_weights",
    "export_steps",
    "fill_steps",
    "refuse_for_driver",
    "refuse_other_driver",
    "start_step",
    "stop_of",
    "template_steps",
    "verify_steps",
]

REPORT_S = 60.0
FROM_PACKS = frozenset({"vllm"})
"""Kinds of engines that have the load format ``coldsnap``."""

STAND_STILL_S = 300.0
"""How long the import of an engine may take: more than a minute from a cold disk."""

_ONLY_N580 = {
    "process.artifact_scope": ("target-local", "portable"),
    "graphs.policy": ("recreate-from-plan", "auto or disabled"),
}


def refuse_for_driver(policy: Policy, driver: str) -> None:
    """Refuse what somebody chose and only the other driver does.

    Raises:
        UnsupportedError: With the leaf.
    """
    resolved = policy.resolved()
    for path, (value, works) in _ONLY_N580.items():
        if driver != "n580" and path in policy.explicit and resolved[path] == value:
            raise UnsupportedError(
                f"{path} = {value!r} belongs to templates, and the snapshot driver is {driver}",
                field=path,
                works=f'compatibility.driver = "n580", or {path} = {works}',
            )


def stop_of(resolved: ResolvedPolicy, engine: Engine) -> Literal["pre_exec", "imported"]:
    """Return where a template stops.

    Raises:
        UnsupportedError: It is to have imported an engine that does not say what there is to import.
    """
    if resolved["process.artifact_scope"] == "portable":
        return "pre_exec"
    if not engine.imported:
        raise UnsupportedError(
            f"{engine.kind} does not say what a template could import",
            field="process.artifact_scope",
            works='process.artifact_scope = "portable"',
        )
    return "imported"


def capture_weights(policy: Policy, engine: Engine) -> PlacedWeights:
    """Settle where the weights of an engine go that is started out of a template.

    Raises:
        UnsupportedError: They are wanted in the process image, or in packs that no load of this engine can read.
    """
    mode = policy.resolved()["weights.mode"]
    native = engine.kind in FROM_PACKS and mode != "image"
    if mode == "native" and not native:
        raise UnsupportedError(
            f"no load of {engine.kind} reads a pack",
            field="weights.mode",
            works='weights.mode = "auto", with which an engine that is started loads its checkpoint',
        )
    if mode == "image":
        raise UnsupportedError(
            "the process image of a template has no weights",
            field="weights.mode",
            works='weights.mode = "auto", or another compatibility.driver',
        )
    if "process.discard" in policy.explicit and not policy.resolved()["process.discard"]:
        raise UnsupportedError(
            "a template has no KV cache that could be kept", field="process.discard", works='["kv_cache"]'
        )
    reason = f"the load of {engine.kind} exports what it leaves" if native else f"no load of {engine.kind} reads a pack"
    resolved = policy.resolved(engine_defaults=engine_defaults(native=native))
    return PlacedWeights(resolved=resolved, native=native, reason=reason)


def refuse_other_driver(policy: Policy, artifact: Artifact) -> None:
    """Refuse a policy that asks for another driver than the artifact has, or for what that one does not do.

    Raises:
        UnsupportedError: With the leaf.
    """
    driver = artifact.descriptor.snapshot_driver.id
    if policy.resolved()["compatibility.driver"] == "n580" != driver:
        raise UnsupportedError(
            f"{artifact.path} was captured with {driver}",
            field="compatibility.driver",
            works='compatibility.driver = "release", or an artifact that was captured with n580',
        )


def template_steps(
    operation: Capture, unit: str, criu: str, stop: Literal["pre_exec", "imported"], devices: tuple[int, ...]
) -> tuple[Step, ...]:
    """Return the steps from a launched template to its image, and to where it can go on after the last.

    Importing an engine opens the driver, without a context; such descriptors leave a process and come back by the
    driver's own checkpoint, which takes milliseconds.
    """
    timeout_s = operation.dump_timeout_s
    prove = ProveTemplate(id="prove", after=("launch",), stop=stop, timeout_s=STAND_STILL_S)
    dump = DumpTemplate(id="dump", after=("prove",), unit=unit, criu=criu, stop=stop, timeout_s=timeout_s)
    if stop == "pre_exec" or not devices:
        return (prove, dump)
    return (
        prove,
        LockCuda(id="lock-cuda", after=("prove",), devices=devices, timeout_s=sequence.CUDA_TIMEOUT_S),
        CheckpointCuda(id="checkpoint-cuda", after=("lock-cuda",), timeout_s=timeout_s),
        evolve(dump, after=("checkpoint-cuda",)),
        RestoreCuda(id="restore-cuda", after=("dump",), devices=devices, timeout_s=timeout_s),
        UnlockCuda(id="unlock-cuda", after=("restore-cuda",), timeout_s=sequence.CUDA_TIMEOUT_S),
    )


def start_step(
    placed: UnitPlacement, unit: str, stop: Literal["pre_exec", "imported"], *, after: tuple[str, ...]
) -> StartEngine:
    """Return the step that lets a template become an engine that loads its checkpoint."""
    return StartEngine(
        id="start",
        after=after,
        unit=unit,
        stop=stop,
        address=placed.address,
        port=placed.port,
        provider="checkpoint",
        devices=placed.devices,
    )


def export_steps(
    weights: PlacedWeights, operation: Capture, store: str, start: StartEngine
) -> tuple[ExportLoad, ReportLoad]:
    """Return the steps that start an engine whose load is exported, and take what it wrote once it has answered.

    Raises:
        AdmissionError: The engine cannot see output or store where it runs, or they are the same place.
    """
    require_places(weights.resolved, operation, store)
    exported = ExportLoad(
        **asdict(start),
        output=operation.output,
        store=store,
        discard=(),
        **writing(weights.resolved),
        timeout_s=operation.ready_timeout_s,
    )
    return exported, ReportLoad(id="report", after=("answer",), task="export", timeout_s=REPORT_S)


def fill_steps(
    resolved: ResolvedPolicy, operation: Restore, store: str, start: StartEngine
) -> tuple[FillLoad, ReportLoad]:
    """Return the steps that start an engine whose load reads packs, and take what it read once it is ready."""
    filled = FillLoad(
        **{**asdict(start), "provider": "native"},
        store=store,
        **reading(resolved, fresh=False),
        native_library=resolved["io.native_library"] or "",
        native_sha256=resolved["io.native_sha256"] or "",
        timeout_s=operation.ready_timeout_s,
    )
    return filled, ReportLoad(id="report", after=("ready",), task="start", timeout_s=REPORT_S)


def verify_steps(artifact: Artifact) -> tuple[VerifyCheckpoint, ...]:
    """Return the steps beside the load that say whether it loads what was captured."""
    revision = artifact.descriptor.engine.model.revision
    return (VerifyCheckpoint(id="verify-checkpoint", after=("admit-artifact",), revision=revision),)
