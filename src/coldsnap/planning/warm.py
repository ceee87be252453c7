"""Plans of what is done ahead: a preparation, a warm restore, and the way from warm to running.

The one rule: what is done ahead refuses what the restore would refuse, since it is planned by the same functions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, cast

from attrs import evolve

from coldsnap.artifact import Artifact
from coldsnap.behaviour import engine_defaults
from coldsnap.errors import AdmissionError, UnsupportedError
from coldsnap.host.facts import Facts
from coldsnap.operation import EngineHandle, Prepare, Restore
from coldsnap.plan import Choice, Decision, Plan
from coldsnap.planning.materialize import materialize_steps
from coldsnap.planning.placing import admit_host
from coldsnap.planning.restore import plan_restore
from coldsnap.planning.selecting import EITHER_RULE, Source, configured_repository, fetched_from
from coldsnap.planning.sleep import memory_provider
from coldsnap.planning.weights import READ_AHEAD, STORE, hydrate_step, store_beside
from coldsnap.policy import Policy
from coldsnap.steps import (
    AdmitPacks,
    AdmitPlacement,
    AdmitWarm,
    AwaitReady,
    CompareAnswer,
    FetchPacks,
    HandOver,
    PlantCaches,
    PrefetchWeights,
    ReadAhead,
    Step,
    TakeWarm,
    VerifyFiles,
    VerifyPacks,
)

__all__ = ["plan_preparation", "plan_running"]

TAKE_TIMEOUT_S = 30.0
FETCH = "fetch-packs"
PROVIDERS: Mapping[str, Literal["native", "either", "recovery"]] = {"native": "native", "recovery": "recovery"}


def plan_preparation(policy: Policy, operation: Prepare, facts: Facts) -> Plan:
    """Plan what a restore would do first, and nothing that activates anything.

    Raises:
        AdmissionError: The restore would be refused.
        PayloadMissingError: The probed store lacks a pack, and no repository has it.
    """
    artifact = cast("Artifact", operation.artifact)
    source = _source(policy, operation, artifact)
    restore = Restore(artifact, placement=operation.placement, store=operation.store)
    if source is not None:
        # What the probed store lacks is no reason to refuse: it is fetched.
        restore = evolve(restore, store=store_beside(restore, facts, str(artifact.path)))
        facts = evolve(facts, store=None)
    plan = plan_restore(policy, restore, facts)
    kept: list[Step] = [step for step in plan if _looks(step)]
    if source is not None:
        kept = _fetching(kept, operation, source)
    ids = {step.id for step in kept}
    steps: list[Step] = [evolve(step, after=tuple(one for one in step.after if one in ids)) for step in kept]
    # What the restore would read through the page cache, and would read ahead itself while CRIU works.
    through = [step for step in plan if isinstance(step, PrefetchWeights)]
    ahead = ReadAhead(
        id="read-ahead", after=tuple(ids), store=through[0].store if through else "", residuals=bool(through)
    )
    steps.append(ahead)
    decisions = tuple(one for one in plan.decisions if not one.name.startswith("cuda"))
    return evolve(plan, operation="prepare", steps=tuple(steps), decisions=decisions, choices=())


def _source(policy: Policy, operation: Prepare, artifact: Artifact) -> Source | None:
    """Return the repository that absent packs are fetched from; None: nowhere."""
    source = fetched_from(policy, artifact)
    if operation.endpoint and source is None:
        raise UnsupportedError(
            "a hub is named, and nothing would be fetched from it",
            field="endpoint",
            works="leaving it out, or packs in a repository (weights.native.repository) that the policy may use",
        )
    return source


def _fetching(steps: list[Step], operation: Prepare, source: Source) -> list[Step]:
    """Return the steps with one that fetches before the packs are looked at."""
    at, admit = next((number, step) for number, step in enumerate(steps) if isinstance(step, AdmitPacks))
    fetch = FetchPacks(
        id=FETCH,
        after=("admit-host", "admit-artifact"),
        store=admit.store,
        repository=source.repository,
        revision=source.revision,
        files=source.files,
        endpoint=operation.endpoint or "",
    )
    return [*steps[:at], fetch, evolve(admit, after=(*admit.after, FETCH)), *steps[at + 1 :]]


def _looks(step: Step) -> bool:
    """Tell whether a step of a restore activates nothing: a port is taken, and so admitted, by the restore itself."""
    admits = step.phase == "ADMIT" and not isinstance(step, AdmitPlacement)
    return admits or isinstance(step, VerifyFiles | VerifyPacks | PlantCaches)


def plan_running(policy: Policy, operation: Restore, facts: Facts) -> Plan:
    """Plan that a warm engine gets its weights, answers, and runs.

    Its artifact is opened when the plan runs, and refuses there what it does not know, before anything moves.

    Raises:
        AdmissionError: It was not restored.
        UnsupportedError: It has no memory provider, or the policy wants its weights in the process.
    """
    handle = cast("EngineHandle", operation.artifact)
    resolved = policy.resolved(engine_defaults=engine_defaults(native=True, policy=policy))
    run_dir, labels = str(handle.run_dir), handle.labels
    if "artifact" not in labels:
        raise AdmissionError(f"the engine in {run_dir} was launched, not restored; there is nothing to restore it from")
    provider = memory_provider(policy, handle, facts)
    mode = resolved["weights.mode"]
    who = PROVIDERS.get(mode, "either")
    store, why = os.path.join(os.path.dirname(labels["artifact"]), STORE), "beside the artifact"
    if operation.store is not None:
        store, why = operation.store, "the operation names it"
    elif facts.store is not None:
        store, why = facts.store.root, "it was probed"
    preverified = resolved["io.verify_mode"] == "preverified"
    verified = ("verify-packs",) if preverified else ()
    reads, recovers = resolved["io.hydration_backend"] in READ_AHEAD, who != "native"
    ahead = recovers and resolved["weights.recovery.loader_backend"] != "direct"
    written = materialize_steps(resolved, store, after="answer", timeout_s=operation.thaw_timeout_s)
    steps: tuple[Step, ...] = (
        admit_host(facts.host("local"), resolved["process.namespace"]),
        AdmitWarm(
            id="admit-warm",
            run_dir=run_dir,
            artifact=labels["artifact"],
            mode=mode,
            materialize=resolved["weights.native.materialize"],
        ),
        AdmitPacks(
            id="admit-packs",
            after=("admit-warm",),
            store=store,
            packs=(),
            evidence=preverified,
            provider=who,
            repository=configured_repository(policy) if mode == "auto" else "",
            published=mode == "auto",
        ),
        VerifyPacks(id="verify-packs", after=("admit-packs",), store=store, mode=resolved["weights.verify"]),
        *(
            [PrefetchWeights(id="prefetch", after=("admit-host", "admit-packs"), store=store, checkpoint=ahead)]
            if reads
            else []
        ),
        TakeWarm(id="take", after=("admit-host", "admit-packs"), timeout_s=TAKE_TIMEOUT_S),
        hydrate_step(
            resolved, store, after=("take", *verified), timeout_s=operation.thaw_timeout_s, checkpoint=recovers
        ),
        AwaitReady(id="ready", after=("hydrate",), timeout_s=operation.answer_timeout_s),
        CompareAnswer(id="answer", after=("ready", "verify-packs"), timeout_s=operation.answer_timeout_s),
        *written,
        HandOver(id="hand-over", after=(written[-1].id if written else "answer",)),
    )
    return Plan(
        operation="restore",
        driver="none",
        subject=f"the warm engine in {run_dir}, from {labels['artifact']}",
        steps=steps,
        decisions=(
            Decision(name="memory provider", requested="", layer="", effective=provider, reason="as it was launched"),
            Decision(name="store", requested="", layer="", effective=store, reason=why),
        ),
        choices=(Choice(name="provider", step="admit-packs", options=("native", "recovery"), rule=EITHER_RULE),)
        if who == "either"
        else (),
    )
