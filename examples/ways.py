"""Another way back than n610: out of a template (n580), by packs and by recovery.

The one rule: it is held against the answers and the tensors of the engine that was captured first, so that both
drivers are compared with each other.

Used by ``qualifying.py``. Keys that it adds to its JSON: ``ways`` (name → receipts of the last restore: step → what was
done), ``template`` (``proof``, ``sizes`` in bytes by kind, ``new_pack_bytes``: none where both drivers share a pack).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import coldsnap as cs
from measuring import NotRun, receipts_of  # type: ignore[import-not-found]  # beside this script

if TYPE_CHECKING:
    from qualifying import Qualification  # type: ignore[import-not-found]

TEMPLATE = "template (n580): capture, whole"
STARTED = "template (n580): restore"


def parts(qualification: Qualification) -> dict[str, Callable[[], None]]:
    """Return the parts that were asked for, by name, in their order."""
    options = qualification.options
    wanted: dict[str, Callable[[], None]] = {}
    if options.templates:
        wanted[TEMPLATE] = partial(template, qualification)
        for provider in ("native", "recovery"):
            wanted[f"{STARTED}, {provider}"] = partial(started, qualification, provider)
    return wanted


def template(qualification: Qualification) -> None:
    """Capture a template of the same engine, and compare what it became."""
    options, output = qualification.options, qualification.work / "template"
    operation = cs.Capture(
        qualification.spec,
        output=output,
        placement=qualification.place,
        then="keep",
        answer_tokens=options.tokens,
        ready_timeout_s=options.ready_timeout_s,
    )
    report = qualification.execute(operation, chosen(qualification))
    qualification.row(TEMPLATE, report.timeline.seconds)
    receipts = receipts_of(report)
    qualification.result["template"] = {
        "proof": report.receipt("prove").reason,
        "sizes": dict(cs.Artifact.open(output).size_bytes),
        "new_pack_bytes": receipts.get("report", {}).get("new_pack_bytes"),
    }
    with report.serving as engine:
        qualification.compare(qualification.asked(engine))
        qualification.compare_digests(engine, TEMPLATE)


def started(qualification: Qualification, provider: str) -> None:
    """Start the engine anew out of the template.

    Raises:
        NotRun: There is no template.
    """
    path = qualification.work / "template"
    if not (path / "artifact.json").exists():
        raise NotRun("there is no template")
    name, policy = f"{STARTED}, {provider}", chosen(qualification, **{"weights.mode": provider})
    count = qualification.options.templates
    qualification.restores(name, count, way=name, artifact=cs.Artifact.open(path), policy=policy)


def chosen(qualification: Qualification, **leaves: str) -> cs.Policy:
    """Return the policy that is qualified, with the driver of templates."""
    policy: cs.Policy = qualification.policy.evolve(**{"compatibility.driver": "n580", **leaves})
    return policy
