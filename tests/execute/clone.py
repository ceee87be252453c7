"""Restore an artifact in a process of its own, on clocks that may be days away, and say how the engine is.

Usage: clone.py FACTS ARTIFACT PORT RUN_DIR DAYS. Prints a line of JSON; the engine serves on.
"""

import json
import subprocess
import sys
import time

from lab import ask

import coldsnap as cs
import coldsnap.testing.reference
from coldsnap.keeper import kernel

CLONE_NEWTIME = 0x80
BEATS_S = 1.5


def restore(facts, artifact, port, run_dir):
    placement = cs.local(port=int(port), run_dir=run_dir)
    plan = cs.resolve(cs.Policy(), cs.Restore(cs.Artifact.open(artifact), placement=placement), cs.Facts.load(facts))
    report = cs.execute(plan)
    known = report.artifact and cs.Artifact.open(report.artifact).descriptor.engine.kind == "reference"
    first = ask(report.engine) if known else None
    time.sleep(BEATS_S)  # many beats of its watchdog
    told = {
        "answers": [first, ask(report.engine)] if known else [],
        "state": report.engine.status().state,
        "port": report.engine.endpoint.port,
        "clock_s": time.monotonic(),
    }
    report.engine.detach()
    print(json.dumps(told))


def main():
    *arguments, days = sys.argv[1:]
    if float(days) == 0:
        restore(*arguments)
        return
    # time_namespaces(7): only children of this process live by the other clocks.
    kernel.unshare(CLONE_NEWTIME)
    seconds = int(float(days) * 86_400)
    with open("/proc/self/timens_offsets", "w") as offsets:
        offsets.write(f"monotonic {seconds} 0\nboottime {seconds} 0\n")
    sys.exit(subprocess.run([sys.executable, __file__, *arguments, "0"], timeout=60).returncode)


if __name__ == "__main__":
    main()
