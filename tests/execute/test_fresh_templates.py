"""An engine that is started anew takes its weights from packs: a template, and no checkpoint any more."""

import shutil
from types import SimpleNamespace

import pytest
from lab import Lab, ask, tagged, until

import coldsnap as cs
from coldsnap.artifact.store import Store
from coldsnap.artifact.tree import Trees
from coldsnap.errors import AdmissionError, IntegrityError, PayloadMissingError, UnsupportedError
from coldsnap.testing.checkpoint import write_checkpoint

pytestmark = pytest.mark.criu

N580 = {"compatibility.driver": "n580"}


@pytest.fixture(scope="module")
def captured(tmp_path_factory, criu, engine_python, facts):
    """One artifact for every test; its checkpoint is gone."""
    directory = tmp_path_factory.mktemp("anew")
    lab = Lab(directory, criu, engine_python, facts)
    checkpoint = write_checkpoint(directory / "weights.safetensors", seed=5)
    engine = lab.engine(weights=str(checkpoint))
    report = lab.capture(engine, policy=N580, then="keep")
    with report.engine as kept:
        answer = ask(kept)
    checkpoint.rename(directory / "moved-away")
    yield SimpleNamespace(report=report, answer=answer, directory=directory, engine=engine)
    lab.close()
    until(lambda: not tagged(lab.tag), "the end of every started process")
    shutil.rmtree(directory)


@pytest.fixture
def artifact(captured):
    return cs.Artifact.open(captured.report.artifact)


def restore_from(lab, artifact, store):
    return lab.run(cs.Restore(artifact, placement=lab.placement(), store=str(store)))


def test_one_run_yields_template_pack_index_and_start_files(captured, artifact):
    weights = artifact.descriptor.weights
    (worker,) = weights.workers

    assert artifact.descriptor.snapshot_driver.id == "n580"
    assert weights.kind == "packs" and weights.starts
    assert worker.bootstrap_index.path.endswith("worker-0/bootstrap-index.json")
    assert weights.start_files.path == "weights/start-files.tar"
    assert artifact.verify("full")
    assert captured.report.receipt("report").details["pack_bytes"] == weights.payloads.objects[0].bytes


def test_restores_without_the_checkpoint_answer_as_captured(lab, artifact, captured):
    for _ in range(2):
        report = lab.restore(artifact)

        assert ask(report.engine) == captured.answer
        read = report.receipt("report")
        (pack,) = artifact.descriptor.weights.payloads.objects
        assert read.details["pack_bytes"] == pack.bytes
        assert 0 <= pack.bytes - read.details["pack_moved_bytes"] < 4096 * 8
        assert "matched by semantic id" in read.reason
        report.engine.stop()


def test_a_store_without_the_pack_is_refused_before_anything_starts(lab, artifact, tmp_path):
    with pytest.raises(PayloadMissingError):
        restore_from(lab, artifact, tmp_path / "empty")
    assert not tagged(lab.tag)


def test_another_store_gets_the_start_files_out_of_the_artifact(lab, artifact, captured, tmp_path):
    (pack,) = artifact.descriptor.weights.payloads.objects
    source = Store(captured.report.receipt("order").reason)
    store = Store(tmp_path / "store")
    store.prepare()
    shutil.copy2(source.path(pack.sha256), store.path(pack.sha256))

    assert ask(restore_from(lab, artifact, store.root).engine) == captured.answer
    Trees(store.root).verify(artifact.descriptor.weights.start_files.sha256)


def test_a_pack_with_another_byte_ends_the_start_and_leaves_nothing(lab, artifact, captured, tmp_path):
    (pack,) = artifact.descriptor.weights.payloads.objects
    store = Store(tmp_path / "store")
    store.prepare()
    data = bytearray(Store(captured.report.receipt("order").reason).path(pack.sha256).read_bytes())
    data[99] ^= 1
    store.path(pack.sha256).write_bytes(data)
    store.path(pack.sha256).chmod(0o600)

    with pytest.raises((IntegrityError, cs.errors.EngineError)):
        restore_from(lab, artifact, store.root)
    assert not tagged(lab.tag)


def test_the_checkpoint_is_not_an_option_that_the_artifact_has(artifact, facts):
    operation = cs.Restore(artifact, placement=cs.local(port=8000))
    with pytest.raises(UnsupportedError, match="loads its packs"):
        cs.resolve(cs.Policy().evolve(**{"weights.mode": "image"}), operation, facts)


def test_a_store_in_the_output_is_refused(lab, captured, facts):
    output = lab.output()
    operation = cs.Capture(captured.engine, output=output, placement=lab.placement(), store=str(output / "store"))
    with pytest.raises(AdmissionError, match="lies in the output"):
        cs.resolve(cs.Policy().evolve(**N580), operation, facts)
