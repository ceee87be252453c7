"""What a plan with the driver n580 has of its own: where a template stops, its steps, and where weights come from.

The one rule: pure; and whatever a template cannot do is refused by the leaf that asks for it.
"""

from __future__ import annotations

from typing import Literal

from attrs import evolve

from coldsnap.artifact import Artifact
from coldsnap.behaviour import engine_defaults
from coldsnap.drivers import sequence
from coldsnap.engines.base import Engine, StartsFromPacks
from coldsnap.errors import UnsupportedError
from coldsnap.operation import Capture, UnitPlacement
from coldsnap.planning.weights import PlacedWeights, at_capture
from coldsnap.policy import Policy, ResolvedPolicy
from coldsnap.steps import (
    CheckpointCuda,
    DumpTemplate,
    LockCuda,
    ProveTemplate,
    RestoreCuda,
    StartEngine,
    Step,
    UnlockCuda,
    VerifyCheckpoint,
)

__all__ = [
    "capture_weights",
    "refuse_for_driver",
    "refuse_other_driver",
    "start_step",
    "stop_of",
    "template_steps",
    "verify_steps",
]

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


def capture_weights(policy: Policy, engine: Engine, *, gpu: bool) -> PlacedWeights:
    """Settle where the weights of an engine go that is started out of a template.

    Raises:
        UnsupportedError: They are wanted in the process image, or outside it where there is no memory provider.
    """
    exports = isinstance(engine, StartsFromPacks) and engine.exports
    if (mode := policy.resolved()["weights.mode"]) == "image" or (mode == "recovery" and not exports):
        raise UnsupportedError(
            "the process image of a template has no weights",
            field="weights.mode",
            works='weights.mode = "auto", or another compatibility.driver',
        )
    if "process.discard" in policy.explicit and not policy.resolved()["process.discard"]:
        raise UnsupportedError(
            "a template has no KV cache that could be kept", field="process.discard", works='["kv_cache"]'
        )
    if exports:
        return PlacedWeights(
            resolved=policy.resolved(engine_defaults=engine_defaults(native=True, policy=policy)),
            native=True,
            ordered=True,
            reason=f"{engine.kind} can be started anew from packs",
        )
    return at_capture(policy, engine, gpu=gpu, captures=False)


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
    placed: UnitPlacement,
    unit: str,
    stop: Literal["pre_exec", "imported"],
    *,
    after: tuple[str, ...],
    provider: Literal["checkpoint", "native", "recovery", "either"] = "checkpoint",
) -> StartEngine:
    """Return the step that lets a template become its engine."""
    return StartEngine(
        id="start",
        after=after,
        unit=unit,
        stop=stop,
        address=placed.address,
        port=placed.port,
        provider=provider,
        devices=placed.devices,
    )


def verify_steps(artifact: Artifact) -> tuple[VerifyCheckpoint, ...]:
    """Return the steps beside the load that say whether it loads what was captured."""
    revision = artifact.descriptor.engine.model.revision
    return (VerifyCheckpoint(id="verify-checkpoint", after=("admit-artifact",), revision=revision),)
