"""A rank dies, or the run root fills up, in the middle of an operation: it is told by name, and nothing is left."""

import contextlib
import os
import subprocess

import pytest
from lab import ask, kill_rank, port_is_free, tagged, until

import coldsnap as cs
from coldsnap.artifact.held import reading
from coldsnap.errors import AdmissionError, ArtifactError, ColdSnapError, EngineError
from coldsnap.keeper import kernel

pytestmark = pytest.mark.criu


def at(step, act):
    """Return a fault point that acts once, before a step."""
    done = []

    def fault_point(name, when, *, keeper_pid):
        if (name, when) == (step, "before") and not done:
            done.append(name)
            act()

    return fault_point


# -- a rank dies -------------------------------------------------------------------------------------------------------


def test_a_handle_tells_of_a_dead_worker_and_a_capture_is_refused_by_its_name(lab):
    engine = lab.launch()
    with pytest.raises(AdmissionError, match="lies in the run directory of its engine, .*choose another output"):
        lab.capture(engine, output=engine.run_dir / "rank" / "artifact")
    assert ask(engine)

    pid = kill_rank(engine.run_dir, "worker")

    status = engine.wait(10)

    assert status.state == "failed"
    assert status.story == f"its worker (pid {pid}) has died with signal 9 (SIGKILL)"
    output = lab.output()
    with pytest.raises(EngineError, match=rf"its worker \(pid {pid}\) has died") as failed:
        lab.capture(engine, output=output)
    assert failed.value.report.workload.startswith(f"the engine does not serve: its worker (pid {pid}) has died")
    assert not output.exists()
    engine.stop(grace_s=0)


def test_a_worker_that_dies_behind_its_capture_is_told_and_the_artifact_is_whole(lab):
    engine = lab.launch()
    expected = ask(engine)
    died = []

    def behind_the_dump(step, when, *, keeper_pid):
        if (step, when) == ("seal", "before"):
            died.append(kill_rank(engine.run_dir, "worker"))
            until(lambda: engine.keeper.status().loss, "the end of the worker")

    report = lab.capture(engine, then="keep", fault_point=behind_the_dump)

    assert report.workload.startswith(f"the engine does not serve any more (its worker (pid {died[0]}) has died")
    assert report.receipt("settle").effective == "serves no more"
    report.engine.stop(grace_s=0)
    assert ask(lab.restore(cs.Artifact.open(report.artifact)).engine) == expected


@pytest.mark.parametrize("step", ["ready", "answer"])
def test_a_worker_that_dies_in_a_launch_or_restore_ends_it_by_name(lab, artifact, step):
    where = lab.placement()
    died = []
    plan = cs.resolve(cs.Policy(), cs.Restore(artifact, placement=where), lab.facts)
    with pytest.raises(EngineError, match=r"its worker \(pid \d+\) has died with signal 9") as failed:
        cs.execute(plan, fault_point=at(step, lambda: died.append(kill_rank(where.run_dir, "worker"))))

    assert f"(pid {died[0]})" in str(failed.value)
    assert failed.value.log_tail
    assert failed.value.report.workload.startswith("nothing is left running")
    assert not os.path.exists(where.run_dir)
    assert port_is_free(where.front.port)


# -- no room in the run root -------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "root"
    path.mkdir()
    kernel.mount("tmpfs", str(path), "tmpfs", 0, "size=16m,mode=700")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(root):
    fd = os.open(root / "ballast", os.O_WRONLY | os.O_CREAT)
    for size in (1 << 20, 4096):
        with contextlib.suppress(OSError):
            while os.write(fd, bytes(size)):
                pass
    os.close(fd)


def test_a_full_run_root_is_refused_in_one_sentence(lab, artifact, root):
    fill(root)
    for operation in (
        cs.Restore(artifact, placement=lab.placement(run_dir=root / "a")),
        cs.Launch(lab.engine(), placement=lab.placement(run_dir=root / "b")),
    ):
        with pytest.raises(
            AdmissionError, match=r"the filesystem of the run directory .* has room for \d+ KiB"
        ) as failed:
            lab.run(operation)
        assert failed.value.report.workload == "nothing was started"
    assert os.listdir(root) == ["ballast"]


@pytest.mark.parametrize("step", ["stage", "thaw", "reconnect", "hand-over"])
def test_a_run_root_that_fills_up_in_a_restore_leaves_no_run_directory(lab, artifact, root, step):
    plan = cs.resolve(cs.Policy(), cs.Restore(artifact, placement=lab.placement(run_dir=root / "a")), lab.facts)
    with contextlib.suppress(ColdSnapError):  # what was written before may be all that is needed
        report = cs.execute(plan, fault_point=at(step, lambda: fill(root)))
        assert ask(report.engine)
        report.engine.stop(grace_s=0)

    until(lambda: os.listdir(root) == ["ballast"], "the end of the run directory")
    assert not tagged(lab.tag)


def test_a_run_root_that_fills_up_in_a_launch_says_so(lab, root):
    plan = cs.resolve(cs.Policy(), cs.Launch(lab.engine(), placement=lab.placement(run_dir=root / "a")), lab.facts)
    with pytest.raises(ColdSnapError, match="full|No space") as failed:
        cs.execute(plan, fault_point=at("ready", lambda: fill(root)))

    assert failed.value.report.workload.startswith("nothing is left running")
    assert os.listdir(root) == ["ballast"]
    assert not tagged(lab.tag)


# -- places that are taken ---------------------------------------------------------------------------------------------


def test_an_artifact_is_not_deleted_while_it_is_restored(lab, copied):
    refusals = []

    def delete():
        with pytest.raises(ArtifactError, match="in use by a restore that reads it; wait for its end") as refused:
            lab.run(cs.Delete(copied))
        refusals.append(refused.value)

    engine = lab.run(cs.Restore(copied, placement=lab.placement()), fault_point=at("thaw", delete)).engine

    assert len(refusals) == 1
    assert ask(engine)
    engine.stop(grace_s=0)
    lab.run(cs.Delete(copied))
    assert not copied.path.exists()


def test_two_restores_share_an_artifact(copied):
    with reading(copied.path), reading(copied.path):
        assert copied.verify("evidence")


def test_an_output_in_the_run_directory_to_be_is_refused(lab):
    where = lab.placement()
    with pytest.raises(AdmissionError, match="lies in the run directory of its engine"):
        lab.capture(lab.engine(), placement=where, output=f"{where.run_dir}/artifact")
    assert not os.path.exists(where.run_dir)


def test_a_run_directory_in_an_artifact_is_refused(lab, copied):
    with pytest.raises(AdmissionError, match="lies in the artifact .*; choose another one"):
        lab.restore(copied, run_dir=copied.path / "run")
    assert cs.Artifact.open(copied.path).verify("full")
