"""Try a restore without one capability after the other, and a launch as a user without any.

Usage: unprivileged.py FACTS ARTIFACT PORT CRIU. The facts are root's. Prints JSON: what is missing → the error.
"""

import ctypes
import json
import os
import struct
import sys

import coldsnap as cs
from coldsnap.errors import ColdSnapError
from coldsnap.host.facts import NEEDED_CAPABILITIES
from coldsnap.host.kernel import CAPABILITIES
from coldsnap.testing.reference import ReferenceEngine

CAPABILITY_VERSION = 0x20080522  # linux/capability.h: _LINUX_CAPABILITY_VERSION_3
NOBODY = 65534


def drop(name):
    """Give a capability up, for good."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = ctypes.create_string_buffer(struct.pack("<Ii", CAPABILITY_VERSION, 0))
    data = ctypes.create_string_buffer(24)
    assert libc.capget(header, data) == 0
    effective, permitted, inheritable, *high = struct.unpack("<6I", data.raw[:24])
    number = CAPABILITIES.index(name.removeprefix("CAP_"))
    assert number < 32
    keep = ~(1 << number) & 0xFFFFFFFF
    kept = struct.pack("<6I", effective & keep, permitted & keep, inheritable & keep, *high)
    data = ctypes.create_string_buffer(kept)
    assert libc.prctl(24, number, 0, 0, 0) == 0, "PR_CAPBSET_DROP"
    assert libc.capset(header, data) == 0


def refused(call):
    try:
        call()
    except ColdSnapError as error:
        report = getattr(error, "report", None)
        return {"type": type(error).__name__, "text": str(error), "workload": report and report.workload}
    return {"type": "", "text": "it was not refused"}


def apart(act):
    """Run a function in a child of its own and return what it returns."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, json.dumps(act()).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as stream:
        told = json.loads(stream.read())
    os.waitpid(child, 0)
    return told


def main():
    facts, artifact, port, criu = sys.argv[1:]
    operation = cs.Restore(cs.Artifact.open(artifact), placement=cs.local(port=int(port)))
    plan = cs.resolve(cs.Policy(), operation, cs.Facts.load(facts))

    def without(name):
        drop(name)
        return refused(lambda: cs.execute(plan))

    def as_nobody():
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        launch = cs.Launch(ReferenceEngine(), placement=cs.local(port=int(port)))
        return refused(lambda: cs.resolve(cs.Policy(), launch, cs.probe(criu=criu)))

    told = {name: apart(lambda name=name: without(name)) for name in NEEDED_CAPABILITIES}
    print(json.dumps(told | {"nobody": apart(as_nobody)}))


if __name__ == "__main__":
    main()
