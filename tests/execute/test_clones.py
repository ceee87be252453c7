"""Clones of one artifact, at once, beside the living original: nothing is shared or mixed up, and nothing leaks."""

import json
import os
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
from lab import Lab, ask, mounts, port_is_free, sample, tagged, until, unused_port

import coldsnap as cs
from coldsnap.errors import AdmissionError
from coldsnap.keeper.control import request_control
from coldsnap.keeper.directive import read_acks

pytestmark = pytest.mark.criu

CLONE = Path(__file__).with_name("clone.py")
PROMPTS = ("Hello", "You may convey", "x" * 200)
CYCLES = 50 if "COLDSNAP_TEST_FULL" in os.environ else 10


@pytest.fixture(scope="module")
def family(tmp_path_factory, criu, engine_python, facts):
    """A living original and its artifact."""
    lab = Lab(tmp_path_factory.mktemp("family"), criu, engine_python, facts)
    began_s = time.monotonic()
    report = lab.capture(lab.engine(loopback=True), then="keep")
    yield SimpleNamespace(engine=report.engine, artifact=cs.Artifact.open(report.artifact), captured_s=began_s)
    lab.close()
    until(lambda: not tagged(lab.tag), "the end of the original and all of its clones")


def start_process(lab, artifact, *, days=0):
    where, facts = lab.placement(), lab.directory / "facts.json"
    lab.facts.save(facts)
    command = [sys.executable, CLONE, facts, artifact.path, str(where.front.port), where.run_dir, str(days)]
    return subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ), where


def outcome(process):
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    return json.loads(out)


def kept_names(engine):
    """Return what an engine has in its /dev/shm: the identity of every file, directory and socket, by path."""
    found, fd = {}, engine.keeper.shm_fd
    for above, directories, names, at in os.fwalk(".", dir_fd=fd, follow_symlinks=False):
        for name in [*directories, *names]:
            status = os.stat(name, dir_fd=at, follow_symlinks=False)
            found[os.path.normpath(os.path.join(above, name))] = (status.st_dev, status.st_ino, status.st_mode)
    return found


def test_four_clones_at_once_beside_the_original_have_nothing_in_common_but_their_answers(lab, family):
    host_shm = set(os.listdir("/dev/shm"))
    expected = [ask(family.engine, prompt) for prompt in PROMPTS]

    with ThreadPoolExecutor(2) as pool:
        processes = [start_process(lab, family.artifact) for _ in range(2)]
        threads = [pool.submit(lab.restore, family.artifact) for _ in range(2)]
        clones = [each.result(60).engine for each in threads]
        for process, where in processes:
            told = outcome(process)
            assert (told["port"], told["state"]) == (where.front.port, "running")
            clones.append(cs.Engine.attach(where.run_dir))

    everybody = [family.engine, *clones]
    assert len({engine.endpoint.port for engine in everybody}) == 5
    assert len({engine.status().incarnation for engine in everybody}) == 5
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda engine: [ask(engine, prompt) for prompt in PROMPTS], everybody))
        unseeded = list(pool.map(sample, everybody))
    assert answers == [expected] * 5
    assert len(set(unseeded)) == 5

    names = [kept_names(engine) for engine in everybody]
    for one in names:
        assert [path for path in one if path.startswith("psm_")], "shared memory"
        assert [path for path, found in one.items() if stat.S_ISSOCK(found[2])], "Unix sockets"
    for one, other in combinations(names, 2):
        assert not {found[:2] for found in one.values()} & {found[:2] for found in other.values()}
    assert set(os.listdir("/dev/shm")) <= host_shm

    gone, *others = clones
    gone.stop(grace_s=0)
    assert port_is_free(gone.endpoint.port)
    assert [ask(engine) for engine in (family.engine, *others)] == [expected[0]] * 4


def test_a_clone_may_listen_at_another_address(lab, family):
    where = cs.local(port=family.engine.endpoint.port, address="127.0.0.2", run_dir=lab.directory / "other")
    lab.run_dirs.append(Path(where.run_dir))

    report = lab.run(cs.Restore(family.artifact, placement=where))

    assert (report.engine.endpoint.host, report.engine.endpoint.port) == ("127.0.0.2", where.front.port)
    assert report.receipt("answer").effective == "16 tokens as captured"
    assert ask(family.engine)


def leavings(lab):
    """Return everything that a restore may leave: of this process, of the machine, of the run root."""
    return {
        "processes": sorted(tagged(lab.tag)),
        "mounts": mounts(lab.directory),
        "shared memory": sorted(os.listdir("/dev/shm")),
        "temporary files": sorted(name for name in os.listdir("/tmp") if "coldsnap" in name),
        "run directories": sorted(str(path) for path in lab.run_dirs if path.exists()),
        "sockets": sorted(name for name in unix_names() if "coldsnap-port" in name or str(lab.directory) in name),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "children": children(os.getpid()),
    }


def unix_names():
    return [line.split()[7] for line in Path("/proc/net/unix").read_text().splitlines()[1:] if len(line.split()) > 7]


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_restoring_and_stopping_again_and_again_leaves_nothing(lab, family):
    run_dir, port, expected = lab.directory / "cycle", unused_port(), ask(family.engine)

    def cycle():
        engine = lab.restore(family.artifact, port=port, run_dir=run_dir).engine
        assert ask(engine) == expected
        engine.stop(grace_s=0)

    cycle()  # what is loaded and opened once, for good
    before = leavings(lab)
    for _ in range(CYCLES):
        cycle()

    until(lambda: not remaining(before, leavings(lab)), lambda: f"the end of {remaining(before, leavings(lab))}")


def remaining(before, now):
    """Return what there is now and was not before, by kind."""
    return {
        kind: set(now[kind]) - set(was) if isinstance(was, list) else now[kind]
        for kind, was in before.items()
        if (set(now[kind]) - set(was) if isinstance(was, list) else now[kind] > was)
    }


def test_no_source_of_randomness_of_two_clones_gives_the_same(lab, family):
    first, second = (lab.restore(family.artifact).engine for _ in range(2))

    one, other = (request_control(engine.keeper.rank_dir, "draw", timeout_s=10) for engine in (first, second))

    assert set(one) == set(other)  # the same ranks, by role and pid
    for rank, drawn in one.items():
        expected = {"libc", "openssl", "tempfile", "random", "uuid", "secrets"}
        assert set(drawn) - {"ok"} == expected | ({"torch", "numpy"} if rank.startswith("worker") else set())
        for source in set(drawn) - {"ok"}:
            assert drawn[source] != other[rank][source], f"{source} of {rank}"
        ack = next(ack for ack in read_acks(first.keeper.rank_dir) if f"{ack.role}.{ack.pid}" == rank)
        assert set(ack.reseeded) >= {"libc", "openssl", "random"}


# -- what was left unsaid of names -----------------------------------------------------------------------------------


def test_names_of_unix_sockets_that_a_living_engine_has_are_refused_by_name(lab):
    path, abstract = str(lab.directory / "own.sock"), f"@own-{os.getpid()}"
    args = ("--listen-unix", path, "--listen-unix", abstract)
    artifact = cs.Artifact.open(lab.capture(lab.engine(args=args)).artifact)
    first = lab.restore(artifact).engine  # nobody has them now

    with pytest.raises(AdmissionError, match="Unix sockets whose names are taken here") as refused:
        lab.restore(artifact)

    assert set(refused.value.mismatches) == {path, abstract}
    assert ask(first)
    assert os.path.exists(path)


# -- clocks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("days", [2, -0.001])
def test_an_artifact_of_another_time_serves_and_no_watchdog_of_it_fires(lab, family, days):
    expected, away_s = ask(family.engine), days * 86_400

    process, where = start_process(lab, family.artifact, days=days)
    told = outcome(process)

    assert abs(told["clock_s"] - (time.monotonic() + away_s)) < 60, "the restore itself lived by other clocks"
    assert told["answers"] == [expected, expected]
    assert told["state"] == "running"
    # CRIU gives the tree a time namespace in which its clocks go on from where they stood at the dump.
    assert 0 < clock_of(where.run_dir) - family.captured_s < 120
    assert ask(where.front.port) == expected, "from outside of the time namespace"


def test_a_clone_that_is_captured_again_keeps_its_clocks(lab, family):
    process, where = start_process(lab, family.artifact, days=2)
    outcome(process)
    expected = ask(where.front.port)

    again = lab.capture(cs.Engine.attach(where.run_dir))
    second = lab.restore(cs.Artifact.open(again.artifact)).engine

    assert ask(second) == expected
    assert 0 < clock_of(second.run_dir) - family.captured_s < 180


def clock_of(run_dir):
    """Return where the monotonic clock of a tree stands, s."""
    keeper = json.loads((Path(run_dir) / "keeper.json").read_text())["keeper"]["pid"]
    root = children(keeper)[0]
    assert os.readlink(f"/proc/{root}/ns/time") != os.readlink("/proc/self/ns/time")
    offset = Path(f"/proc/{root}/timens_offsets").read_text().split()
    assert offset[0] == "monotonic"
    return time.monotonic() + int(offset[1]) + int(offset[2]) / 1e9
