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
from coldsnap.transfer.safetensors import read_header

pytestmark = pytest.mark.criu

N580 = {"compatibility.driver": "n580"}


@pytest.fixture(scope="module")
def captured(tmp_path_factory, criu, engine_python, facts):
    """One artifact for every test; its checkpoint is gone."""
    directory = tmp_path_factory.mktemp("anew")
    lab = Lab(directory, criu, engine_python, facts)
    checkpoint = write_checkpoint(directory / "weights.safetensors", seed=5)
    engine = lab.engine(weights=str(checkpoint))
    report = lab.capture(engine, policy=N580 | {"weights.mode": "recovery"}, then="keep")
    with report.engine as kept:
        answer = ask(kept)
    hidden = checkpoint.rename(directory / "moved-away")
    yield SimpleNamespace(
        report=report, answer=answer, directory=directory, engine=engine, checkpoint=checkpoint, hidden=hidden
    )
    lab.close()
    until(lambda: not tagged(lab.tag), "the end of every started process")
    shutil.rmtree(directory)


@pytest.fixture
def artifact(captured):
    return cs.Artifact.open(captured.report.artifact)


@pytest.fixture
def checkpoint(captured):
    """The checkpoint, where it was at the capture; and what a test did to it is undone."""
    data = captured.hidden.read_bytes()
    captured.checkpoint.write_bytes(data)
    yield captured.checkpoint
    captured.checkpoint.unlink(missing_ok=True)


def restore_from(lab, artifact, store, **leaves):
    policy = {f"weights.{name}": value for name, value in leaves.items()}
    return lab.run(cs.Restore(artifact, placement=lab.placement(), store=str(store)), policy)


def test_one_run_yields_template_pack_index_and_start_files(captured, artifact):
    weights = artifact.descriptor.weights
    (worker,) = weights.workers

    assert artifact.descriptor.snapshot_driver.id == "n580"
    assert weights.kind == "packs" and weights.starts
    assert weights.recovery is not None and worker.recovery_manifest is not None
    assert captured.report.receipt("report").details["recovery"] == "recorded"
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


def test_a_store_without_the_pack_is_refused_by_native_before_anything_starts(lab, artifact, tmp_path):
    with pytest.raises(PayloadMissingError):
        restore_from(lab, artifact, tmp_path / "empty", mode="native")
    assert not tagged(lab.tag)


def test_an_absent_pack_lets_auto_start_out_of_the_checkpoint_and_the_receipts_say_so(
    lab, artifact, captured, checkpoint, tmp_path
):
    report = restore_from(lab, artifact, tmp_path / "empty")

    assert ask(report.engine) == captured.answer
    admitted = report.receipt("admit-packs")
    assert (admitted.requested, admitted.effective) == ("auto", "recovery")
    assert "is not in the store" in admitted.reason
    assert report.receipt("order").reason == "out of the checkpoint"
    assert report.receipt("start").effective == "weights by recovery"
    read = report.receipt("report").details
    assert read["pack_bytes"] == read["pack_moved_bytes"] == 0
    assert read["checkpoint_bytes"] == read["checkpoint_local_read_bytes"] > 0
    assert report.receipt("verify-packs").effective == "no pack is used"


def test_recovery_that_was_asked_for_looks_at_no_pack_and_reads_as_it_was_told(lab, artifact, captured, checkpoint):
    leaves = {"mode": "recovery", "recovery.loader_backend": "torch", "recovery.verify_bytes": 64}
    report = restore_from(lab, artifact, captured.directory / "store", **leaves)

    assert ask(report.engine) == captured.answer
    assert report.receipt("order").requested == "torch"
    assert "torch" in report.receipt("report").effective
    assert report.receipt("report").details["checkpoint_verified_sample_bytes"] == 4 * 2 * 64


@pytest.mark.parametrize("change", ["missing", "revision"])
def test_a_missing_file_and_another_revision_are_refused_before_anything_starts(
    lab, artifact, checkpoint, change, tmp_path
):
    if change == "missing":
        checkpoint.unlink()
    else:
        write_checkpoint(checkpoint, seed=6, size_bytes=2 << 20)

    match = "a file of the checkpoint is missing" if change == "missing" else "another model or revision"
    with pytest.raises(IntegrityError, match=match) as refused:
        restore_from(lab, artifact, tmp_path / "empty", mode="cache-only-auto")

    assert "keeper" not in [receipt.step for receipt in refused.value.report.receipts]
    assert not tagged(lab.tag)


def test_a_flipped_byte_of_the_checkpoint_ends_the_start_by_the_name_of_its_tensor(lab, artifact, checkpoint, tmp_path):
    stored = next(one for one in read_header(checkpoint) if one.name == "recurrent")
    data = bytearray(checkpoint.read_bytes())
    data[stored.file_offset + 100] ^= 1
    checkpoint.write_bytes(data)

    expected = "the load of worker-0 was ended: the tensor recurrent is not the one that was loaded at capture"
    with pytest.raises(IntegrityError, match=expected) as refused:
        restore_from(lab, artifact, tmp_path / "empty")

    assert refused.value.path == str(checkpoint)
    assert "answer" not in [receipt.step for receipt in refused.value.report.receipts]
    assert not tagged(lab.tag)


def test_a_pack_that_is_lost_is_made_of_the_checkpoint_again(lab, artifact, checkpoint, tmp_path):
    lab.run(cs.Materialize(artifact, store=str(tmp_path / "store")))

    (pack,) = artifact.descriptor.weights.payloads.objects
    assert Store(tmp_path / "store").path(pack.sha256).stat().st_size == pack.bytes


def test_samples_of_a_memory_that_a_template_has_not_are_refused(artifact, facts):
    operation = cs.Restore(artifact, placement=cs.local(port=8000))
    policy = cs.Policy().evolve(**{"weights.recovery.verify_model_bytes": 64})
    with pytest.raises(UnsupportedError, match="no samples of a memory"):
        cs.resolve(policy, operation, facts)


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
