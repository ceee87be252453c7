"""Injected faults happen once, where they were named."""

import subprocess
import sys
import time

import pytest

from coldsnap.errors import PolicyError
from coldsnap.testing.faults import Fault, FaultPlan, InjectedError


def test_a_fault_happens_at_its_point_and_only_once():
    plan = FaultPlan.parse("DumpTree:before:raise")
    plan("DumpTree", "after")
    plan("Quiesce", "before")
    with pytest.raises(InjectedError, match="before DumpTree"):
        plan("DumpTree", "before")
    plan("DumpTree", "before")
    assert plan.unused() == () and plan.happened == [Fault(step="DumpTree")]
    assert plan.points == [("DumpTree", "after"), ("Quiesce", "before"), ("DumpTree", "before"), ("DumpTree", "before")]


def test_a_fault_whose_point_never_came_is_told():
    plan = FaultPlan.parse("Nowhere:after:raise")
    plan("DumpTree", "before")
    assert plan.unused() == (Fault(step="Nowhere", when="after"),)


def test_an_interrupt_is_the_users_own():
    with pytest.raises(KeyboardInterrupt):
        FaultPlan.parse("ThawTree:after:interrupt")("ThawTree", "after")


def test_sleep_takes_its_seconds():
    start = time.monotonic()
    FaultPlan.parse("ThawTree:before:sleep=0.05")("ThawTree", "before")
    assert time.monotonic() - start >= 0.05


def test_the_caller_and_the_keeper_can_be_killed():
    code = "from coldsnap.testing.faults import FaultPlan; FaultPlan.parse('A:before:kill-caller')('A', 'before')"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    with subprocess.Popen(["sleep", "60"]) as keeper:
        FaultPlan.parse("A:after:kill-keeper")("A", "after", keeper_pid=keeper.pid)
        assert keeper.wait(10) == -9
    with pytest.raises(PolicyError, match="no keeper yet"):
        FaultPlan.parse("A:after:kill-keeper")("A", "after")


@pytest.mark.parametrize("text", ["", "A", "A:before", "A:during:raise", "A:before:explode", ":before:raise"])
def test_what_is_no_fault_is_refused(text):
    with pytest.raises(PolicyError, match="expected step:before"):
        Fault.parse(text)
