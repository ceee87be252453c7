"""One run of one operation with one fault, in a process of its own, so that killing the caller is real.

    python case.py '{"operation": "restore", "fault": "thaw:before:kill-caller", …}'

It prints what happened as one line of JSON, unless it was killed.
"""

import json
import sys

import coldsnap as cs
from coldsnap.testing.faults import FaultPlan
from coldsnap.testing.reference import ReferenceEngine


def operation(job):
    """Return what is to be done, as a user would write it."""
    if job["operation"] == "handle":
        return cs.Capture(cs.Engine.attach(job["run_dir"]), output=job["output"], then=job["then"])
    placement = cs.local(port=job["port"], run_dir=job["run_dir"])
    if job["operation"] == "restore":
        return cs.Restore(cs.Artifact.open(job["artifact"]), placement=placement)
    spec = ReferenceEngine(python=job["python"], env={"TEST_TAG": job["tag"]})
    if job["operation"] == "launch":
        return cs.Launch(spec, placement=placement)
    return cs.Capture(spec, output=job["output"], placement=placement, then=job["then"])


def main():
    """Run it."""
    job = json.loads(sys.argv[1])
    fault = FaultPlan.parse(*job["faults"])
    plan = cs.resolve(cs.Policy(), operation(job), cs.Facts.load(job["facts"]))
    told = {}

    def say(event):
        if job.get("tell"):
            print(event.kind, event.step, flush=True)

    try:
        report = cs.execute(plan, fault_point=fault, on_event=say)
    except BaseException as error:
        report = error.report
        told = {"error": type(error).__name__, "sentence": str(error), "notes": error.__notes__}
    told |= {"state": report.state, "workload": report.workload, "steps": [each.step for each in report.receipts]}
    told |= {"unused": len(fault.unused()), "all_steps": [step.id for step in plan]}
    print(json.dumps(told))


main()
