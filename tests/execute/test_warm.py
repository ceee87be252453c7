"""What is done ahead: files prepared, processes left warm; and a warm engine runs, stays warm, or is no more."""

import os
import shutil
import socket
from types import SimpleNamespace

import pytest
from attrs import evolve
from lab import Background, Lab, ask, changed, port_is_free, tagged, until, unused_port

import coldsnap as cs
from coldsnap.artifact.admission import record_path
from coldsnap.errors import (
    AcceptanceError,
    AdmissionError,
    ArtifactError,
    EngineError,
    PayloadMissingError,
    PolicyError,
    StepError,
    UnsupportedError,
)
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.faults import FaultPlan

pytestmark = pytest.mark.criu

SIZE_BYTES = 8 << 20


@pytest.fixture(scope="module")
def home(tmp_path_factory, criu, engine_python, facts):
    """An artifact with a pack, and the answer of its engine."""
    directory = tmp_path_factory.mktemp("warm")
    lab = Lab(directory, criu, engine_python, facts)
    checkpoint = write_checkpoint(directory / "model.safetensors", size_bytes=SIZE_BYTES)
    report = lab.capture(lab.engine(weights=str(checkpoint), loopback=True), then="keep")
    artifact = cs.Artifact.open(report.artifact)
    yield SimpleNamespace(
        artifact=artifact, launched=report.engine, answer=ask(report.engine), store=directory / "store"
    )
    lab.close()
    until(lambda: not tagged(lab.tag), "the end of every process of the module")
    shutil.rmtree(directory)


@pytest.fixture
def pack(home):
    (payload,) = home.artifact.descriptor.weights.payloads.objects
    return home.store / payload.path


@pytest.fixture
def warm(lab, home):
    """A warm engine."""
    return lab.run(cs.Restore(home.artifact, placement=lab.placement(), state="warm"))


def state(lab, engine):
    return lab.run(cs.Status(engine)).receipt("status").effective


# -- warm -------------------------------------------------------------------------------------------------------------


def test_a_warm_engine_has_its_processes_and_neither_weights_nor_an_answer(lab, home, warm):
    steps = [receipt.step for receipt in warm.receipts]
    assert {"verify", "verify-packs", "thaw", "reconnect"} <= {*steps}
    assert not {"hydrate", "answer", "prefetch"} & {*steps}
    assert warm.answer_s is None
    assert warm.workload.startswith("the engine is warm")
    assert state(lab, warm.engine) == "warm"
    told = lab.run(cs.Status(warm.engine)).receipt("status").details
    assert (told["weights_mapped_bytes"], told["kv_cache_mapped_bytes"]) == (0, 0)
    assert told["weights_bytes"] >= SIZE_BYTES
    assert told["requests_open"] == 0


def test_a_warm_engine_runs_when_it_has_answered_as_captured_and_not_before(lab, home, warm):
    waiting = Background(lambda: ask(warm.engine))
    until(lambda: lab.run(cs.Status(warm.engine)).receipt("status").details["requests_held"], "a request at the door")

    report = lab.run(cs.Restore(warm.engine))

    assert waiting.result() == home.answer == ask(report.engine)
    assert report.answer_s > 0
    assert report.receipt("hydrate").details["pack_bytes"] >= SIZE_BYTES
    assert report.engine.run_dir == warm.engine.run_dir
    assert state(lab, report.engine) == "awake"
    with pytest.raises(AdmissionError, match="is not warm"):
        lab.run(cs.Restore(report.engine))
    lab.run(cs.Sleep(report.engine))
    lab.run(cs.Wake(report.engine))
    assert ask(report.engine) == home.answer


def test_a_warm_engine_is_found_again_and_can_be_stopped(lab, warm):
    run_dir = warm.engine.run_dir
    lab.run(cs.Stop(cs.Engine.attach(run_dir)))
    assert not run_dir.exists()


def test_a_warm_engine_is_not_woken_captured_or_asked_for_its_packs(lab, home, warm):
    with pytest.raises(AdmissionError, match=r"is warm: .* restore it"):
        lab.run(cs.Wake(warm.engine))
    with pytest.raises(AdmissionError, match="is sleeping"):
        lab.capture(warm.engine, then="keep")
    with pytest.raises(EngineError, match="sleeps"):
        lab.run(cs.Materialize(warm.engine))
    assert lab.run(cs.Sleep(warm.engine)).receipt("sleep").effective == "it slept already"
    assert state(lab, warm.engine) == "warm"
    assert ask(lab.run(cs.Restore(warm.engine)).engine) == home.answer


def test_what_is_refused_before_the_weights_move_leaves_it_warm(lab, home, warm, pack, tmp_path):
    aside = pack.rename(tmp_path / "aside")
    with pytest.raises(PayloadMissingError, match=pack.name) as failed:
        lab.run(cs.Restore(warm.engine), {"weights.mode": "native"})
    assert "running as before" in failed.value.report.workload
    aside.rename(pack)
    gone = home.artifact.path.rename(tmp_path / "gone")
    with pytest.raises(ArtifactError):
        lab.run(cs.Restore(warm.engine))
    gone.rename(home.artifact.path)
    assert state(lab, warm.engine) == "warm"
    assert ask(lab.run(cs.Restore(warm.engine)).engine) == home.answer


@pytest.mark.parametrize("step", ["take:after", "hydrate:after", "answer:after"])
def test_a_failure_after_that_leaves_nothing(lab, warm, step):
    port, run_dir = warm.engine.endpoint.port, warm.engine.run_dir
    with pytest.raises(StepError) as failed:
        lab.run(cs.Restore(warm.engine), fault_point=FaultPlan.parse(f"{step}:raise"))
    assert "nothing is left running" in failed.value.report.workload
    assert port_is_free(port)
    assert not run_dir.exists()


def test_an_engine_with_another_answer_is_not_kept(lab, home, tmp_path):
    shutil.copytree(home.artifact.path, tmp_path / "artifact")
    captured = home.artifact.descriptor.acceptance
    first, *others = captured.token_ids
    wrong = evolve(captured, token_ids=(first ^ 1, *others))
    artifact = changed(cs.Artifact.open(tmp_path / "artifact"), acceptance=wrong)
    warm = lab.run(cs.Restore(artifact, placement=lab.placement(), state="warm", store=home.store)).engine

    with pytest.raises(AcceptanceError) as failed:
        lab.run(cs.Restore(warm, store=home.store))

    assert "nothing is left running" in failed.value.report.workload
    assert not warm.run_dir.exists()


def test_a_warm_engine_does_not_recover_what_its_artifact_has_no_copies_of(lab, home, tmp_path):
    shutil.copytree(home.artifact.path, tmp_path / "artifact")
    packs_only = evolve(home.artifact.descriptor.weights, recovery=None)
    artifact = changed(cs.Artifact.open(tmp_path / "artifact"), weights=packs_only)
    warm = lab.run(cs.Restore(artifact, placement=lab.placement(), state="warm", store=home.store)).engine

    with pytest.raises(UnsupportedError, match="are in packs") as refusal:
        lab.run(cs.Restore(warm, store=home.store), {"weights.mode": "recovery"})

    assert refusal.value.field == "weights.mode"
    assert state(lab, warm) == "warm"
    assert ask(lab.run(cs.Restore(warm, store=home.store)).engine) == home.answer


def test_what_cannot_be_warm_is_refused_by_name(lab, home, artifact, warm):
    where = lab.placement()
    with pytest.raises(UnsupportedError, match="come back with its process image") as refusal:
        lab.run(cs.Restore(artifact, placement=where, state="warm"))
    assert refusal.value.field == "state"
    with pytest.raises(UnsupportedError, match="no bytes yet") as refusal:
        lab.run(cs.Restore(home.artifact, placement=where, state="warm"), {"weights.native.materialize": "required"})
    assert refusal.value.field == "weights.native.materialize"
    with pytest.raises(PolicyError, match="no placement with the handle"):
        cs.Restore(warm.engine, placement=where)
    with pytest.raises(PolicyError, match="a placement for the artifact"):
        cs.Restore(home.artifact)
    with pytest.raises(PolicyError, match="expected 'running'"):
        cs.Restore(warm.engine, state="warm")
    with pytest.raises(AdmissionError, match="was launched, not restored"):
        lab.run(cs.Restore(home.launched))


# -- prepare ----------------------------------------------------------------------------------------------------------


def test_a_preparation_verifies_and_reads_everything_and_starts_nothing(lab, home, pack):
    os.unlink(record_path(pack))
    port = unused_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))  # the port belongs to the engine that serves until then
        where = lab.placement(port=port)
        before = tagged(lab.tag)

        report = lab.run(cs.Prepare(home.artifact, placement=where))
        again = lab.run(cs.Prepare(home.artifact, placement=where))

    assert report.engine is None
    assert report.workload == "nothing was started"
    assert tagged(lab.tag) == before
    assert not where.run_dir or not os.path.exists(where.run_dir)
    assert report.receipt("verify-packs").bytes > 0
    assert again.receipt("verify-packs").bytes == 0
    files = [file for unit in home.artifact.descriptor.capsule.units for file in unit.files]
    assert report.receipt("read-ahead").effective == f"{len(files) + 2} of {len(files) + 2} files in the page cache"
    assert report.receipt("read-ahead").details["provider"] == "native"
    assert ask(lab.restore(home.artifact).engine) == home.answer


def test_a_preparation_refuses_what_the_restore_would_refuse(lab, home, pack, tmp_path):
    aside = pack.rename(tmp_path / "aside")
    with pytest.raises(PayloadMissingError, match=pack.name):
        lab.run(cs.Prepare(home.artifact, placement=lab.placement()), {"weights.mode": "native"})
    aside.rename(pack)
    with pytest.raises(UnsupportedError, match="are in packs"):
        lab.run(cs.Prepare(home.artifact, placement=lab.placement()), {"weights.mode": "image"})


def test_an_artifact_with_its_weights_in_the_image_is_prepared_too(lab, artifact):
    report = lab.run(cs.Prepare(artifact, placement=lab.placement()))
    assert report.receipt("read-ahead").bytes >= artifact.size_bytes["images"]
    assert report.receipt("read-ahead").details["provider"] == "image"
