"""Plans for an engine that lives: put it to sleep, wake it, ask how it is, stop it."""

from __future__ import annotations

import os

from coldsnap.behaviour import engine_defaults
from coldsnap.engines.specs import spec_of_running, was_launched_releasing
from coldsnap.errors import UnsupportedError
from coldsnap.host.facts import Facts
from coldsnap.keeper.layout import SLEEP
from coldsnap.operation import TAGS, EngineHandle, Sleep, Status, Stop, Wake
from coldsnap.plan import Decision, Plan
from coldsnap.planning.weights import reading, writing
from coldsnap.policy import Policy
from coldsnap.steps import InspectEngine, SleepEngine, StopEngine, WakeEngine

__all__ = ["memory_provider", "plan_sleep", "plan_status", "plan_stop", "plan_wake"]


def plan_sleep(policy: Policy, operation: Sleep, facts: Facts) -> Plan:
    """Plan that a serving engine gives its memory away.

    Raises:
        UnsupportedError: It has no memory provider, or the policy wants its weights where they are.
    """
    resolved = policy.resolved(engine_defaults=engine_defaults(native=True, policy=policy))
    run_dir = str(operation.engine.run_dir)
    provider = memory_provider(policy, operation.engine, facts)
    store, why = os.path.join(run_dir, SLEEP, "store"), "nobody named one; it ends with the engine"
    if operation.store is not None:
        store, why = operation.store, "the operation names it"
    elif facts.store is not None:
        store, why = facts.store.root, "it was probed"
    step = SleepEngine(
        id="sleep",
        run_dir=run_dir,
        store=store,
        discard=resolved["process.discard"],
        **writing(resolved),
        quiesce_timeout_s=operation.quiesce_timeout_s,
        timeout_s=operation.timeout_s,
    )
    decisions = (_decided("memory provider", provider, "as it was launched"), _decided("store", store, why))
    return Plan(operation="sleep", driver="none", subject=_subject(run_dir), steps=(step,), decisions=decisions)


def plan_wake(policy: Policy, operation: Wake, facts: Facts) -> Plan:
    """Plan that a sleeping engine gets its memory back.

    Raises:
        UnsupportedError: It has no memory provider.
    """
    resolved = policy.resolved(engine_defaults=engine_defaults(native=True, policy=policy))
    run_dir = str(operation.engine.run_dir)
    provider = memory_provider(policy, operation.engine, facts)
    step = WakeEngine(
        id="wake",
        run_dir=run_dir,
        tags=operation.tags or TAGS,
        **reading(resolved, fresh=True),
        timeout_s=operation.timeout_s,
    )
    decisions = (_decided("memory provider", provider, "as it was launched"),)
    return Plan(operation="wake", driver="none", subject=_subject(run_dir), steps=(step,), decisions=decisions)


def plan_status(operation: Status) -> Plan:
    """Plan to ask an engine how it is."""
    run_dir = str(operation.engine.run_dir)
    step = InspectEngine(id="status", run_dir=run_dir, timeout_s=operation.timeout_s)
    return Plan(operation="status", driver="none", subject=_subject(run_dir), steps=(step,))


def plan_stop(operation: Stop) -> Plan:
    """Plan the end of an engine."""
    run_dir = str(operation.engine.run_dir)
    step = StopEngine(id="stop", run_dir=run_dir, grace_s=operation.grace_s)
    return Plan(operation="stop", driver="none", subject=_subject(run_dir), steps=(step,))


def memory_provider(policy: Policy, handle: EngineHandle, facts: Facts) -> str:
    """Return what lets the memory of a running engine leave.

    Raises:
        UnsupportedError: Nothing does, or the policy wants its weights where they are.
    """
    engine = spec_of_running(handle.labels, run_dir=handle.run_dir)
    provider = engine.memory_provider(gpu=bool(facts.host("local").gpus))
    if provider is None or not was_launched_releasing(handle.labels):
        raise UnsupportedError(
            f"the {engine.kind} engine in {handle.run_dir} has no memory that can leave while its addresses stay",
            field="weights.mode",
            works='an engine with a memory provider, launched with weights.mode = "auto" or "native"',
        )
    if policy.resolved()["weights.mode"] == "image":
        raise UnsupportedError(
            "the policy wants the weights in the process, and sleep takes them out of it",
            field="weights.mode",
            works='weights.mode = "auto" or "native"',
        )
    return provider


def _subject(run_dir: str) -> str:
    return f"the engine in {run_dir}"


def _decided(name: str, effective: str, reason: str) -> Decision:
    return Decision(name=name, requested="", layer="", effective=effective, reason=reason)
