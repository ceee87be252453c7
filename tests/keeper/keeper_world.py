"""Real keepers, in real namespaces; nothing of them may be left after a test."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

import coldsnap
from coldsnap.errors import ColdSnapError
from coldsnap.keeper.client import Keeper

HERE = Path(__file__).parent
TARGET = HERE / "engine_target.py"
SOURCES = Path(coldsnap.__file__).parent.parent
DEADLINE_S = 20.0


def until(condition, what="it"):
    """Wait until a condition holds and return its value."""
    end = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < end, f"{what} did not happen within {DEADLINE_S} s"
        time.sleep(0.01)
    return value


def tagged(tag):
    """Return the pids (here) of all processes, zombies excepted, with TAG in their environment."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if f"TAG={tag}\0".encode() in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(int(name))
            except OSError:
                continue
    return found


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def mounts():
    """Return the mount points that a keeper could leave behind, in the host's namespace."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return sorted(point for point in points if point == "/proc" or "/dev/shm" in point or "coldsnap" in point)


class World:
    """What one test uses: a run directory, a tag for processes, an environment for engines."""

    def __init__(self, base, namespace):
        self.base = base
        self.namespace = namespace
        self.run_dir = base / "engine"
        self.tag = secrets.token_hex(8)
        self.env = {"PATH": os.environ["PATH"], "TAG": self.tag}
        self.keepers = []

    def start(self, run_dir=None, **options):
        keeper = Keeper.start(run_dir or self.run_dir, namespace=self.namespace, **options)
        self.keepers.append(keeper)
        return keeper

    def serve(self, keeper):
        """Start the engine of the tests; return its port."""
        keeper.spawn_engine([sys.executable, str(TARGET)], env=self.env, cwd="/")
        return self.port(keeper)

    def port(self, keeper):
        def find():
            words = keeper.log_tail(50).split()
            assert keeper.status().state == "running", keeper.log_tail(50)
            return int(words[words.index("port") + 1]) if "port" in words[:-1] else None

        return until(find, "the engine's port")

    def caller(self, body, *, tag=False):
        """Run a caller in a process of its own; it prints a line of JSON, then waits."""
        script = (
            "import json, os, signal, sys, time\n"
            "from coldsnap.keeper.client import Keeper\n"
            "from coldsnap.keeper.undo import CONTINUE, KILL, control, remove\n"
            f"run_dir, namespace = {str(self.run_dir)!r}, {self.namespace!r}\n"
            f"env, target = {self.env!r}, {str(TARGET)!r}\n"
            "def say(value): print(json.dumps(value), flush=True)\n" + body + "\ntime.sleep(1000)\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(SOURCES)},
            text=True,
        )
        line = process.stdout.readline()
        assert line, f"the caller failed, exit {process.wait()}"
        return process, json.loads(line)


@pytest.fixture(name="world", params=["private", "host"])
def make_world(request, tmp_path):
    yield from _world(tmp_path, request.param)


@pytest.fixture(name="private")
def make_private(tmp_path):
    yield from _world(tmp_path, "private")


def _world(tmp_path, namespace):
    world = World(tmp_path, namespace)
    before = mounts()
    yield world
    for keeper in world.keepers:
        keeper.close()
    # os.walk does not mind directories that go while it walks: keepers without an engine end by now.
    for directory in [directory for directory, _, names in os.walk(tmp_path) if "keeper.sock" in names]:
        try:
            Keeper.connect(directory).stop(grace_s=0)
        except ColdSnapError:
            pass
    until(lambda: not tagged(world.tag), "the end of every process")
    assert mounts() == before
    ring = Path("/dev/shm", f"coldsnap_test_ring_{world.tag}")
    if namespace == "host":
        ring.unlink(missing_ok=True)  # a killed tree's names in the host's /dev/shm stay: docs/keeper.md, Limits
    assert not ring.exists()


def kill(process):
    process.kill()
    process.wait()
    process.stdout.close()


def get(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as response:
        return json.load(response)


def sigkill(pid):
    os.kill(pid, signal.SIGKILL)
