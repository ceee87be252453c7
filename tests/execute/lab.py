"""What tests of execution share: run plans, ask engines, and look for what is left behind."""

import json
import os
import signal
import socket
import threading
import time
import urllib.request
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from attrs import evolve

import coldsnap as cs
from coldsnap.errors import ColdSnapError
from coldsnap.keeper.rundir import discard, post_mortem
from coldsnap.testing.reference import ReferenceEngine

DEADLINE_S = 20.0


class Lab:
    """Runs of one test in a directory of its own; whatever still runs at its end is stopped."""

    def __init__(self, directory, criu, python, facts):
        self.directory, self.criu, self.python, self.facts = directory, criu, python, facts
        self.stack = ExitStack()
        self.run_dirs = []
        self.tag = f"lab-{directory.name}-{os.getpid()}"

    def engine(self, **options):
        env = {"TEST_TAG": self.tag} | options.pop("env", {})
        return ReferenceEngine(python=self.python, env=env, **options)

    def placement(self, *, port=None, run_dir=None, **options):
        run_dir = run_dir or self.directory / f"run{len(self.run_dirs)}"
        self.run_dirs.append(Path(run_dir))
        return cs.local(port=port or unused_port(), run_dir=run_dir, **options)

    def output(self):
        return self.directory / f"artifact{len(list(self.directory.glob('artifact*')))}"

    def run(self, operation, policy=None, **options):
        return cs.execute(cs.resolve(cs.Policy().evolve(**(policy or {})), operation, self.facts), **options)

    def launch(self, spec=None, **options):
        return self.run(cs.Launch(spec or self.engine(), placement=self.placement()), **options).engine

    def capture(self, what, *, output=None, policy=None, on_event=None, fault_point=None, **options):
        if not isinstance(what, cs.Engine):
            options.setdefault("placement", self.placement())
        operation = cs.Capture(what, output=output or self.output(), **options)
        return self.run(operation, policy, on_event=on_event, fault_point=fault_point)

    def restore(self, artifact, *, port=None, run_dir=None, **options):
        where = self.placement(port=port, run_dir=run_dir)
        return self.run(cs.Restore(artifact, placement=where), **options)

    def plan_restore(self, artifact, **options):
        where = self.placement(**options)
        return cs.resolve(cs.Policy(), cs.Restore(artifact, placement=where), self.facts)

    def close(self):
        self.stack.close()
        for run_dir in self.run_dirs:
            end(run_dir)


def end(run_dir):
    """Stop whatever lives in a run directory, and remove what it left."""
    try:
        cs.Engine.attach(run_dir).stop(grace_s=0)
    except ColdSnapError:
        if Path(run_dir).exists() and not post_mortem(run_dir).alive:
            discard(run_dir)


def unused_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask(where, prompt="Hello", *, tokens=8, model="reference", timeout_s=10.0, **body):
    """Return the answer of an engine to a completion request."""
    port = where if isinstance(where, int) else where.endpoint.port
    data = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0} | body
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(data).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return json.load(response)["choices"][0]["text"]


def sample(where, **body):
    """Return an answer that is drawn."""
    return ask(where, temperature=1.0, tokens=24, **body)


def until(condition, what):
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        told = what() if callable(what) and time.monotonic() >= deadline else what
        assert time.monotonic() < deadline, f"{told} did not happen within {DEADLINE_S} s"
        time.sleep(0.02)
    return value


def port_is_free(port):
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def tagged(tag):
    """Return every process, zombies excepted, that has a tag in its environment."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"TEST_TAG={tag}\0".encode() in Path(f"/proc/{name}/environ").read_bytes():
                found.append(int(name))
        except OSError:
            continue
    return found


def host_pid(run_dir, pid):
    """Return the host's number of a process that an engine in private namespaces calls ``pid``."""
    keeper = json.loads((Path(run_dir) / "keeper.json").read_text())["keeper"]["pid"]
    namespace = os.readlink(f"/proc/{keeper}/ns/pid")
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            inside = Path(f"/proc/{name}/status").read_text().split("NSpid:")[1].split("\n")[0].split()
            if inside[-1] == str(pid) and os.readlink(f"/proc/{name}/ns/pid") == namespace:
                return int(name)
    raise AssertionError(f"{run_dir} has no process {pid}")


def kill_rank(run_dir, role):
    """Kill one rank of an engine, as the kernel does when memory is short; return its pid inside."""
    (name,) = [path.name for path in (Path(run_dir) / "rank" / "control").iterdir() if path.name.startswith(role)]
    pid = int(name.split(".")[1])
    os.kill(host_pid(run_dir, pid), signal.SIGKILL)
    return pid


def mounts(directory):
    """Return what is mounted below a directory: the rest of the table is other people's too."""
    table = (line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return sorted(point for _, _, _, _, point, *_ in table if Path(point).is_relative_to(directory))


class Background:
    """A call in a thread, its outcome awaited later."""

    def __init__(self, call):
        self.value = self.error = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call):
        try:
            self.value = call()
        except Exception as error:
            self.error = error

    def result(self, timeout_s=DEADLINE_S):
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the call did not come back"
        if self.error is not None:
            raise self.error
        return self.value


def changed(artifact, **fields):
    """Write an artifact's descriptor anew, sealed as if it had been captured so."""
    document = evolve(artifact.descriptor, **fields)
    (artifact.path / "artifact.json").write_bytes(document.encode())
    return cs.Artifact.open(artifact.path)
