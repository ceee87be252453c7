"""The main job: captured, gone, back, the same answer."""

import contextlib
import json
import os
import socket
import subprocess
import sys

import pytest
from lab import ask, end, port_is_free, sample, tagged, until, unused_port

import coldsnap as cs
from coldsnap.drivers.images import FilesImage
from coldsnap.errors import AdmissionError

pytestmark = pytest.mark.criu

HOST = {"process.namespace": "host"}


def test_one_artifact_comes_back_many_times_each_with_the_captured_answer(lab, captured, artifact):
    expected = None
    for port in (captured.port, unused_port(), captured.port):
        report = lab.restore(artifact, port=port)

        with report.engine as engine:
            assert engine.endpoint.port == port
            answer = ask(engine)
            expected = expected or answer
            assert answer == expected
            assert engine.status().state == "running"
        assert port_is_free(port)
        assert not report.engine.run_dir.exists()


def test_a_restore_may_follow_at_once_on_the_end_of_the_same_tree(lab, artifact, captured):
    for _ in range(5):
        report = lab.restore(artifact, port=captured.port)
        assert ask(report.engine)
        report.engine.stop(grace_s=0)


def test_two_restores_live_side_by_side(lab, artifact):
    first, second = lab.restore(artifact).engine, lab.restore(artifact).engine

    assert first.endpoint.port != second.endpoint.port
    assert ask(first) == ask(second)
    assert first.status().incarnation != second.status().incarnation


def test_a_captured_engine_is_gone_after_the_commit(lab):
    placement = lab.placement()
    report = lab.capture(lab.engine(), placement=placement)

    assert report.engine is None
    assert report.workload == "the engine was stopped after the commit"
    assert not tagged(lab.tag)
    assert port_is_free(placement.front.port)
    assert cs.Artifact.open(report.artifact).verify("full")


def test_a_kept_engine_serves_on_beside_its_restored_copy(lab):
    report = lab.capture(lab.engine(loopback=True), then="keep")
    original = report.engine
    before = ask(original)

    copy = lab.restore(cs.Artifact.open(report.artifact)).engine

    assert ask(copy) == before
    assert ask(original) == before
    assert original.status().operation is None
    assert copy.endpoint.port != original.endpoint.port


def test_the_original_port_is_free_again_once_the_original_is_stopped(lab):
    report = lab.capture(lab.engine(), then="keep")
    port = report.engine.endpoint.port
    expected = ask(port)
    report.engine.stop(grace_s=0)

    lab.restore(cs.Artifact.open(report.artifact), port=port)

    assert ask(port) == expected


def test_an_engine_that_has_served_is_captured_by_its_handle_and_serves_on(lab):
    engine = lab.launch()
    expected = ask(engine, "served before")

    report = lab.capture(engine, then="keep")

    assert report.engine.status().state == "running"
    assert ask(report.engine, "served before") == expected
    restored = lab.restore(cs.Artifact.open(report.artifact)).engine
    assert ask(restored, "served before") == expected


def test_an_engine_is_captured_by_its_handle_and_stopped(lab):
    engine = lab.launch()
    port = engine.endpoint.port

    report = lab.capture(engine)

    assert report.engine is None
    assert port_is_free(port)
    assert not tagged(lab.tag)
    assert lab.restore(cs.Artifact.open(report.artifact), port=port).engine.status().state == "running"


def test_a_restored_engine_is_captured_again(lab, artifact):
    first = lab.restore(artifact)
    expected = ask(first.engine)

    again = lab.capture(first.engine)
    second = lab.restore(cs.Artifact.open(again.artifact))

    assert ask(second.engine) == expected
    assert cs.Artifact.open(again.artifact).descriptor.engine == artifact.descriptor.engine


def test_an_engine_is_launched_and_stopped_by_plans(lab):
    engine = lab.launch()
    port, run_dir = engine.endpoint.port, engine.run_dir
    assert ask(engine)

    report = lab.run(cs.Stop(engine))

    assert report.workload == "the engine was stopped"
    assert port_is_free(port)
    assert not run_dir.exists()


def test_another_process_attaches_and_captures(lab):
    engine = lab.launch()
    port, output = engine.endpoint.port, lab.output()
    expected = ask(engine)
    lab.facts.save(lab.directory / "facts.json")
    engine.detach()

    script = (
        "import sys, coldsnap as cs, coldsnap.testing.reference\n"
        "run_dir, output, facts = sys.argv[1:]\n"
        "engine = cs.Engine.attach(run_dir)\n"
        "plan = cs.resolve(cs.Policy(), cs.Capture(engine, output=output), cs.Facts.load(facts))\n"
        "print(cs.execute(plan).workload)\n"
    )
    arguments = [sys.executable, "-c", script, str(engine.run_dir), str(output), str(lab.directory / "facts.json")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)

    assert done.stdout.strip() == "the engine was stopped after the commit", done.stderr
    assert ask(lab.restore(cs.Artifact.open(output), port=port).engine) == expected


def test_private_namespaces_do_not_care_who_has_a_captured_pid(lab, artifact):
    (unit,) = artifact.descriptor.capsule.units
    hold_pids(lab, unit.pids)

    assert ask(lab.restore(artifact).engine)


def test_host_namespaces_work_where_the_captured_pids_are_free_and_refuse_by_name_where_not(lab):
    run_dir = lab.directory / "host-run"
    port = unused_port()
    report = lab.capture(lab.engine(), policy=HOST, placement=lab.placement(port=port, run_dir=run_dir))
    artifact = cs.Artifact.open(report.artifact)
    (unit,) = artifact.descriptor.capsule.units
    assert unit.namespace == "host"
    shm = set(os.listdir("/dev/shm"))

    operation = cs.Restore(artifact, placement=cs.local(port=port))
    for _ in range(2):
        restored = lab.run(operation, HOST)
        assert ask(restored.engine)
        assert restored.engine.run_dir == run_dir
        restored.engine.stop()
    again = lab.run(operation, HOST)
    recaptured = lab.capture(again.engine, policy=HOST)
    end(run_dir)

    (decoy,) = hold_pids(lab, unit.pids[1:2])
    # Pids are given out in order: what this restore itself starts may get captured ones too, and is named beside it.
    taken = rf"captured pids are taken by other processes: (\d+, )*{decoy}[,;]"
    with pytest.raises(AdmissionError, match=taken):
        lab.run(operation, HOST)

    assert recaptured.artifact.exists()
    assert not run_dir.exists()
    assert set(os.listdir("/dev/shm")) <= shm


def hold_pids(lab, pids):
    """Occupy pids of the host that are not occupied yet."""
    for pid in pids:
        if os.path.exists(f"/proc/{pid}"):
            continue
        with open("/proc/sys/kernel/ns_last_pid", "w") as last:
            last.write(str(pid - 1))
        decoy = subprocess.Popen(["sleep", "300"])
        lab.stack.callback(decoy.wait, timeout=10)
        lab.stack.callback(decoy.kill)
        assert os.path.exists(f"/proc/{pid}"), f"pid {pid} could not be taken"
    return pids


def test_ports_inside_the_tree_move_where_somebody_else_has_them(lab, artifact):
    (unit,) = artifact.descriptor.capsule.units
    fd = os.open(artifact.path / unit.images, os.O_RDONLY | os.O_DIRECTORY)
    inner = {each.port for each in FilesImage.read(fd).tcp_sockets() if not each.listening}
    os.close(fd)
    assert len(inner) == 2  # the loopback pair

    with contextlib.ExitStack() as decoys:
        for port in inner:
            with contextlib.suppress(OSError):  # somebody has it already: so much the better
                decoys.enter_context(socket.create_server(("127.0.0.1", port)))
        report = lab.restore(artifact)

    assert report.receipt("stage").effective == "3 ports moved"
    assert ask(report.engine)


# -- randomness --------------------------------------------------------------------------------------------------------


def test_what_nobody_seeded_differs_between_two_restores_and_a_greedy_answer_does_not(lab, artifact):
    first, second = lab.restore(artifact).engine, lab.restore(artifact).engine

    assert sample(first) != sample(second)
    assert ask(first) == ask(second)


def test_a_seed_that_the_user_chose_for_the_engine_is_left_alone(lab):
    report = lab.capture(lab.engine(seed=7), then="keep")
    artifact = cs.Artifact.open(report.artifact)
    expected = sample(report.engine)

    for _ in range(2):
        assert sample(lab.restore(artifact).engine) == expected


def test_acks_tell_the_incarnation_that_every_rank_took_over(lab, artifact):
    engine = lab.restore(artifact).engine
    incarnation = engine.status().incarnation

    acks = [json.loads(path.read_text()) for path in (engine.run_dir / "rank" / "ack").iterdir()]

    assert {ack["role"] for ack in acks} == {"api", "worker"}
    assert {ack["incarnation"] for ack in acks} == {incarnation}
    until(lambda: engine.status().state == "running", "the engine's running")
