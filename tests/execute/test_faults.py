"""Something fails at every step of every operation: a step raises, or the caller or the keeper is killed.

Afterwards the engine serves on, or nothing is left: no process, no port, no mount, no directory but one that tells what
happened; and what looks committed is whole. ``after`` a step is the same moment as ``before`` the only one that waits
for it, so a plain run takes one of the two; with COLDSNAP_TEST_FULL it takes both.
"""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock

import pytest
from attrs import field, frozen
from lab import Lab, ask, end, mounts, port_is_free, tagged, until, unused_port

import coldsnap as cs
from coldsnap.errors import ArtifactError, ColdSnapError, EngineError
from coldsnap.keeper.rundir import post_mortem

pytestmark = [pytest.mark.criu, pytest.mark.slow]

CASE = Path(__file__).with_name("case.py")
ACTIONS = ("raise", "kill-caller", "kill-keeper")
LIMIT_S = 60
AT_ONCE = 2

ADMIT = ["admit-host", "admit-engine", "admit-placement"]
STEPS = {
    "launch": [*ADMIT, "launch", "ready", "hand-over"],
    "capture": [
        "admit-output",
        *ADMIT,
        *["launch", "ready", "answer", "quiesce", "dump", "shrink", "seal", "commit", "settle"],
    ],
    "handle": [
        *["admit-output", "admit-host", "attach", "ready", "answer", "quiesce", "dump", "resume", "shrink", "seal"],
        *["commit", "settle"],
    ],
    "restore": [
        *["admit-host", "admit-placement", "admit-artifact", "keeper", "verify", "stage", "thaw", "reconnect", "ready"],
        *["answer", "hand-over"],
    ],
}
# The steps from which on there is a keeper to kill; ``verify`` runs beside its start.
KEPT_FROM = {"launch": "launch", "capture": "launch", "handle": "attach", "restore": "keeper"}


@frozen(kw_only=True)
class Case:
    operation: str
    step: str
    when: str
    action: str
    then: str = field(default="stop")

    def __str__(self):
        return f"{self.operation}-{self.when}-{self.step}-{self.action}"

    @property
    def last(self):
        """Whether everything had been done."""
        return self.when == "after" and self.step == STEPS[self.operation][-1]

    @property
    def committed(self):
        """Whether the artifact existed by then."""
        steps = STEPS[self.operation]
        at = steps.index(self.step)
        if "commit" not in steps:
            return False
        return at > steps.index("commit") or (self.step == "commit" and self.when == "after")


def cases():
    for operation, steps in STEPS.items():
        kept = steps.index(KEPT_FROM[operation])
        for at, step in enumerate(steps):
            for when in ("before", "after"):
                # Steps that run beside others have moments of their own.
                alone = not step.startswith("admit") and step != "verify"
                if when == "after" and alone and step != steps[-1] and "COLDSNAP_TEST_FULL" not in os.environ:
                    continue
                for action in ACTIONS:
                    exists = at > kept or (at == kept and when == "after")
                    if action != "kill-keeper" or (exists and step != "verify"):
                        yield Case(operation=operation, step=step, when=when, action=action)


CASES = list(cases())


class Matrix:
    """Runs the cases that are wanted, two at once, ahead of the tests that look at them."""

    def __init__(self, lab, artifact):
        self.lab, self.artifact = lab, artifact
        self.facts = lab.directory / "facts.json"
        lab.facts.save(self.facts)
        self.engine = None
        self.one_engine = Lock()
        self.pool = ThreadPoolExecutor(AT_ONCE)
        self.futures = {}

    def start(self, wanted):
        # Cases that share the engine wait for each other: spread them among the rest.
        turns = {"handle": 0, "capture": 1, "launch": 1, "restore": 2}
        for case in sorted(wanted, key=lambda case: (wanted.index(case) % 40, turns[case.operation])):
            self.futures[case] = self.pool.submit(self.run, case)

    def run(self, case):
        if case.operation != "handle":
            return self.check(case, self.lab.directory / str(case), unused_port())
        with self.one_engine:
            engine = self.serving_engine()
            run_dir, port = engine.run_dir, engine.endpoint.port
            try:
                return self.check(case, run_dir, port)
            finally:
                if case.action == "kill-keeper" or engine.status().state != "running":
                    end(run_dir)
                    self.engine = None

    def serving_engine(self):
        """Return the engine that cases with a handle share; a new one where the last was killed."""
        if self.engine is None:
            self.engine = self.lab.launch(self.lab.engine(env={"TEST_TAG": f"{self.lab.tag}-handle"}))
        return self.engine

    def job(self, case, run_dir, port, *faults, **options):
        output = self.lab.directory / f"artifact-{case}"
        return output, {
            **options,
            "operation": case.operation,
            "faults": faults,
            "run_dir": str(run_dir),
            "port": port,
            "output": str(output),
            "artifact": str(self.artifact),
            "python": self.lab.python,
            "tag": f"{self.lab.tag}-{case}",
            "facts": str(self.facts),
            "then": "keep" if case.operation == "handle" else "stop",
        }

    def call(self, case, run_dir, port, *faults):
        output, job = self.job(case, run_dir, port, *faults)
        done = subprocess.run(
            [sys.executable, str(CASE), json.dumps(job)], capture_output=True, text=True, timeout=LIMIT_S
        )
        told = json.loads(done.stdout) if done.stdout else None
        return done, told, output

    def check(self, case, run_dir, port):
        """Run the case and return every complaint about what it left."""
        done, told, output = self.call(case, run_dir, port, f"{case.step}:{case.when}:{case.action}")
        try:
            complaints = [*self.caller(case, done, told), *self.output(case, output)]
            serves = case.operation == "handle" and case.action != "kill-keeper"
            serves |= case.last and case.action == "kill-caller" and case.operation in {"launch", "restore"}
            look = self.serving if serves else self.nothing
            return [*complaints, *look(case, run_dir, port)]
        finally:
            if case.operation != "handle":
                end(run_dir)
            subprocess.run(["rm", "-rf", str(output)], check=True)

    def caller(self, case, done, told):
        if case.action == "kill-caller":
            if done.returncode != -9:
                yield f"the caller ended with {done.returncode}: {done.stderr[-500:]}"
            return
        if told is None:
            yield f"the caller said nothing: {done.stderr[-2000:]}"
            return
        if told["all_steps"] != STEPS[case.operation]:
            yield f"the plan has the steps {told['all_steps']}; correct STEPS here"
        if told["unused"]:
            yield f"the fault did not happen: {told}"
        if case.action == "raise" and (told["error"] != "InjectedError" or told["state"] != "failed"):
            yield f"the caller got {told}"
        if case.action == "kill-keeper" and not case.last and told["state"] != "failed":
            yield f"the caller did not notice: {told}"
        if not told["workload"]:
            yield "the report does not say what became of the workload"

    def output(self, case, output):
        try:
            cs.Artifact.open(output).verify("full")
        except ArtifactError as error:
            if (output / "artifact.json").exists():
                yield f"what looks committed is broken: {error}"
            if case.committed:
                yield "the artifact was committed, and is gone"
        else:
            if not case.committed:
                yield "an artifact exists that was never committed"
        # Without a keeper nobody can clean up after a killed caller; the next capture does.
        before_keeper = STEPS[case.operation].index(case.step) <= STEPS[case.operation].index(KEPT_FROM[case.operation])
        if not case.committed and not (before_keeper and case.action == "kill-caller"):
            with suppress(AssertionError):
                until(lambda: not output.exists(), "the end of the output")
            if output.exists():
                yield f"a partial artifact is left: {os.listdir(output)}"

    def serving(self, case, run_dir, port):
        def idle():
            return cs.Engine.attach(run_dir).status().operation is None

        try:
            until(idle, "the end of the operation")
            engine = cs.Engine.attach(run_dir)
            if not ask(port):
                yield "the engine gives no answer"
            if engine.status().state != "running":
                yield f"the engine is {engine.status()}"
            in_flight = "attach" in STEPS[case.operation] and STEPS[case.operation].index(case.step) > 2
            if case.action == "kill-caller" and in_flight and not case.last:
                interrupted = engine.status().interrupted
                if interrupted is None or interrupted.operation != "capture":
                    yield f"the status does not tell of the interrupted capture: {interrupted}"
        except (OSError, ColdSnapError, AssertionError) as error:
            yield f"the engine does not serve on: {type(error).__name__}: {error}"

    def nothing(self, case, run_dir, port, *, done=False):
        tag = f"{self.lab.tag}-{'handle' if case.operation == 'handle' else case}"
        try:
            until(lambda: not tagged(tag), "the end of every process")
            until(lambda: not post_mortem(run_dir).alive, "the end of the keeper")
            until(lambda: port_is_free(port), "the end of the listener")
        except AssertionError as error:
            yield f"{error}: {tagged(tag)}"
        left = sorted(os.listdir(run_dir)) if run_dir.exists() else []
        if left and (case.action != "kill-keeper" or "outcome.json" not in left):
            yield f"the run directory is left with {left}"
        try:
            cs.Engine.attach(run_dir)
            yield "an engine can be attached to"
        except EngineError as error:
            story = str(error)
            if case.action == "kill-keeper" and not case.last and "its keeper was killed" not in story:
                yield f"attach does not tell that the keeper was killed: {story}"
            in_flight = not (done or case.last)
            if case.action == "kill-keeper" and in_flight and f"during {operation_name(case)}" not in story:
                yield f"attach does not name the operation: {story}"


def operation_name(case):
    return "capture" if case.operation == "handle" else case.operation


@pytest.fixture(scope="module")
def matrix(tmp_path_factory, criu, engine_python, facts, captured, request):
    lab = Lab(tmp_path_factory.mktemp("faults"), criu, engine_python, facts)
    memory = set(os.listdir("/dev/shm"))
    matrix = Matrix(lab, captured.report.artifact)
    matrix.start(
        [
            item.callspec.params["case"]
            for item in request.session.items
            if item.fspath == request.fspath and hasattr(item, "callspec") and "case" in item.callspec.params
        ]
    )
    yield matrix
    matrix.pool.shutdown(cancel_futures=True)
    lab.close()
    assert not mounts(lab.directory)
    assert not [name for name in set(os.listdir("/dev/shm")) - memory if name.startswith(("psm_", "sem.mp-"))]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_afterwards_the_engine_serves_on_or_nothing_is_left(matrix, case):
    assert matrix.futures[case].result() == []


# While CRIU works there is code of its own in the tree, or half a tree: the worst moments to be killed in.
MIDDLE = [
    (operation, step, action, delay_s)
    for operation, step in (("handle", "dump"), ("restore", "thaw"))
    for action in ("kill-caller", "kill-keeper")
    for delay_s in (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)
]


@pytest.mark.parametrize(("operation", "step", "action", "delay_s"), MIDDLE)
def test_a_kill_in_the_middle_of_a_dump_or_a_thaw_leaves_as_little(matrix, operation, step, action, delay_s, tmp_path):
    case = Case(operation=operation, step=step, when=f"{delay_s}s-into", action=action)
    with matrix.one_engine:
        if operation == "handle":
            engine = matrix.serving_engine()
            run_dir, port = engine.run_dir, engine.endpoint.port
        else:
            run_dir, port = tmp_path / "run", unused_port()
        output, job = matrix.job(case, run_dir, port, tell=True)
        with subprocess.Popen(
            [sys.executable, str(CASE), json.dumps(job)], stdout=subprocess.PIPE, text=True
        ) as caller:
            while caller.stdout.readline().strip() != f"start {step}":
                assert caller.poll() is None, "the caller ended"
            time.sleep(delay_s)
            if action == "kill-caller":
                caller.kill()
            else:
                os.kill(json.loads((run_dir / "keeper.json").read_text())["keeper"]["pid"], signal.SIGKILL)
            told, _ = caller.communicate(timeout=LIMIT_S)
        done = "end hand-over" in told or "end settle" in told  # quicker than the kill
        serves = action == "kill-caller" and (operation == "handle" or done)
        try:
            left = matrix.serving(case, run_dir, port) if serves else matrix.nothing(case, run_dir, port, done=done)
            assert list(left) == []
            assert not (output / "artifact.json").exists() or cs.Artifact.open(output).verify("full")
        finally:
            if operation == "restore" or not serves:
                end(run_dir)
                matrix.engine = None if operation == "handle" else matrix.engine
            subprocess.run(["rm", "-rf", str(output)], check=True)


AGAIN = [
    Case(operation="capture", step="admit-output", when="after", action="kill-caller"),
    Case(operation="capture", step="dump", when="after", action="raise"),
    Case(operation="capture", step="seal", when="after", action="kill-keeper"),
    Case(operation="handle", step="seal", when="after", action="kill-caller"),
    Case(operation="restore", step="thaw", when="before", action="kill-keeper"),
    Case(operation="restore", step="reconnect", when="after", action="kill-caller"),
]


@pytest.mark.parametrize("again", AGAIN, ids=str)
def test_the_same_plan_run_again_without_the_fault_succeeds(matrix, again, tmp_path):
    run_dir, port = tmp_path / "run", unused_port()
    if again.operation == "handle":
        engine = matrix.lab.launch()
        run_dir, port = engine.run_dir, engine.endpoint.port
    try:
        matrix.call(again, run_dir, port, f"{again.step}:{again.when}:{again.action}")
        until(lambda: again.operation == "handle" or not post_mortem(run_dir).alive, "the end of the keeper")

        done, told, output = matrix.call(again, run_dir, port)

        assert told is not None and told["state"] == "succeeded", told or done.stderr
        assert again.operation == "restore" or cs.Artifact.open(output).verify("full")
        assert again.operation == "capture" or ask(port)
    finally:
        end(run_dir)
        subprocess.run(["rm", "-rf", str(output)], check=True)
