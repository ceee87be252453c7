"""Run a step graph: every step as soon as those before it have ended, with spans, events and fault points.

The one rule: after a failure nothing new starts, what runs already is waited for (every step has its own deadline),
and only then does the caller's cleanup begin.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Literal

from attrs import evolve

from coldsnap.errors import ColdSnapError, StepError
from coldsnap.plan import Plan
from coldsnap.receipts import Event, EventSink, Receipt, Report
from coldsnap.steps import Step

__all__ = ["Act", "FaultPoint", "run"]

Act = Callable[[Step], Receipt]
FaultPoint = Callable[[str, Literal["before", "after"]], None]


def run(
    plan: Plan,
    act: Act,
    report: Report,
    *,
    interrupt: Callable[[], None],
    on_event: EventSink | None = None,
    fault_point: FaultPoint | None = None,
) -> None:
    """Run every step of ``plan`` through ``act``, collecting receipts and spans in ``report``.

    Args:
        plan: What to run.
        act: Does one step and returns its receipt (its seconds are filled in here).
        report: Receives receipts and spans.
        interrupt: Called when the caller's thread is interrupted; the waits of running steps should end then.
        on_event: Called at the start and end of each step, from several threads; what it raises is dropped.
        fault_point: Called before and after each step, for tests of failures.

    Raises:
        ColdSnapError: The first failure; further ones are notes on it.
    """
    tell = _Teller(on_event, report, plan)
    waiting = {step.id: step for step in plan}
    running: dict[Future[Receipt], Step] = {}
    ended: set[str] = set()
    failures: list[BaseException] = []

    def one(step: Step) -> Receipt:
        with report.timeline.span(step.id):
            if fault_point is not None:
                fault_point(step.id, "before")
            receipt = act(step)
            if fault_point is not None:
                fault_point(step.id, "after")
            return receipt

    with ThreadPoolExecutor(max_workers=4, thread_name_prefix="coldsnap-step") as pool:
        try:
            while running or (waiting and not failures):
                for step in [] if failures else [s for s in waiting.values() if set(s.after) <= ended]:
                    del waiting[step.id]
                    tell("start", step)
                    running[pool.submit(one, step)] = step
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    step = running.pop(future)
                    if (error := future.exception()) is not None:
                        failures.append(_at(error, step))
                        tell("end", step, status="error", text=str(error).split("\n", 1)[0])
                    else:
                        ended.add(step.id)
                        tell("end", step, text=tell.settle(step, future.result()))
        except BaseException:
            # An interrupt in the caller's thread: let the steps that run come to an end before anything is undone.
            interrupt()
            wait(running)
            raise
    if failures:
        first, *others = failures
        for other in others:
            first.add_note(f"also failed: {other}")
        raise first


def _at(error: BaseException, step: Step) -> BaseException:
    if isinstance(error, OSError) and not isinstance(error, ColdSnapError):
        # The machine's own refusals (no space, no permission, removed meanwhile) name the path; the step says when.
        told = StepError(f"step {step.id} failed: {error}; put that right and run the plan again", step=step.id)
        told.__cause__ = error
        return told
    if isinstance(error, StepError) and error.step is None:
        error.step = step.id
    elif not isinstance(error, ColdSnapError):
        error.add_note(f"in step {step.id}")
    return error


class _Teller:
    """Sends events and files receipts."""

    def __init__(self, sink: EventSink | None, report: Report, plan: Plan) -> None:
        self._sink, self._report = sink, report
        self._numbers = {step.id: number for number, step in enumerate(plan, 1)}

    def settle(self, step: Step, receipt: Receipt) -> str:
        """Add the step's duration to its receipt, file it, and return its line."""
        seconds = self._report.timeline.between(step.id)
        self._report.receipts.append(evolve(receipt, step=step.id, seconds=seconds))
        return ": ".join(part for part in (receipt.effective, receipt.reason) if part)

    def __call__(
        self, kind: Literal["start", "end"], step: Step, *, text: str = "", status: Literal["ok", "error"] = "ok"
    ) -> None:
        if self._sink is None:
            return
        event = Event(
            kind=kind,
            step=step.id,
            at_ns=self._report.timeline.now_ns(),
            text=text,
            status=status,
            number=self._numbers[step.id],
            total=len(self._numbers),
        )
        try:
            self._sink(event)
        except Exception:  # noqa: BLE001 - a progress display must never fail a capture
            self._sink = None
