"""Weights out of the checkpoint: where no pack is, out of the pinned files and no others, and every byte the same."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from attrs import evolve
from lab import Lab, ask, kill_rank, port_is_free, tagged, until, unused_port

import coldsnap as cs
from coldsnap.engines.control import Ranks
from coldsnap.errors import (
    ArtifactError,
    ColdSnapError,
    IntegrityError,
    PayloadMissingError,
    PolicyError,
    StepError,
    UnsupportedError,
)
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.transfer.safetensors import read_header

sys.path.insert(0, str(Path(__file__).parents[1] / "artifact"))

from hub_server import HubServer  # noqa: E402

pytestmark = pytest.mark.criu

SIZE_BYTES = 8 << 20
CASE = Path(__file__).with_name("case.py")
RECOVERY = {"weights.mode": "recovery"}


def digests(engine):
    """Every parameter and buffer of every rank; the fold of the reference engine has its bytes in each answer, too."""
    return Ranks(engine.keeper.rank_dir).digests(timeout_s=30)


@pytest.fixture(scope="module")
def home(tmp_path_factory, criu, engine_python, facts):
    """A directory with a checkpoint, for every test of this module."""
    directory = tmp_path_factory.mktemp("recovery")
    lab = Lab(directory, criu, engine_python, facts)
    lab.checkpoint = write_checkpoint(directory / "model.safetensors", size_bytes=SIZE_BYTES)
    yield lab
    lab.close()
    until(lambda: not tagged(lab.tag), "the end of every process of the module")
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def kept(home):
    """What was captured, with everything that a restore is compared with; its pack is away."""
    leaves = {"weights.recovery.verify_model_bytes": 64, "weights.mode": "recovery"}
    report = home.capture(home.engine(weights=str(home.checkpoint), loopback=True), then="keep", policy=leaves)
    made = SimpleNamespace(report=report, answer=ask(report.engine), digests=digests(report.engine), tag=home.tag)
    report.engine.stop()
    (pack,) = (home.directory / "store").rglob("*.pack")
    made.pack, made.hidden = pack, pack.with_suffix(".away")
    pack.rename(made.hidden)
    made.artifact = cs.Artifact.open(report.artifact)
    return made


@pytest.fixture
def whole(home):
    """The checkpoint, put back as it was after a test that spoils it."""
    data = home.checkpoint.read_bytes()
    yield home.checkpoint
    home.checkpoint.write_bytes(data)


def restored(lab, kept, policy=None):
    report = lab.run(cs.Restore(kept.artifact, placement=lab.placement()), policy)
    assert ask(report.engine) == kept.answer
    assert digests(report.engine) == kept.digests
    return report


def refused(lab, kept, match, policy=None):
    """Restore what must not be restored; return the error, after checking that nothing is left."""
    where = lab.placement()
    plan = cs.resolve(cs.Policy().evolve(**(policy or {})), cs.Restore(kept.artifact, placement=where), lab.facts)
    with pytest.raises(ColdSnapError, match=match) as failed:
        cs.execute(plan)
    assert failed.value.report.answer_s is None
    assert port_is_free(where.front.port)
    until(lambda: not tagged(kept.tag), "the end of every process")
    return failed.value


def test_an_absent_pack_lets_auto_recover_and_the_receipt_says_so(lab, kept):
    report = restored(lab, kept)

    admitted = report.receipt("admit-packs")
    assert (admitted.requested, admitted.effective) == ("auto", "recovery")
    assert "is not in the store" in admitted.reason
    assert "1 files of the checkpoint are as captured" in admitted.reason
    details = report.receipt("hydrate").details
    assert details["checkpoint_bytes"] == details["checkpoint_local_read_bytes"] >= SIZE_BYTES - 4096
    assert details["pack_bytes"] == 0
    assert (details["checkpoint_plain_copies"], details["checkpoint_staged_copies"]) == (4, 0)
    assert report.receipt("prefetch").details["planned_bytes"] >= SIZE_BYTES - 4096
    assert report.receipt("verify-packs").effective == "no pack is used"


def test_what_is_recovered_is_what_the_pack_brings(lab, kept):
    kept.hidden.rename(kept.pack)
    try:
        assert restored(lab, kept).receipt("admit-packs").effective.startswith("1 packs in")
    finally:
        kept.pack.rename(kept.hidden)


@pytest.mark.parametrize("backend", ["direct", "torch"])
def test_a_loader_that_was_asked_for_compares_what_the_policy_says(lab, kept, backend):
    leaves = {
        "loader_backend": backend,
        "staging_bytes": 1 << 20,
        "verify_bytes": 64,
        "verify_model_bytes": 64,
    }
    report = restored(lab, kept, RECOVERY | {f"weights.recovery.{name}": value for name, value in leaves.items()})

    receipt = report.receipt("hydrate")
    assert receipt.requested == backend
    assert receipt.effective.startswith(backend)
    assert receipt.details["checkpoint_verified_sample_bytes"] == 4 * 2 * 64


def test_samples_that_nobody_took_are_not_compared(lab, kept):
    refused(lab, kept, "verify_model_bytes is 32, and 64 bytes", {"weights.recovery.verify_model_bytes": 32})


def test_native_takes_nothing_in_the_place_of_its_pack(lab, kept):
    error = refused(lab, kept, "is not in the store", {"weights.mode": "native"})
    assert isinstance(error, PayloadMissingError)


def test_a_pack_that_is_there_and_is_another_is_an_error_and_no_reason_to_recover(lab, kept):
    kept.pack.write_bytes(kept.hidden.read_bytes()[:-4096])
    kept.pack.chmod(0o600)
    try:
        error = refused(lab, kept, "the pack is not whole")
        assert isinstance(error, IntegrityError)
    finally:
        kept.pack.unlink()


def test_a_published_pack_is_to_be_fetched_before_anybody_recovers(lab, kept):
    leaves = {"weights.native.repository": "example/packs", "weights.native.revision": "0" * 40}
    refused(lab, kept, "fetch required", leaves)
    restored(lab, kept, leaves | {"weights.mode": "cache-only-auto"})


@pytest.fixture
def warm(lab, kept):
    """A warm engine of an artifact whose pack is away."""
    return lab.run(cs.Restore(kept.artifact, placement=lab.placement(), state="warm")).engine


@pytest.mark.parametrize("policy", [{}, RECOVERY | {"weights.recovery.verify_model_bytes": 64}])
def test_a_warm_engine_whose_pack_is_absent_recovers(lab, kept, warm, policy):
    with pytest.raises(PayloadMissingError):
        lab.run(cs.Restore(warm), {"weights.mode": "native"})
    assert lab.run(cs.Status(warm)).receipt("status").effective == "warm"

    report = lab.run(cs.Restore(warm), policy)

    assert report.receipt("admit-packs").effective == "recovery"
    assert report.receipt("hydrate").details["checkpoint_bytes"] >= SIZE_BYTES - 4096
    assert (ask(report.engine), digests(report.engine)) == (kept.answer, kept.digests)


def test_a_warm_engine_is_refused_what_its_artifact_does_not_allow_and_stays_warm(lab, kept, warm, whole):
    published = {"weights.native.repository": "example/packs", "weights.native.revision": "0" * 40}
    with pytest.raises(PayloadMissingError, match="fetch required"):
        lab.run(cs.Restore(warm), published)
    write_checkpoint(whole, seed=1, size_bytes=SIZE_BYTES + 4096)
    with pytest.raises(IntegrityError, match="another model or revision"):
        lab.run(cs.Restore(warm), published | {"weights.mode": "cache-only-auto"})
    assert lab.run(cs.Status(warm)).receipt("status").effective == "warm"
    lab.run(cs.Stop(warm))


# -- packs without an engine ------------------------------------------------------------------------------------------


def test_a_pack_is_made_of_the_checkpoint_without_an_engine(lab, kept, tmp_path):
    before = tagged(kept.tag)
    report = lab.run(cs.Materialize(kept.artifact, store=tmp_path / "store"))
    again = lab.run(cs.Materialize(kept.artifact, store=tmp_path / "store"))

    assert (report.engine, report.workload) == (None, "nothing was started")
    assert tagged(kept.tag) == before
    receipt = report.receipt("materialize")
    assert (receipt.effective, receipt.bytes) == ("ready", kept.hidden.stat().st_size)
    (pack,) = (tmp_path / "store").rglob("*.pack")
    assert (pack.name, pack.read_bytes()) == (kept.pack.name, kept.hidden.read_bytes())
    assert again.receipt("materialize").bytes == 0
    native = lab.run(
        cs.Restore(kept.artifact, placement=lab.placement(), store=tmp_path / "store"), {"weights.mode": "native"}
    )
    assert (ask(native.engine), digests(native.engine)) == (kept.answer, kept.digests)


@pytest.mark.parametrize("change", ["flipped", "missing", "revision"])
def test_another_checkpoint_makes_no_pack(lab, kept, whole, tmp_path, change):
    if change == "missing":
        whole.unlink()
    elif change == "revision":
        write_checkpoint(whole, seed=1, size_bytes=SIZE_BYTES + 4096)
    else:
        stored = next(one for one in read_header(whole) if one.name == "embedding")
        data = bytearray(whole.read_bytes())
        data[stored.file_offset + 1000] ^= 1
        whole.write_bytes(data)
    match = {"flipped": "the tensor embedding is not", "missing": "is missing", "revision": "another model or revision"}

    with pytest.raises(IntegrityError, match=match[change]) as failed:
        lab.run(cs.Materialize(kept.artifact, store=tmp_path / "store"))

    assert failed.value.report.workload == "nothing was started"
    assert not list((tmp_path / "store").rglob("*.pack"))
    assert not [one for one in (tmp_path / "store").rglob("*") if one.is_file() and one.stat().st_size]


def test_an_artifact_without_copies_or_without_a_pack_is_refused_by_name(lab, kept):
    weights = kept.artifact.descriptor.weights
    unlisted = evolve(kept.artifact.descriptor, weights=evolve(weights, recovery=None))
    unnamed = evolve(kept.artifact.descriptor, weights=evolve(weights, payloads=None))
    with pytest.raises(UnsupportedError, match="does not say how its checkpoint was loaded"):
        lab.run(cs.Materialize(evolve(kept.artifact, descriptor=unlisted)))
    with pytest.raises(UnsupportedError, match="names no pack that could be written"):
        lab.run(cs.Materialize(evolve(kept.artifact, descriptor=unnamed)))
    with pytest.raises(PolicyError, match="expected True with an artifact"):
        cs.Materialize(kept.artifact, wait=False)
    with pytest.raises(PolicyError, match="handle of a running engine, or an opened artifact"):
        cs.Materialize("artifacts/one")


# -- packs from a hub -------------------------------------------------------------------------------------------------


@pytest.fixture
def published(kept, monkeypatch):
    """The pack in a repository of a hub, and what names it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    with HubServer() as server:
        kept.hidden.rename(kept.pack)
        try:
            operation = cs.Publish(
                kept.artifact,
                store=kept.pack.parents[2],
                repository="example/packs",
                endpoint=server.endpoint,
                create=True,
            )
            told = cs.execute(cs.resolve(cs.Policy(), operation, cs.Facts(hosts={}))).receipt("packs")
        finally:
            kept.pack.rename(kept.hidden)
        leaves = {"weights.native.repository": "example/packs", "weights.native.revision": told.details["revision"]}
        yield SimpleNamespace(leaves=leaves, endpoint=server.endpoint)


@pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload:DeprecationWarning")
def test_a_preparation_fetches_what_is_published_and_the_restore_is_native(lab, kept, published, tmp_path):
    store = tmp_path / "store"
    prepare = cs.Prepare(kept.artifact, placement=lab.placement(), store=store, endpoint=published.endpoint)

    report = lab.run(prepare, published.leaves)
    again = lab.run(prepare, published.leaves)

    receipt = report.receipt("fetch-packs")
    assert (receipt.effective, receipt.bytes) == ("1 packs fetched, 0 were there", kept.hidden.stat().st_size)
    assert again.receipt("fetch-packs").effective == "0 packs fetched, 1 were there"
    assert report.receipt("admit-packs").effective == f"1 packs in {store}"
    (pack,) = store.rglob("*.pack")
    assert pack.read_bytes() == kept.hidden.read_bytes()
    native = lab.run(cs.Restore(kept.artifact, placement=lab.placement(), store=store), published.leaves)
    assert native.receipt("admit-packs").effective == f"1 packs in {store}"
    assert ask(native.engine) == kept.answer


def test_a_preparation_says_what_the_hub_does_not_have_and_cache_only_never_asks(lab, kept, tmp_path):
    leaves = {"weights.native.repository": "example/packs", "weights.native.revision": "0" * 40}
    never = leaves | {"weights.mode": "cache-only-auto"}
    with HubServer() as server:
        prepare = cs.Prepare(
            kept.artifact, placement=lab.placement(), store=tmp_path / "store", endpoint=server.endpoint
        )
        with pytest.raises(ArtifactError, match="example/packs@0000"):
            lab.run(prepare, leaves)
        with pytest.raises(UnsupportedError, match="nothing would be fetched"):
            lab.run(prepare, never)
        report = lab.run(evolve(prepare, endpoint=None), never)
    assert report.receipt("admit-packs").effective == "recovery"
    assert "fetch-packs" not in [receipt.step for receipt in report.receipts]


def test_a_flipped_byte_of_the_checkpoint_is_refused_before_any_token(lab, kept, whole):
    stored = next(one for one in read_header(whole) if one.name == "recurrent")
    data = bytearray(whole.read_bytes())
    data[stored.file_offset + 1000] ^= 1
    whole.write_bytes(data)

    error = refused(lab, kept, "the tensor recurrent is not the one that was loaded at capture")

    assert "answer" not in [receipt.step for receipt in error.report.receipts]


@pytest.mark.parametrize("change", ["missing", "revision"])
def test_a_missing_file_and_another_revision_are_refused_before_anything_starts(lab, kept, whole, change):
    if change == "missing":
        whole.unlink()
    else:
        write_checkpoint(whole, seed=1, size_bytes=SIZE_BYTES + 4096)

    match = "a file of the checkpoint is missing" if change == "missing" else "another model or revision"
    error = refused(lab, kept, match)

    assert isinstance(error, IntegrityError)
    assert "keeper" not in [receipt.step for receipt in error.report.receipts]


def test_another_revision_of_the_same_shapes_is_found_on_its_way(lab, kept, whole):
    write_checkpoint(whole, seed=1, size_bytes=SIZE_BYTES)
    refused(lab, kept, "is not the one that was loaded at capture")


def test_more_derived_bytes_than_allowed_fail_a_capture_for_recovery_and_leave_the_engine_serving(lab, home):
    engine = lab.launch(home.engine(weights=str(home.checkpoint)))
    leaves = {"weights.recovery.derived_buffer_max_bytes": 0}
    with pytest.raises(StepError, match=r"256 bytes of parameters and buffers .* the largest: scales \(256\)"):
        lab.capture(engine, then="keep", policy=RECOVERY | leaves)
    assert ask(engine)

    report = lab.capture(engine, then="stop", policy=leaves)

    assert "more than the 0" in report.receipt("release").details["recovery"]
    assert cs.Artifact.open(report.artifact).descriptor.weights.recovery is None


def test_a_worker_that_is_killed_while_it_recovers_leaves_nothing(lab, kept):
    port = unused_port()
    where, killed = lab.placement(port=port), []

    def kill(event):
        if event.step == "hydrate" and event.kind == "start":
            killed.append(kill_rank(where.run_dir, "worker"))

    plan = cs.resolve(cs.Policy(), cs.Restore(kept.artifact, placement=where), lab.facts)
    with pytest.raises(ColdSnapError):
        cs.execute(plan, on_event=kill)
    assert killed
    assert port_is_free(port)
    until(lambda: not tagged(kept.tag), "the end of every process")


@pytest.mark.slow
def test_a_caller_that_is_killed_while_weights_are_recovered_leaves_nothing(lab, kept):
    lab.facts.save(lab.directory / "facts.json")
    port = unused_port()
    job = {
        "operation": "restore",
        "faults": ["hydrate:before:kill-caller"],
        "artifact": str(kept.artifact.path),
        "port": port,
        "run_dir": str(lab.directory / "run"),
        "facts": str(lab.directory / "facts.json"),
    }
    done = subprocess.run([sys.executable, str(CASE), json.dumps(job)], capture_output=True, text=True, timeout=60)
    assert done.returncode == -9, done.stderr
    until(lambda: not tagged(kept.tag), "the end of every process")
    until(lambda: port_is_free(port), "the end of what held the port")
