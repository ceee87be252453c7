"""Whoever may not restore is told which capability is missing, before anything is started."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from lab import tagged, unused_port

from coldsnap.host.facts import NEEDED_CAPABILITIES

pytestmark = pytest.mark.criu


def test_a_missing_capability_is_named_before_anything_is_started(lab, artifact, criu):
    lab.facts.save(lab.directory / "facts.json")
    script = Path(__file__).with_name("unprivileged.py")
    command = [sys.executable, script, lab.directory / "facts.json", artifact.path, unused_port(), criu]

    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    for name in NEEDED_CAPABILITIES:
        assert told[name]["type"] == "AdmissionError", told[name]["text"]
        assert f"capabilities that CRIU needs are missing: {name} (uid 0); run as root" in told[name]["text"]
        assert told[name]["workload"] == "nothing was started"
    assert told["nobody"]["type"] == "AdmissionError"
    assert f"are missing: {', '.join(NEEDED_CAPABILITIES)}" in told["nobody"]["text"]
    assert "(uid 65534)" in told["nobody"]["text"]
    assert not tagged(lab.tag)
