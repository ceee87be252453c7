"""Where weights are to be, and the steps that bring them there: inside the process image, or in packs outside it.

The one rule: ``native`` that somebody chose is native or refused; ``auto`` is native exactly where the engine has a
memory provider (at capture) or the artifact has packs (at restore).
"""

from __future__ import annotations

import os
from typing import Any, Literal

from attrs import frozen

from coldsnap.admission import SHARED_MEMORY, require
from coldsnap.artifact import Artifact
from coldsnap.behaviour import engine_defaults
from coldsnap.engines.base import Engine
from coldsnap.errors import PayloadMissingError, UnsupportedError
from coldsnap.host.facts import Facts
from coldsnap.operation import Capture, Restore
from coldsnap.plan import Choice
from coldsnap.policy import Policy, ResolvedPolicy
from coldsnap.steps import (
    AdmitPacks,
    HydrateWeights,
    OrderExport,
    OrderHydration,
    PrefetchWeights,
    ReleaseWeights,
    StageStartFiles,
    VerifyPacks,
)

__all__ = [
    "READ_AHEAD",
    "PlacedWeights",
    "at_capture",
    "export_steps",
    "hydrate_step",
    "pack_steps",
    "reading",
    "release_step",
    "start_steps",
    "store_beside",
    "weights_choices",
    "writing",
]

STORE = "store"
READ_AHEAD = ("auto", "python", "buffered")


@frozen(kw_only=True)
class PlacedWeights:
    """What was settled about the weights of one operation.

    Attributes:
        resolved: The policy, with the defaults of such an engine.
        native: Whether they are outside the image.
        reason: Why.
        ordered: Whether the load itself brings them out and in: the engine is started anew from packs.
        provider: Who brings them at a restore: native (packs), recovery (the checkpoint), or either.
        repository: With either: where an absent pack is to be fetched from first.
        expected: What the facts say that either comes to.
    """

    resolved: ResolvedPolicy
    native: bool
    reason: str
    ordered: bool = False
    provider: Literal["native", "either", "recovery"] = "native"
    repository: str = ""
    expected: str = ""

    @property
    def effective(self) -> str:
        """What ``weights.mode`` comes to, in a word."""
        if not self.native:
            return "image"
        return self.expected or ("native" if self.provider == "either" else self.provider)


def at_capture(
    policy: Policy, engine: Engine, *, gpu: bool, captures: bool = True, releasing: bool = True
) -> PlacedWeights:
    """Settle where the weights of an engine go that is launched or captured.

    Args:
        policy: The user's.
        engine: The specification.
        gpu: Whether it is placed on a GPU.
        releasing: False for an engine that runs already and was launched with its weights in the process.
        captures: Whether it is captured, too; a launch throws nothing away.

    Raises:
        UnsupportedError: They are wanted outside the image, and the engine has no memory provider there.
    """
    mode = policy.resolved()["weights.mode"]
    known = engine.world_size == 1 or engine.names_workers
    provider = engine.memory_provider(gpu=gpu) if known and releasing else None
    where = (
        "as it was launched"
        if not releasing
        else ("on a GPU" if gpu else "without a GPU") + (" with several workers" if engine.world_size > 1 else "")
    )
    if mode in ("native", "recovery") and provider is None:
        raise UnsupportedError(
            f"{engine.kind} {engine.model} {where} has no memory whose contents can leave while its addresses stay",
            field="weights.mode",
            works=f'weights.mode = "auto" or "image"{"" if gpu else ", or a host with a GPU"}',
        )
    native = provider is not None and mode != "image"
    if captures and not native and "process.discard" in policy.explicit and policy.resolved()["process.discard"]:
        raise UnsupportedError(
            "a KV cache that is part of the process image cannot be thrown away",
            field="process.discard",
            works='leaving it unset, or weights outside the image (weights.mode = "native")',
        )
    if native:
        reason = f"{engine.kind} {where} has a memory provider ({provider})"
    else:
        reason = "the policy says so" if mode == "image" else f"{engine.kind} {where} has no memory provider"
    return PlacedWeights(
        resolved=policy.resolved(engine_defaults=engine_defaults(native=native, policy=policy)),
        native=native,
        reason=reason,
    )


def store_beside(operation: Capture | Restore, facts: Facts, path: str) -> str:
    """Return the root of the store: the one that was named, else the probed one, else one beside the artifact.

    Args:
        operation: What may name one.
        facts: What may know one.
        path: Of the artifact.
    """
    if operation.store is not None:
        return operation.store
    return facts.store.root if facts.store is not None else os.path.join(os.path.dirname(path), STORE)


def release_step(resolved: ResolvedPolicy, operation: Capture, store: str, *, after: str) -> ReleaseWeights:
    """Return the step that empties the workers' memory.

    Raises:
        AdmissionError: The engine cannot see output or store where it runs, or they are the same place.
    """
    require("weights cannot be released", [*_unseen(resolved, (operation.output, store)), *_same(operation, store)])
    return ReleaseWeights(
        id="release",
        after=(after,),
        output=operation.output,
        store=store,
        discard=resolved["process.discard"],
        recovery=_recording(resolved),
        derived_buffer_max_bytes=resolved["weights.recovery.derived_buffer_max_bytes"],
        verify_model_bytes=resolved["weights.recovery.verify_model_bytes"],
        **writing(resolved),
        timeout_s=operation.dump_timeout_s,
    )


def _recording(resolved: ResolvedPolicy) -> Literal["off", "auto", "required"]:
    if resolved["weights.mode"] == "recovery":
        return "required"
    return "auto" if resolved["weights.recovery.enabled"] else "off"


def writing(resolved: ResolvedPolicy) -> dict[str, Any]:
    """Return the fields of a step that writes: how bytes leave memory."""
    return {
        "backend": resolved["io.capture_backend"],
        "write_mode": resolved["io.hibernate_write_mode"],
        "reuse_blob": resolved["io.reuse_blob"],
        "queue_depth": resolved["io.queue_depth"],
        "chunk_bytes": resolved["io.chunk_bytes"],
        "native_library": resolved["io.native_library"] or "",
        "native_sha256": resolved["io.native_sha256"] or "",
    }


def reading(resolved: ResolvedPolicy, *, fresh: bool) -> dict[str, Any]:
    """Return the fields of a step that reads: how bytes reach memory.

    Args:
        resolved: The policy.
        fresh: Whether the files were written a moment ago; they have no evidence yet, and no gds without one.
    """
    backend = resolved["io.hydration_backend"]
    return {
        "backend": "auto" if fresh and backend == "gds" else backend,
        "read_mode": resolved["io.hibernate_read_mode"],
        "verify_mode": "inline" if fresh else resolved["io.verify_mode"],
        "queue_depth": resolved["io.queue_depth"],
        "chunk_bytes": resolved["io.chunk_bytes"],
    }


def hydrate_step(
    resolved: ResolvedPolicy, store: str, *, after: tuple[str, ...], timeout_s: float, checkpoint: bool = False
) -> HydrateWeights:
    """Return the step that fills the workers' memory.

    Args:
        resolved: The policy.
        store: Where the packs are; empty: what the capture has written a moment ago.
        after: What it waits for.
        timeout_s: Deadline, s.
        checkpoint: Whether the weights may come from there.
    """
    return HydrateWeights(
        id="hydrate",
        after=after,
        store=store,
        **reading(resolved, fresh=not store),
        native_library=resolved["io.native_library"] or "",
        native_sha256=resolved["io.native_sha256"] or "",
        **(_loading(resolved) if checkpoint else {}),
        timeout_s=timeout_s,
    )


def export_steps(
    resolved: ResolvedPolicy, operation: Capture, facts: Facts, *, after: str
) -> tuple[StageStartFiles, OrderExport]:
    """Return the steps by which a load writes what it leaves: what the engine starts with, and the order.

    Raises:
        AdmissionError: The engine cannot see output or store where it runs, or they are the same place.
    """
    store = store_beside(operation, facts, operation.output)
    require("weights cannot be exported", [*_unseen(resolved, (operation.output, store)), *_same(operation, store)])
    stage = StageStartFiles(id="stage-model", after=("admit-engine", "admit-output"), store=store)
    order = OrderExport(
        id="order",
        after=(after,),
        store=store,
        discard=(),
        recovery=_recording(resolved),
        derived_buffer_max_bytes=resolved["weights.recovery.derived_buffer_max_bytes"],
        **writing(resolved),
        timeout_s=operation.dump_timeout_s,
    )
    return stage, order


def start_steps(
    resolved: ResolvedPolicy, store: str, *, timeout_s: float, checkpoint: bool = False
) -> tuple[StageStartFiles, OrderHydration]:
    """Return the steps by which a load reads packs, or the checkpoint where it may; the last is ``order``."""
    return (
        StageStartFiles(id="stage-model", after=("keeper",), store=store),
        OrderHydration(
            id="order",
            after=("stage", "admit-packs", "stage-model"),  # stage writes the directive that this adds to
            store=store,
            **reading(resolved, fresh=False),
            native_library=resolved["io.native_library"] or "",
            native_sha256=resolved["io.native_sha256"] or "",
            **(_loading(resolved) if checkpoint else {}),
            timeout_s=timeout_s,
        ),
    )


def _loading(resolved: ResolvedPolicy) -> dict[str, Any]:
    return {
        "loader_backend": resolved["weights.recovery.loader_backend"],
        "loader_chunk_bytes": resolved["weights.recovery.chunk_bytes"],
        "loader_queue_depth": resolved["weights.recovery.queue_depth"],
        "staging_bytes": resolved["weights.recovery.staging_bytes"],
        "verify_bytes": resolved["weights.recovery.verify_bytes"],
        "verify_model_bytes": resolved["weights.recovery.verify_model_bytes"],
    }


def pack_steps(
    placed: PlacedWeights, artifact: Artifact, store: str, facts: Facts
) -> tuple[AdmitPacks | PrefetchWeights | VerifyPacks, ...]:
    """Return the steps that look at the packs and read them ahead; the first is ``admit-packs``.

    Raises:
        PayloadMissingError: The facts know the store, and it does not have a pack.
        AdmissionError: The restored engine could not see artifact or store.
    """
    resolved = placed.resolved
    require(f"{artifact.path} cannot be restored with its weights", _unseen(resolved, (str(artifact.path), store)))
    if placed.provider == "native":
        _require_known(artifact, store, facts)
    packs = tuple(sorted(artifact.packs))
    preverified = resolved["io.verify_mode"] == "preverified"
    steps: tuple[AdmitPacks | PrefetchWeights | VerifyPacks, ...] = (
        AdmitPacks(
            id="admit-packs",
            after=("admit-artifact",),
            store=store,
            packs=packs,
            evidence=preverified,
            provider=placed.provider,
            repository=placed.repository,
        ),
        VerifyPacks(id="verify-packs", after=("admit-packs",), store=store, mode=resolved["weights.verify"]),
    )
    if resolved["io.hydration_backend"] in READ_AHEAD:
        ahead = placed.provider != "native" and resolved["weights.recovery.loader_backend"] != "direct"
        prefetch = PrefetchWeights(id="prefetch", after=("admit-host", "admit-packs"), store=store, checkpoint=ahead)
        steps += (prefetch,)
    return steps


def weights_choices(resolved: ResolvedPolicy) -> tuple[Choice, ...]:
    """Return what is settled about the weights while the plan runs."""
    if resolved["io.hydration_backend"] != "auto":
        return ()
    rule = "what the page cache holds is read through it, the rest around it where the opened file's filesystem can"
    return (Choice(name="hydration", step="hydrate", options=("direct", "buffered"), rule=rule),)


def _unseen(resolved: ResolvedPolicy, paths: tuple[str, ...]) -> list[str]:
    if resolved["process.namespace"] != "private":
        return []
    return [
        f"{path} lies in {SHARED_MEMORY}, and an engine in private namespaces has one of its own; use another directory"
        for path in paths
        if path.startswith(f"{SHARED_MEMORY}/")
    ]


def _same(operation: Capture, store: str) -> list[str]:
    if os.path.commonpath([operation.output, store]) == operation.output:
        return [f"the store {store} lies in the output {operation.output}; name another store or another output"]
    return []


def _require_known(artifact: Artifact, store: str, facts: Facts) -> None:
    if facts.store is None or facts.store.root != store:
        return
    known = {pack.digest for pack in facts.store.packs}
    for digest in sorted(artifact.packs - known):
        raise PayloadMissingError(
            f"the pack {digest} of {artifact.path} was not in the store {store} when it was probed; bring it there and "
            "probe again, or name another store",
            digest=digest,
        )
