"""A store that lost its pack gets it again from the memory of an engine that was restored, while that serves."""

import shutil
from types import SimpleNamespace

import pytest
from lab import Lab, ask, port_is_free, tagged, until, unused_port

import coldsnap as cs
from coldsnap.errors import EngineError, StepError, UnsupportedError
from coldsnap.testing.checkpoint import write_checkpoint

pytestmark = pytest.mark.criu

SIZE_BYTES = 8 << 20


@pytest.fixture(scope="module")
def home(tmp_path_factory, criu, engine_python, facts):
    """An artifact with a pack, and its answer."""
    directory = tmp_path_factory.mktemp("materialize")
    lab = Lab(directory, criu, engine_python, facts)
    checkpoint = write_checkpoint(directory / "model.safetensors", size_bytes=SIZE_BYTES)
    report = lab.capture(lab.engine(weights=str(checkpoint)), then="keep")
    artifact = cs.Artifact.open(report.artifact)
    restored = lab.restore(artifact).engine
    yield SimpleNamespace(
        artifact=artifact,
        launched=report.engine,
        engine=restored,
        answer=ask(restored),
        store=directory / "store",
    )
    lab.close()
    until(lambda: not tagged(lab.tag), "the end of every process of the module")
    shutil.rmtree(directory)


@pytest.fixture
def pack(home):
    """The pack, there before and after the test."""
    (payload,) = home.artifact.descriptor.weights.payloads.objects
    path = home.store / payload.path
    content = path.read_bytes()
    yield SimpleNamespace(path=path, content=content, sha256=payload.sha256)
    assert path.read_bytes() == content
    cs.Artifact.open(home.artifact.path)


class After:
    """A fault point that does something once a step has ended."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def __call__(self, step, when, *, keeper_pid):
        if (step, when) == (self.step, "after"):
            self.act()


def test_a_restored_engine_gives_its_pack_again_and_serves_meanwhile(lab, home, pack):
    pack.path.unlink()

    report = lab.run(cs.Materialize(home.engine))

    receipt = report.receipt("materialize")
    assert (receipt.requested, receipt.effective, receipt.bytes) == ("required", "ready", len(pack.content))
    assert pack.sha256 in receipt.details.values()
    assert report.workload == "the engine is running"
    assert ask(home.engine) == home.answer
    assert lab.run(cs.Status(home.engine)).receipt("status").details["materialization"] == "ready"
    assert ask(lab.restore(home.artifact).engine) == home.answer


def test_a_pack_that_is_there_is_not_written(lab, home, pack):
    receipt = lab.run(cs.Materialize(home.engine)).receipt("materialize")
    assert (receipt.effective, receipt.bytes) == ("ready", 0)
    assert "already" in receipt.reason


def test_another_store_gets_it_too_and_who_does_not_wait_asks_for_the_status(lab, home, pack, tmp_path):
    report = lab.run(cs.Materialize(home.engine, store=tmp_path / "other", wait=False))
    assert report.plan.decision("store").effective == str(tmp_path / "other")

    def ready():
        return lab.run(cs.Status(home.engine)).receipt("status").details["materialization"] == "ready"

    until(ready, "the end of the writing")

    assert next((tmp_path / "other").rglob("*.pack")).read_bytes() == pack.content


def test_a_restore_begins_the_pack_after_its_first_answer_and_does_not_wait(lab, home, pack):
    where = lab.placement()
    report = lab.run(
        cs.Restore(home.artifact, placement=where, store=home.store),
        {"weights.native.materialize": "async"},
        fault_point=After("hydrate", pack.path.unlink),
    )

    order = [receipt.step for receipt in report.receipts]
    assert order.index("answer") < order.index("materialize") < order.index("hand-over")
    begun_s = next(span.start_ns for span in report.timeline.spans if span.name == "materialize") / 1e9
    assert report.answer_s < begun_s
    assert ask(report.engine) == home.answer
    until(pack.path.exists, "the pack")


def test_a_restore_succeeds_when_the_pack_is_there_that_it_requires(lab, home, pack):
    report = lab.run(
        cs.Restore(home.artifact, placement=lab.placement(), store=home.store),
        {"weights.native.materialize": "required"},
        fault_point=After("hydrate", pack.path.unlink),
    )
    assert report.receipt("materialize").bytes == len(pack.content)
    assert pack.path.read_bytes() == pack.content


def spoil(pack):
    """Put other bytes under the name of the pack."""
    spoilt = bytearray(pack.content)
    spoilt[0] ^= 1
    pack.path.write_bytes(spoilt)


def test_a_restore_that_requires_a_pack_and_cannot_have_it_leaves_nothing(lab, home, pack):
    port = unused_port()
    operation = cs.Restore(home.artifact, placement=lab.placement(port=port), store=home.store)

    with pytest.raises(EngineError, match=pack.path.name) as failed:
        lab.run(operation, {"weights.native.materialize": "required"}, fault_point=After("answer", lambda: spoil(pack)))

    assert isinstance(failed.value, StepError)
    assert failed.value.step == "materialize"
    assert "nothing is left running" in failed.value.report.workload
    assert port_is_free(port)
    pack.path.write_bytes(pack.content)


def test_a_restore_that_only_begins_a_pack_serves_when_it_cannot(lab, home, pack):
    payloads = home.store / "model-payloads"

    report = lab.run(
        cs.Restore(home.artifact, placement=lab.placement(), store=home.store),
        {"weights.native.materialize": "async"},
        fault_point=After("answer", lambda: payloads.chmod(0o755)),  # open to others: nothing is written there
    )

    payloads.chmod(0o700)
    assert report.receipt("materialize").effective == "not begun"
    assert "model-payloads" in report.receipt("materialize").reason
    assert ask(report.engine) == home.answer


def test_an_engine_that_was_launched_is_refused_by_name(lab, home):
    with pytest.raises(UnsupportedError, match="was launched and not restored"):
        lab.run(cs.Materialize(home.launched))


def test_an_artifact_with_its_weights_in_the_image_has_no_pack_to_write(lab, artifact):
    for value in ("async", "required"):
        with pytest.raises(UnsupportedError, match="names no pack") as refusal:
            lab.run(cs.Restore(artifact, placement=lab.placement()), {"weights.native.materialize": value})
        assert refusal.value.field == "weights.native.materialize"


def test_an_engine_that_sleeps_has_nothing_to_write(lab, home, pack):
    lab.run(cs.Sleep(home.engine))
    with pytest.raises(EngineError, match="sleeps; wake the engine first"):
        lab.run(cs.Materialize(home.engine))
    lab.run(cs.Wake(home.engine))
    assert ask(home.engine) == home.answer
