"""What is done to an engine that lives on: kept through a capture, put to sleep and woken, spared by a failed capture.

The one rule: after each of them it gives the answers and has the tensors that it had before the first capture; an
engine that does not is a difference that is counted, never an exception that is swallowed.

All of it happens to one restored engine, which costs seconds where a launch costs a minute; the riskiest part is last.
Keys that it adds to the JSON of ``qualifying.py``: ``beside`` (original and clone that serve at once, asked in turns:
``original`` and ``clone``, each with ``tokens_per_s`` and its spread; ``ratio``), ``asleep`` (the regions of memory in
each sleep: bytes and mapped bytes), ``undone`` (step that failed → ``error``, ``workload``, and the steps' seconds).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import coldsnap as cs
from coldsnap.testing.faults import FaultPlan, InjectedError
from measuring import PROMPT, NotRun, receipts_of, steady_rates  # type: ignore[import-not-found]  # beside this script

if TYPE_CHECKING:
    from qualifying import Qualification  # type: ignore[import-not-found]

KEPT = "capture that keeps its workload"
ASLEEP, AWAKE = "sleep, until the memory is given away", "wake, to the first token"
UNDONE = "capture that fails after its dump, until it serves again"


Action = Callable[[Any, cs.Engine], cs.Engine]
"""Takes the qualification and its engine; returns the handle of what serves afterwards."""


def parts(qualification: Qualification) -> dict[str, Action]:
    """Return the parts that were asked for, by name, in their order."""
    options = qualification.options
    wanted: dict[str, Action] = {}
    if options.keep:
        wanted[KEPT] = kept
    if options.sleep_wake:
        wanted[AWAKE] = slept
    for step in options.undo:
        wanted[f"{UNDONE}: {step}"] = partial(undone, step=step)
    return wanted


def kept(qualification: Qualification, engine: cs.Engine) -> cs.Engine:
    """Capture an engine that serves on, compare it, then ask it and a clone of it in turns."""
    options = qualification.options
    output = qualification.work / "kept"
    report = qualification.execute(cs.Capture(engine, output=output, then="keep", answer_tokens=options.tokens))
    qualification.row(KEPT, report.timeline.seconds)
    qualification.result["kept"] = receipts_of(report)
    original: cs.Engine = report.serving
    same(qualification, original, KEPT)
    beside = cs.local(port=options.port + 1)
    with qualification.execute(cs.Restore(cs.Artifact.open(output), placement=beside)).serving as clone:
        same(qualification, clone, "a clone beside its original")
        rates = steady_rates(
            [original.endpoint.url, clone.endpoint.url],
            qualification.spec.served_model,
            options.steady_tokens,
            rounds=options.rate_rounds,
            warm_up=options.rate_warm_up,
        )
    told = {name: rate.told() for name, rate in zip(("original", "clone"), rates, strict=True)}
    qualification.result["beside"] = {**told, "ratio": rates[1].median / rates[0].median}
    return original


def slept(qualification: Qualification, engine: cs.Engine) -> cs.Engine:
    """Let it sleep and wake, several times."""
    for number in range(qualification.options.sleep_wake):
        qualification.require_time(f" after {number} of {qualification.options.sleep_wake}")
        report = qualification.execute(cs.Sleep(engine, store=qualification.work / "store"))
        qualification.row(ASLEEP, report.timeline.seconds)
        status = qualification.execute(cs.Status(report.serving))
        qualification.result.setdefault("asleep", []).append(dict(status.receipts[-1].details))
        report = qualification.execute(cs.Wake(report.serving))
        engine = report.serving
        qualification.row(AWAKE, report.timeline.seconds + qualification.ask(engine, PROMPT).first_token_s)
        same(qualification, engine, f"sleep and wake {number + 1}")
    return engine


def undone(qualification: Qualification, engine: cs.Engine, *, step: str) -> cs.Engine:
    """Make a capture fail after a step; what it leaves must serve, with its answers and tensors.

    Raises:
        NotRun: A capture has no such step.
    """
    name = f"{UNDONE}: {step}"
    output = qualification.work / "undone"
    plan = qualification.planned(cs.Capture(engine, output=output, answer_tokens=qualification.options.tokens))
    if step not in (known := [each.id for each in plan.steps]):
        raise NotRun(f"a capture has no step {step!r}, but {', '.join(known)}")
    try:
        cs.execute(plan, on_event=cs.progress(file=sys.stdout), fault_point=FaultPlan.parse(f"{step}:after:raise"))
    except InjectedError as error:
        report: cs.Report = error.__dict__["report"]
    told = {"error": report.error, "workload": report.workload, "output_left": output.exists()}
    told["split"] = {span.name: span.seconds for span in report.timeline.spans}
    qualification.result.setdefault("undone", {})[step] = told
    qualification.row(name, report.timeline.seconds)
    engine = cs.Engine.attach(engine.run_dir)
    same(qualification, engine, name)
    return engine


def same(qualification: Qualification, engine: cs.Engine, when: str) -> None:
    """Compare answers and tensors with those before the first capture."""
    qualification.compare(qualification.asked(engine))
    qualification.compare_digests(engine, when)
