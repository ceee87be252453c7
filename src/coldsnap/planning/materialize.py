"""Plans that give a store its packs again: at the end of a restore, or of an engine that serves.

The one rule: nothing is written that an artifact does not name.
"""

from __future__ import annotations

import os
from typing import cast

from coldsnap.artifact import Artifact
from coldsnap.behaviour import engine_defaults
from coldsnap.errors import UnsupportedError
from coldsnap.host.facts import Facts
from coldsnap.operation import EngineHandle, Materialize
from coldsnap.plan import Decision, Plan
from coldsnap.planning.sleep import memory_provider
from coldsnap.planning.weights import STORE
from coldsnap.policy import Policy, ResolvedPolicy
from coldsnap.steps import MaterializeEngine, MaterializePacks, OpenArtifact, RepackCheckpoint

__all__ = ["materialize_steps", "plan_materialization", "require_materializable", "require_warm"]

POLICY = "weights.native.materialize"


def require_materializable(value: str, artifact: Artifact) -> None:
    """Refuse to write packs of an artifact that names none, or out of an engine that cannot be read while it serves.

    Args:
        value: ``weights.native.materialize``.
        artifact: What is restored.

    Raises:
        UnsupportedError: It has its weights in the image, or is one of SGLang.
    """
    if value != "off" and artifact.descriptor.engine.kind == "sglang":
        raise UnsupportedError(
            f"{artifact.path} is of SGLang, whose memory changes hands in its scheduler's own pass alone",
            field=POLICY,
            works='"off": a pack that is staged in the store is used',
        )
    if value != "off" and artifact.descriptor.snapshot_driver.id == "n580":
        raise UnsupportedError(
            f"the engine of {artifact.path} is started anew, and its memory is not what its load has left",
            field=POLICY,
            works='"off", and Materialize of the artifact, which makes the packs of its checkpoint',
        )
    if value != "off" and artifact.descriptor.weights.payloads is None:
        raise UnsupportedError(
            f"{artifact.path} names no pack that could be written",
            field=POLICY,
            works='"off", or an artifact with packs',
        )


def require_warm(resolved: ResolvedPolicy, artifact: Artifact, *, driver: str, native: bool) -> None:
    """Refuse a warm restore of what has nothing to wait for.

    Raises:
        UnsupportedError: The weights are in the image, the driver has no warm state, or packs are to be written.
    """
    if not native or driver != "n610":
        why = "come back with its process image" if not native else f"are brought by the driver {driver} as it starts"
        raise UnsupportedError(
            f"a warm restore of {artifact.path}, whose weights {why}",
            field="state",
            works='state = "running", Prepare, or an artifact of n610 with packs',
        )
    if resolved[POLICY] != "off":
        raise UnsupportedError(
            "a warm engine has no bytes yet that packs could be written from",
            field=POLICY,
            works='"off", and a value other than that when the warm engine is restored to running',
        )


def materialize_steps(
    resolved: ResolvedPolicy, store: str, *, after: str, timeout_s: float
) -> tuple[MaterializePacks, ...]:
    """Return what a restore does about packs that the store lacks, once the engine has given its first answer."""
    if resolved[POLICY] == "off":
        return ()
    step = MaterializePacks(
        id="materialize",
        after=(after,),
        store=store,
        wait=resolved[POLICY] == "required",
        native_library=resolved["io.native_library"] or "",
        native_sha256=resolved["io.native_sha256"] or "",
        timeout_s=timeout_s,
    )
    return (step,)


def plan_materialization(policy: Policy, operation: Materialize, facts: Facts) -> Plan:
    """Plan that a restored engine writes its packs, or that they are made of the checkpoint.

    Raises:
        UnsupportedError: The engine has no memory provider, or was not restored from an artifact; or the artifact
            names no packs, or lists no copies of its load.
    """
    if not isinstance(operation.subject, EngineHandle):
        return _plan_repacking(operation, facts)
    resolved = policy.resolved(engine_defaults=engine_defaults(native=True, policy=policy))
    run_dir, labels = str(operation.subject.run_dir), operation.subject.labels
    provider = memory_provider(policy, operation.subject, facts)
    if "artifact" not in labels:
        raise UnsupportedError(
            f"the engine in {run_dir} was launched and not restored, so no artifact says which pack it has",
            field="engine",
            works="an engine that was restored; this one can be captured (Capture)",
        )
    artifact = labels["artifact"]
    store, why = _store(operation, facts, artifact)
    step = MaterializeEngine(
        id="materialize",
        run_dir=run_dir,
        artifact=artifact,
        store=store,
        wait=operation.wait,
        native_library=resolved["io.native_library"] or "",
        native_sha256=resolved["io.native_sha256"] or "",
        timeout_s=operation.timeout_s,
    )
    return Plan(
        operation="materialize",
        driver="none",
        subject=f"the engine in {run_dir}",
        steps=(step,),
        decisions=(
            Decision(name="memory provider", requested="", layer="", effective=provider, reason="as it was launched"),
            Decision(name="store", requested="", layer="", effective=store, reason=why),
        ),
    )


def _plan_repacking(operation: Materialize, facts: Facts) -> Plan:
    artifact = cast("Artifact", operation.subject)
    weights = artifact.descriptor.weights
    if weights.payloads is None:
        raise UnsupportedError(
            f"{artifact.path} names no pack that could be written", field="artifact", works="an artifact with packs"
        )
    if weights.recovery is None:
        raise UnsupportedError(
            f"{artifact.path} does not say how its checkpoint was loaded, so no pack can be made of it",
            field="artifact",
            works="an artifact with a recovery manifest, or Materialize of an engine that was restored from this one",
        )
    store, why = _store(operation, facts, str(artifact.path))
    source = f"{weights.recovery.model_id} at {weights.recovery.revision}"
    return Plan(
        operation="materialize",
        driver="none",
        subject=f"{artifact.descriptor.engine.kind} {artifact.descriptor.engine.model.id} in {artifact.path}",
        steps=(
            OpenArtifact(id="open", artifact=str(artifact.path), digest=artifact.digest),
            RepackCheckpoint(id="materialize", after=("open",), store=store),
        ),
        decisions=(
            Decision(name="source", requested="", layer="", effective=source, reason="there is no engine"),
            Decision(name="store", requested="", layer="", effective=store, reason=why),
        ),
    )


def _store(operation: Materialize, facts: Facts, artifact: str) -> tuple[str, str]:
    """Return the root of the store that gets the packs, and why that one."""
    if operation.store is not None:
        return operation.store, "the operation names it"
    if facts.store is not None:
        return facts.store.root, "it was probed"
    return os.path.join(os.path.dirname(artifact), STORE), "beside the artifact"
