"""Resolving reads nothing: a plan for a far machine is made on a laptop."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import coldsnap

SCRIPT = """
import json, sys, time
import fleet
from coldsnap.errors import AdmissionError
from coldsnap.operation import Stop
from coldsnap.policy import Policy
from coldsnap.resolve import resolve

cases = []
for host in (fleet.cpu_host(), fleet.gpu_host(), fleet.gpu_host("580.82.07"), fleet.cpu_host(criu=None)):
    for operation in (fleet.launch(), fleet.capture(), fleet.capture_handle(), Stop(fleet.Handle()),
                      fleet.restore(fleet.captured_on(host))):
        cases.append((operation, fleet.facts(host)))

def run():
    out = []
    for operation, facts in cases:
        try:
            plan = resolve(Policy(), operation, facts)
            out.append([plan.digest, str(plan)])
        except AdmissionError as refusal:
            out.append([type(refusal).__name__, str(refusal)])
    return out

first = run()  # everything that is loaded lazily is loaded by now
seen = []
def hook(event, arguments):
    if armed and not event.startswith(("object.__", "code.", "builtins.id", "sys._getframe")):
        seen.append(event)
armed = False
sys.addaudithook(hook)
armed = True
began = time.perf_counter()
second = run()
seconds = time.perf_counter() - began
armed = False
print(json.dumps({"same": first == second, "seen": seen, "plans": first, "each_s": seconds / len(cases)}))
"""


@pytest.fixture(scope="module")
def resolved_in():
    def run(cwd, seed):
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join([str(Path(coldsnap.__file__).parents[1]), str(Path(__file__).parent)]),
        }
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=env, cwd=cwd, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture(scope="module")
def resolved(resolved_in):
    return resolved_in("/", "1")


def test_resolve_opens_no_file_no_socket_and_starts_no_process(resolved):
    assert resolved["seen"] == []


def test_the_same_arguments_give_the_same_plan_in_any_process_and_place(resolved, resolved_in, tmp_path):
    assert resolved["same"]
    assert resolved_in(tmp_path, "2")["plans"] == resolved["plans"]


def test_how_long_a_resolve_takes_is_told(resolved, capsys):
    with capsys.disabled():
        print(f" resolve and print: {resolved['each_s'] * 1e3:.2f} ms", end="")
