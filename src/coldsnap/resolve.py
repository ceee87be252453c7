"""Policy, operation and facts come in; a plan comes out, or a refusal with every reason.

The one rule: pure. Nothing here reads a machine, so a plan for a fleet is made on a laptop, and the same arguments give
the same plan, byte for byte.
"""

from __future__ import annotations

from typing import assert_never

from coldsnap.behaviour import engine_defaults, refuse_without_behaviour
from coldsnap.host.facts import Facts
from coldsnap.operation import (
    Capture,
    Delete,
    EngineHandle,
    Launch,
    Materialize,
    Operation,
    Prepare,
    Publish,
    Restore,
    Sleep,
    Status,
    Stop,
    Verify,
    Wake,
)
from coldsnap.plan import Plan
from coldsnap.planning.capture import plan_capture
from coldsnap.planning.launch import plan_launch
from coldsnap.planning.materialize import plan_materialization
from coldsnap.planning.restore import plan_restore
from coldsnap.planning.sleep import plan_sleep, plan_status, plan_stop, plan_wake
from coldsnap.planning.warm import plan_preparation, plan_running
from coldsnap.policy import Policy
from coldsnap.upkeep import plan_deletion, plan_publication, plan_verification

__all__ = ["resolve"]


def resolve(policy: Policy, operation: Operation, facts: Facts) -> Plan:
    """Turn what is wanted into what will be done.

    Args:
        policy: What the user wants.
        operation: Launch, Capture, Restore, Prepare, Stop, Sleep, Wake, Status, Materialize, Verify, Delete or Publish.
        facts: What the machines are; see ``probe``.

    Returns:
        The plan. ``execute`` runs it.

    Raises:
        AdmissionError: Not on these machines, with every reason. Its subclasses say what kind: UnsupportedError (this
            version cannot), CompatibilityError (the artifact was made for something else).
        PayloadMissingError: The probed store lacks a pack of the artifact.
        PolicyError: The policy's layers together break a rule.
    """
    refuse_without_behaviour(policy)
    match operation:
        case Launch():
            return plan_launch(policy, operation, facts)
        case Capture():
            return plan_capture(policy, operation, facts)
        case Restore():
            if isinstance(operation.artifact, EngineHandle):
                return plan_running(policy, operation, facts)
            return plan_restore(policy, operation, facts)
        case Prepare():
            return plan_preparation(policy, operation, facts)
        case Stop():
            return plan_stop(operation)
        case Sleep():
            return plan_sleep(policy, operation, facts)
        case Wake():
            return plan_wake(policy, operation, facts)
        case Status():
            return plan_status(operation)
        case Materialize():
            return plan_materialization(policy, operation, facts)
        case Verify():
            return plan_verification(
                policy.resolved(engine_defaults=engine_defaults(native=False, policy=policy)), operation
            )
        case Delete():
            return plan_deletion(operation)
        case Publish():
            return plan_publication(operation)
        case _:
            assert_never(operation)
