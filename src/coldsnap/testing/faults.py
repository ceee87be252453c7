"""Faults at named points: what a test injects at the boundaries of steps.

``execute`` reports every boundary as a step's id and ``before`` or ``after``; a :class:`FaultPlan` is what it reports
to.

The one rule: a fault happens once, exactly where it was named, and the plan can tell afterwards whether it did. The
test of every fault runs the same operation again without it, and that must succeed.

    FaultPlan.parse("DumpTree:before:raise", "CommitArtifact:after:kill-caller")
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Literal, get_args

from attrs import define, field, frozen

from coldsnap.errors import PolicyError, StepError

__all__ = ["Action", "Fault", "FaultPlan", "InjectedError", "When"]

When = Literal["before", "after"]
Action = Literal["raise", "interrupt", "sleep", "kill-caller", "kill-keeper"]


class InjectedError(StepError):
    """The failure that a test asked for."""


@frozen(kw_only=True)
class Fault:
    """One fault.

    Attributes:
        step: The id of the step.
        when: ``before`` or ``after`` it.
        action: ``raise`` an InjectedError, ``interrupt`` (KeyboardInterrupt), ``sleep``, or SIGKILL to the caller or
            the keeper.
        seconds: How long ``sleep`` takes, s.
    """

    step: str
    when: When = "before"
    action: Action = "raise"
    seconds: float = 3600.0

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read ``step:when:action``, or ``step:when:sleep=seconds``.

        Raises:
            PolicyError: Anything else.
        """
        step, _, rest = text.partition(":")
        when, _, action = rest.partition(":")
        action, _, seconds = action.partition("=")
        if not step or when not in get_args(When) or action not in get_args(Action):
            expected = f"step:{'|'.join(get_args(When))}:{'|'.join(get_args(Action))}"
            raise PolicyError([("$", f"expected {expected}, found {text!r}")], what="fault")
        return cls(step=step, when=when, action=action, seconds=float(seconds or 3600.0))  # type: ignore[arg-type]


@define
class FaultPlan:
    """Faults that wait for their points.

    Attributes:
        faults: Those that have not happened.
        happened: Those that have.
        points: Every point that was reported, in order.
    """

    faults: list[Fault] = field(factory=list)
    happened: list[Fault] = field(factory=list, init=False)
    points: list[tuple[str, str]] = field(factory=list, init=False)

    @classmethod
    def parse(cls, *texts: str) -> FaultPlan:
        """Read faults as :meth:`Fault.parse` does.

        Raises:
            PolicyError: A text is not a fault.
        """
        return cls([Fault.parse(text) for text in texts])

    def __call__(self, step: str, when: When, *, keeper_pid: int | None = None) -> None:
        """Let the faults of this point happen.

        Args:
            step: The id of the step.
            when: Its beginning or its end.
            keeper_pid: The keeper's pid, as this process sees it; ``None`` before there is one.

        Raises:
            InjectedError: A fault says so.
            KeyboardInterrupt: A fault says so.
            PolicyError: The keeper is to be killed, but there is none yet.
        """
        self.points.append((step, when))
        for fault in [fault for fault in self.faults if (fault.step, fault.when) == (step, when)]:
            self.faults.remove(fault)
            self.happened.append(fault)
            _happen(fault, keeper_pid)

    def unused(self) -> Sequence[Fault]:
        """Return the faults whose points never came; a test that injects demands that this is empty."""
        return tuple(self.faults)


def _happen(fault: Fault, keeper_pid: int | None) -> None:
    match fault.action:
        case "raise":
            raise InjectedError(f"injected {fault.when} {fault.step}")
        case "interrupt":
            raise KeyboardInterrupt(f"injected {fault.when} {fault.step}")
        case "sleep":
            time.sleep(fault.seconds)
        case "kill-caller":
            os.kill(os.getpid(), signal.SIGKILL)
        case "kill-keeper":
            if keeper_pid is None:
                raise PolicyError([("$", f"there is no keeper yet {fault.when} {fault.step}")], what="fault")
            os.kill(keeper_pid, signal.SIGKILL)
