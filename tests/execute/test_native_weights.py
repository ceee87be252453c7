"""Weights outside the image: they leave before the dump, come back after the thaw, nothing else passes for them."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from attrs import evolve
from lab import Lab, ask, changed, kill_rank, port_is_free, tagged, until, unused_port

import coldsnap as cs
from coldsnap.artifact import canonical
from coldsnap.artifact.collect import collect
from coldsnap.artifact.manifest import HibernateState, decode, encode
from coldsnap.artifact.store import Store
from coldsnap.errors import (
    AdmissionError,
    ArtifactError,
    ColdSnapError,
    EngineError,
    FormatError,
    IntegrityError,
    PayloadMissingError,
    StepError,
    UnsupportedError,
)
from coldsnap.hydrating import mapped_bytes
from coldsnap.plan import Plan
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.faults import FaultPlan

pytestmark = pytest.mark.criu

SIZE_BYTES = 16 << 20
CASE = Path(__file__).with_name("case.py")
STILL = "weights of worker-0 are still in the process image: [0-9]+ of 100 samples were found: process [0-9]+ at 0x"
PYTHON = {"io.capture_backend": "python", "io.hydration_backend": "python"}


@pytest.fixture(scope="module")
def home(tmp_path_factory, criu, engine_python, facts):
    """A directory with a checkpoint, for every test of this module."""
    directory = tmp_path_factory.mktemp("native")
    lab = Lab(directory, criu, engine_python, facts)
    lab.checkpoint = write_checkpoint(directory / "model.safetensors", size_bytes=SIZE_BYTES)
    yield lab
    lab.close()
    until(lambda: not tagged(lab.tag), "the end of every process of the module")
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def kept(home):
    """An engine that serves on beside the artifact that was made of it."""
    report = home.capture(home.engine(weights=str(home.checkpoint), loopback=True), then="keep")
    return SimpleNamespace(
        report=report, engine=report.engine, answer=ask(report.engine), store=home.directory / "store"
    )


@pytest.fixture(scope="module")
def other(home):
    """Another engine of the same model, with a larger KV cache: it is captured, sleeps and wakes, and serves on."""
    engine = home.launch(home.engine(weights=str(home.checkpoint), kv_bytes=4 << 20))
    return SimpleNamespace(engine=engine, answer=ask(engine))


@pytest.fixture
def packed(kept):
    return cs.Artifact.open(kept.report.artifact)


@pytest.fixture
def damaged(kept, packed, tmp_path):
    """A copy of artifact and store that may be spoilt."""
    shutil.copytree(packed.path, tmp_path / "artifact")
    shutil.copytree(kept.store, tmp_path / "store")
    artifact = cs.Artifact.open(tmp_path / "artifact")
    (pack,) = (tmp_path / "store").rglob("*.pack")
    (own,) = artifact.descriptor.weights.workers
    return SimpleNamespace(
        artifact=artifact,
        pack=pack,
        residual=artifact.path / own.residual.path,
        manifest=artifact.path / own.native_manifest.path,
    )


def flip(path, at=None, *, keep_mtime=False):
    status = path.stat()
    with open(path, "r+b") as file:
        file.seek(status.st_size // 2 if at is None else at)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    if keep_mtime:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def refused(lab, artifact, *, policy=None, plan=None, match=None):
    """Restore what must not be restored; return the error, after checking that nothing is left."""
    where = lab.placement()
    plan = plan or cs.resolve(cs.Policy().evolve(**(policy or {})), cs.Restore(artifact, placement=where), lab.facts)
    with pytest.raises(ColdSnapError, match=match) as failed:
        cs.execute(plan)
    report = failed.value.report
    assert report.answer_s is None
    assert "nothing" in report.workload
    assert port_is_free(where.front.port)
    return failed.value


# -- out and back -----------------------------------------------------------------------------------------------------


def test_artifact_and_store_may_lie_where_nothing_can_be_written(home, kept, packed, tmp_path):
    shutil.copytree(packed.path, tmp_path / "artifact")
    shutil.copytree(kept.store, tmp_path / "store")
    for options in (["--bind", tmp_path, tmp_path], ["-o", "remount,ro,bind", tmp_path]):
        subprocess.run(["mount", *options], check=True)
    try:
        artifact = cs.Artifact.open(tmp_path / "artifact")
        report = home.run(cs.Restore(artifact, placement=home.placement(), store=tmp_path / "store"))
        assert ask(report.engine) == kept.answer
        report.engine.stop(grace_s=0)
        verified = home.run(cs.Verify(artifact, verify="full", store=tmp_path / "store"))
        assert verified.receipt("verify").details["packs"] == 1
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_restored_engine_answers_as_before_from_a_pack_that_is_not_in_its_image(lab, kept, packed):
    weights = packed.descriptor.weights
    assert (weights.kind, len(weights.workers)) == ("packs", 1)
    assert weights.payloads.objects[0].bytes == packed.size_bytes["packs"] >= SIZE_BYTES
    assert weights.recovery.revision == packed.descriptor.engine.model.revision

    report = lab.restore(packed)

    assert ask(report.engine) == kept.answer == ask(kept.engine)
    assert report.receipt("hydrate").details["pack_bytes"] >= SIZE_BYTES
    assert report.receipt("hydrate").details["kv_cache_bytes"] >= 1 << 20
    assert report.receipt("prefetch").details["planned_bytes"] >= SIZE_BYTES
    assert {"criu", "hydrate", "kv", "request"} <= set(report.split)
    assert report.plan.decision("weights.mode").effective == "native"


def test_what_a_restore_needs_of_a_device_counts_what_is_hydrated_later(lab, kept, packed):
    sizes = lab.run(cs.Status(kept.engine)).receipt("status").details
    (pack,) = packed.descriptor.weights.payloads.objects

    (counted,) = mapped_bytes(packed)

    assert pack.bytes + sizes["kv_cache_bytes"] <= counted
    assert counted <= sizes["weights_bytes"] + sizes["kv_cache_bytes"] + (1 << 20)  # pieces begin on pages in files


def test_a_clone_beside_the_original_has_memory_of_its_own(lab, kept, packed):
    clone = lab.restore(packed).engine
    lab.run(cs.Sleep(clone))
    assert ask(kept.engine, "another prompt")
    lab.run(cs.Wake(clone))
    assert ask(clone) == kept.answer


def test_nothing_of_the_checkpoint_is_in_the_capsule(home, packed):
    data = home.checkpoint.read_bytes()
    samples = [data[at : at + 64] for at in range(4096, len(data) - 64, len(data) // 50)]
    (unit,) = packed.descriptor.capsule.units
    for file in unit.files:
        content = (packed.path / file.path).read_bytes()
        assert not any(sample in content for sample in samples), file.path


def test_an_image_with_the_weights_in_it_is_larger_by_the_weights(lab, home, packed):
    spec = lab.engine(weights=str(home.checkpoint), loopback=True)

    report = lab.capture(spec, policy={"weights.mode": "image"})

    inside = cs.Artifact.open(report.artifact)
    assert inside.descriptor.weights.kind == "image"
    assert inside.size_bytes["images"] - packed.size_bytes["images"] > 0.9 * SIZE_BYTES
    assert lab.restore(inside).engine.status().state == "running"


def test_a_capture_that_keeps_weights_in_its_image_is_refused_and_its_engine_serves_on(lab, home):
    engine = lab.launch(lab.engine(weights=str(home.checkpoint), args=("--hoard",)))
    expected = ask(engine)

    with pytest.raises(
        IntegrityError, match="weights of worker-0 are still in the process image: .* samples"
    ) as failed:
        lab.capture(engine, then="keep")

    assert "running as before" in failed.value.report.workload
    assert ask(engine) == expected
    assert not list(lab.directory.glob("artifact*"))


def test_another_kv_cache_and_another_process_share_the_pack(lab, kept, other, packed):
    report = lab.capture(other.engine, then="keep", store=kept.store)

    again = cs.Artifact.open(report.artifact)
    assert report.receipt("release").details["new_pack_bytes"] == 0
    assert again.packs == packed.packs
    assert ask(lab.run(cs.Restore(again, placement=lab.placement(), store=kept.store)).engine) == kept.answer


def test_a_restored_engine_is_captured_again_without_a_new_byte_in_the_store(lab, kept, packed):
    restored = lab.restore(packed).engine
    report = lab.capture(restored, store=kept.store)
    assert report.receipt("release").details["new_pack_bytes"] == 0
    again = cs.Artifact.open(report.artifact)
    assert ask(lab.run(cs.Restore(again, placement=lab.placement(), store=kept.store)).engine) == kept.answer


def test_a_kv_cache_that_nobody_discards_stays_in_the_image(lab, other):
    leaves = {"process.discard": [], "weights.recovery.enabled": False, "weights.mode": "native"}
    artifact = cs.Artifact.open(lab.capture(other.engine, then="keep", policy=leaves | PYTHON).artifact)
    assert artifact.descriptor.weights.recovery is None
    assert artifact.descriptor.weights.workers[0].recovery_manifest is None

    restored = lab.run(cs.Restore(artifact, placement=lab.placement()), {"io.hydration_backend": "python"})

    assert restored.receipt("hydrate").details.get("kv_cache_bytes", 0) == 0
    assert restored.receipt("hydrate").effective == "python"
    assert ask(restored.engine) == ask(other.engine) == other.answer


# -- never a wrong answer ---------------------------------------------------------------------------------------------


def without(plan, step):
    """Return a plan that leaves a step out."""
    after = plan[step].after
    steps = [evolve(s, after=tuple({*s.after} - {step}) + after * (step in s.after)) for s in plan if s.id != step]
    return evolve(plan, steps=tuple(steps), choices=())


def test_an_engine_whose_memory_did_not_come_back_is_never_asked(lab, packed):
    plan = without(lab.plan_restore(packed), "hydrate")
    assert isinstance(plan, Plan)
    error = refused(lab, packed, plan=plan, match="memory is not back: worker.[0-9]+ is sleeping")
    assert isinstance(error, EngineError)


def test_a_flipped_byte_in_the_pack_is_refused_by_name(lab, damaged):
    flip(damaged.pack)
    refused(lab, damaged.artifact, match=damaged.pack.name)


@pytest.mark.parametrize("backend", ["auto", "python"])
def test_a_flipped_byte_in_the_pack_that_no_stat_tells_is_refused_on_its_way(lab, damaged, backend):
    lab.run(cs.Verify(damaged.artifact, store=damaged.pack.parents[2]))
    flip(damaged.pack, keep_mtime=True)
    error = refused(lab, damaged.artifact, policy={"io.hydration_backend": backend}, match=damaged.pack.name)
    assert error.step == "hydrate"


def test_a_flipped_byte_in_the_residual_is_refused_by_name(lab, damaged):
    flip(damaged.residual, at=16)
    refused(lab, damaged.artifact, match="weights.blob")


def test_a_flipped_byte_in_a_manifest_is_refused_before_anything_starts(lab, damaged):
    flip(damaged.manifest)
    error = refused(lab, damaged.artifact, match="native-manifest.json")
    assert error.report.workload == "nothing was started"


@pytest.mark.parametrize("field", ["worker", "capture_id"])
def test_a_hibernate_state_of_something_else_is_refused_before_anything_starts(lab, damaged, field):
    weights = damaged.artifact.descriptor.weights
    (own,) = weights.workers
    path = damaged.artifact.path / own.hibernate_state.path
    state = decode(HibernateState, path.read_bytes(), path=str(path))
    path.write_bytes(data := encode(evolve(state, **{field: "another"})))
    record = evolve(own.hibernate_state, sha256=canonical.sha256_of(data), bytes=len(data))
    other = changed(damaged.artifact, weights=evolve(weights, workers=(evolve(own, hibernate_state=record),)))

    error = refused(lab, other, match="another")

    assert isinstance(error, FormatError)
    assert error.rule == "manifest.7"
    assert error.report.workload == "nothing was started"


def test_a_pack_that_is_cut_short_is_refused_before_anything_starts(lab, damaged):
    os.truncate(damaged.pack, damaged.pack.stat().st_size - 4096)
    error = refused(lab, damaged.artifact, match="the pack is not whole")
    assert isinstance(error, IntegrityError)
    assert error.report.workload == "nothing was started"


def test_a_missing_pack_is_named_with_where_it_was_looked_for(lab, damaged):
    damaged.pack.unlink()
    native = {"weights.mode": "native"}
    error = refused(lab, damaged.artifact, policy=native, match=str(damaged.pack))
    assert isinstance(error, PayloadMissingError)
    assert error.digest in damaged.artifact.packs

    known = cs.probe(criu=lab.criu, store=damaged.pack.parents[2])
    with pytest.raises(PayloadMissingError, match="when it was probed"):
        cs.resolve(cs.Policy().evolve(**native), cs.Restore(damaged.artifact, placement=lab.placement()), known)


def test_another_pack_of_the_same_size_is_refused(lab, damaged):
    flip(damaged.pack)
    digest = hashlib.sha256(damaged.pack.read_bytes()).hexdigest()
    path = damaged.pack.rename(damaged.pack.with_name(f"{digest}.pack"))
    (payload,) = damaged.artifact.descriptor.weights.payloads.objects
    named = evolve(payload, sha256=f"sha256:{digest}", path=f"model-payloads/sha256/{digest}.pack")
    payloads = evolve(damaged.artifact.descriptor.weights.payloads, objects=(named,))
    mixed = changed(damaged.artifact, weights=evolve(damaged.artifact.descriptor.weights, payloads=payloads))

    refused(lab, mixed, match=path.name)


def test_preverified_bytes_need_the_evidence_of_an_earlier_verification(lab, kept, damaged):
    policy = {"io.verify_mode": "preverified"}
    for record in damaged.pack.parent.glob("*.json"):
        record.unlink()
    refused(lab, damaged.artifact, policy=policy, match="verify the artifact first")

    lab.run(cs.Verify(damaged.artifact, store=damaged.pack.parents[2]))

    restored = lab.run(cs.Restore(damaged.artifact, placement=lab.placement()), policy)
    assert ask(restored.engine) == kept.answer


def test_every_byte_is_read_when_the_policy_says_so(lab, damaged):
    lab.run(cs.Verify(damaged.artifact, store=damaged.pack.parents[2]))
    report = lab.run(cs.Restore(damaged.artifact, placement=lab.placement()), {"weights.verify": "full"})
    assert report.receipt("verify-packs").bytes >= SIZE_BYTES


# -- policy -----------------------------------------------------------------------------------------------------------


def test_the_weights_of_an_artifact_are_where_they_are(lab, packed):
    with pytest.raises(UnsupportedError, match="are in packs") as refusal:
        lab.run(cs.Restore(packed, placement=lab.placement()), {"weights.mode": "image"})
    assert refusal.value.field == "weights.mode"
    with pytest.raises(UnsupportedError, match="where GDS cannot bring them"):
        policy = {"io.hydration_backend": "gds", "io.verify_mode": "preverified"}
        lab.run(cs.Restore(packed, placement=lab.placement()), policy)


def test_an_engine_without_a_memory_provider_is_refused_where_native_is_asked_for(lab):
    with pytest.raises(UnsupportedError, match="weights.mode"):
        lab.capture(lab.engine(), policy={"weights.mode": "native"})


def test_a_store_where_the_engine_cannot_see_it_is_refused(lab, home):
    with pytest.raises(AdmissionError, match="/dev/shm/store lies in /dev/shm"):
        lab.capture(lab.engine(weights=str(home.checkpoint)), store="/dev/shm/store")


@pytest.fixture
def mounted_later(kept, other, tmp_path):
    """A filesystem that came after the engines."""
    place = tmp_path / "later"
    place.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "none", str(place)], check=True)
    yield place
    subprocess.run(["umount", str(place)], check=True)
    assert not list(place.iterdir()), "something was written underneath the mount"


@pytest.mark.parametrize("what", ["store", "output"])
def test_a_filesystem_that_was_mounted_after_the_engine_is_refused_and_nothing_is_written_below_it(
    lab, kept, mounted_later, what
):
    places = {"store": kept.store, "output": lab.output()} | {what: mounted_later / what}

    with pytest.raises(AdmissionError, match=f"{mounted_later}/{what}.* mounted or unmounted after") as failed:
        lab.capture(kept.engine, then="keep", **places)

    assert "running as before" in failed.value.report.workload
    assert ask(kept.engine) == kept.answer


def test_an_engine_does_not_sleep_into_a_store_that_it_would_find_elsewhere(lab, other, mounted_later):
    with pytest.raises(AdmissionError, match="mounted or unmounted after the engine"):
        lab.run(cs.Sleep(other.engine, store=mounted_later / "store"))
    assert ask(other.engine) == other.answer


# -- at rest ----------------------------------------------------------------------------------------------------------


def test_an_artifact_with_a_pack_is_verified_and_deleted_with_it(lab, damaged):
    store = damaged.pack.parents[2]
    found = lab.run(cs.Verify(damaged.artifact, verify="full", store=store))
    assert found.receipt("verify").details["packs"] == 1
    flip(damaged.pack)
    with pytest.raises(IntegrityError, match=damaged.pack.name):
        lab.run(cs.Verify(damaged.artifact, verify="full", store=store))

    lab.run(cs.Delete(damaged.artifact, store=store, roots=[damaged.artifact.path.parent]))

    assert not damaged.artifact.path.exists()
    assert not damaged.pack.exists()


# -- asleep -----------------------------------------------------------------------------------------------------------


def test_an_engine_sleeps_and_wakes_as_often_as_it_is_asked_to(lab, other):
    for _ in range(2):
        assert lab.run(cs.Sleep(other.engine)).workload == "the engine's memory is sleeping"
    asleep = lab.run(cs.Status(other.engine)).receipt("status").details
    assert (asleep["memory"], asleep["weights_mapped_bytes"], asleep["requests_open"]) == ("sleeping", 0, 0)
    with pytest.raises(TimeoutError):
        ask(other.engine, timeout_s=0.5)

    half = lab.run(cs.Wake(other.engine, tags=["weights"])).receipt("wake").details
    assert (half["memory"], half["kv_cache_mapped_bytes"]) == ("sleeping", 0)
    for _ in range(2):
        assert lab.run(cs.Wake(other.engine)).workload == "the engine's memory is awake"
    assert ask(other.engine) == other.answer
    assert lab.run(cs.Status(other.engine)).receipt("status").effective == "awake"


def test_a_sleeping_engine_is_not_captured_and_says_why(lab, other):
    lab.run(cs.Sleep(other.engine))

    with pytest.raises(AdmissionError, match="the memory of worker.[0-9]+ is sleeping; wake the engine first"):
        lab.capture(other.engine)

    lab.run(cs.Wake(other.engine))
    assert ask(other.engine) == other.answer


def test_a_sleep_that_fails_leaves_the_engine_serving(lab, other):
    (lab.directory / "store").write_text("in the way")

    with pytest.raises(ColdSnapError) as failed:
        lab.run(cs.Sleep(other.engine, store=lab.directory / "store"))

    assert failed.value.report.workload == "the engine is running as before (nothing had to be undone)"
    assert ask(other.engine) == other.answer


def test_a_store_that_cannot_be_made_is_refused_before_an_engine_is_brought_to_rest_or_started(lab, other):
    (lab.directory / "store").write_text("in the way")
    for what in (other.engine, lab.engine(weights="nothing is looked at")):
        with pytest.raises(ArtifactError, match="of the store .* cannot be created") as failed:
            lab.capture(what, store=lab.directory / "store", then="keep")

        done = [receipt.step for receipt in failed.value.report.receipts]
        assert not {"attach", "launch", "quiesce"} & {*done}
    assert ask(other.engine) == other.answer


def test_an_engine_whose_memory_cannot_come_back_answers_nobody_until_it_is_awake(lab, other):
    lab.run(cs.Sleep(other.engine))
    (pack,) = other.engine.run_dir.rglob("*.pack")
    flip(pack, keep_mtime=True)
    with pytest.raises(EngineError, match="wrong bytes") as failed:
        lab.run(cs.Wake(other.engine))
    assert "its memory is failed, and its door stays closed; put right what is missing" in failed.value.report.workload
    assert "as before" not in failed.value.report.workload

    with pytest.raises(EngineError, match="hydrate it first") as failed:
        lab.run(cs.Sleep(other.engine))

    assert "memory is not back, and its door stays closed; put right what is" in failed.value.report.workload
    with pytest.raises(TimeoutError):
        ask(other.engine, timeout_s=0.5)
    flip(pack, keep_mtime=True)
    lab.run(cs.Wake(other.engine))
    assert ask(other.engine) == other.answer


def test_a_pack_that_is_missing_when_an_engine_wakes_is_named(lab, other):
    lab.run(cs.Sleep(other.engine))
    (pack,) = other.engine.run_dir.rglob("*.pack")
    pack.rename(lab.directory / "elsewhere")

    with pytest.raises(PayloadMissingError, match=f"the pack {pack} of worker-0 is not there; bring it back") as failed:
        lab.run(cs.Wake(other.engine))

    assert failed.value.digest == f"sha256:{pack.stem}"
    (lab.directory / "elsewhere").rename(pack)
    lab.run(cs.Wake(other.engine))
    assert ask(other.engine) == other.answer


@pytest.fixture
def lost(lab, home):
    """An engine whose capture failed, and whose weights could not be brought back: its pack is spoilt."""
    engine = lab.launch(lab.engine(weights=str(home.checkpoint)))
    answer, output, store = ask(engine), lab.output(), lab.directory / "store"

    def spoil(step, when, *, keeper_pid):
        if (step, when) == ("dump", "after"):
            flip(next(store.rglob("*.pack")), keep_mtime=True)
            raise OSError("the capture failed")

    with pytest.raises(StepError, match="the capture failed") as failed:
        lab.capture(engine, output=output, store=store, then="keep", fault_point=spoil)
    (pack,) = store.rglob("*.pack")
    return SimpleNamespace(engine=engine, answer=answer, output=output, store=store, pack=pack, error=failed.value)


def test_an_engine_whose_failed_capture_cannot_be_undone_is_woken_later(lab, other, lost):
    assert "memory is not back, and its door stays closed; put right what is" in lost.error.report.workload
    assert f"kept {lost.output}, which has what the memory held" in lost.error.report.workload
    with pytest.raises(
        ArtifactError, match=f"the output .* has what the memory of the engine in {lost.engine.run_dir}"
    ):
        lab.capture(other.engine, output=lost.output, store=lost.store, then="keep")
    with pytest.raises(ArtifactError, match="not an artifact|not committed|interrupted"):
        cs.Artifact.open(lost.output)
    with pytest.raises(ArtifactError, match=f"the engine in {lost.engine.run_dir}, whose memory is not back, needs"):
        collect(Store(lost.store), [lab.directory], grace_s=0)

    flip(lost.pack, keep_mtime=True)
    lab.run(cs.Wake(lost.engine))

    assert ask(lost.engine) == lost.answer
    assert not lost.output.exists()
    lab.capture(lost.engine, output=lost.output, store=lost.store, then="keep")
    assert ask(lost.engine) == lost.answer


def test_what_a_failed_capture_left_to_an_engine_ends_with_it(lost):
    assert lost.output.exists()

    lost.engine.stop(grace_s=0)

    assert not lost.output.exists()
    assert not lost.engine.run_dir.exists()


def test_what_an_engine_wrote_when_it_fell_asleep_ends_with_it(lab, home):
    engine = lab.launch(lab.engine(weights=str(home.checkpoint)))
    lab.run(cs.Sleep(engine))
    assert list(engine.run_dir.rglob("*.pack"))

    engine.stop(grace_s=0)

    assert not engine.run_dir.exists()


def test_asking_how_an_engine_is_whose_worker_died_stops_nothing(lab, home):
    engine = lab.launch(lab.engine(weights=str(home.checkpoint)))
    kill_rank(engine.run_dir, "worker")
    until(lambda: engine.keeper.status().loss, "the end of the worker")

    with pytest.raises(EngineError, match="not done by every rank: worker") as failed:
        lab.run(cs.Status(engine))

    assert failed.value.report.workload == "the engine is running, its memory unknown"
    assert engine.keeper.status().state == "running"


def test_an_engine_without_a_memory_provider_cannot_sleep(lab):
    engine = lab.launch()
    with pytest.raises(UnsupportedError, match="has no memory that can leave"):
        lab.run(cs.Sleep(engine))
    assert lab.run(cs.Status(engine)).receipt("status").effective == "awake"


# -- faults -----------------------------------------------------------------------------------------------------------

AFTER_RELEASE = ["release", "dump", "hydrate", "resume", "shrink", "seal", "commit"]


@pytest.mark.parametrize("step", AFTER_RELEASE)
def test_a_capture_that_fails_brings_the_weights_back(lab, kept, step):
    before = "commit" if step == "commit" else None
    fault = FaultPlan.parse(f"{step}:{'before' if before else 'after'}:raise")

    with pytest.raises(StepError) as failed:
        lab.capture(kept.engine, then="keep", store=kept.store, fault_point=fault)

    assert "running as before" in failed.value.report.workload
    assert ask(kept.engine) == kept.answer
    assert lab.run(cs.Status(kept.engine)).receipt("status").effective == "awake"
    assert not list(lab.directory.glob("artifact*"))


@pytest.mark.slow
@pytest.mark.parametrize("step", ["release:before", "release:after", "dump:after", "hydrate:after"])
def test_a_caller_that_is_killed_leaves_weights_and_engine_as_they_were(lab, kept, step):
    lab.facts.save(lab.directory / "facts.json")
    job = {
        "operation": "handle",
        "faults": [f"{step}:kill-caller"],
        "run_dir": str(kept.engine.run_dir),
        "output": str(lab.directory / "artifact"),
        "facts": str(lab.directory / "facts.json"),
        "then": "keep",
    }
    done = subprocess.run([sys.executable, str(CASE), json.dumps(job)], capture_output=True, text=True, timeout=60)
    assert done.returncode == -9, done.stderr

    until(lambda: kept.engine.status().operation is None, "the end of the operation")

    assert kept.engine.status().interrupted.operation == "capture"
    assert ask(kept.engine) == kept.answer
    assert not (lab.directory / "artifact").exists()


def test_a_restore_that_fails_while_it_hydrates_leaves_nothing(lab, packed):
    port = unused_port()
    with pytest.raises(StepError):
        lab.restore(packed, port=port, fault_point=FaultPlan.parse("hydrate:after:raise"))
    assert port_is_free(port)
    until(lambda: not tagged(lab.tag), "the end of every process")
