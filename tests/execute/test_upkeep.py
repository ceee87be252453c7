"""Artifacts at rest are verified by name and rule, deleted whole or not at all, and published once."""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

import coldsnap as cs
from coldsnap.artifact import ArtifactWriter
from coldsnap.artifact.oci import pull
from coldsnap.artifact.store import Store
from coldsnap.errors import AdmissionError, ArtifactError, FormatError, IntegrityError, PayloadMissingError, PolicyError

sys.path.insert(0, str(Path(__file__).parents[1] / "artifact"))  # real artifacts, small

from hub_server import HubServer
from made import write_artifact
from test_oci import _registry  # noqa: F401 - a fixture
from test_store import aged, only_packs, write_native

IMAGE = "capsule/rank0/images/pages-1.img"


def plan(operation, **leaves):
    return cs.resolve(cs.Policy().evolve(**leaves), operation, cs.Facts(hosts={}))


def run(operation, **leaves):
    return cs.execute(plan(operation, **leaves))


def flip(path, *, new_mtime):
    """Change one byte; behind an unchanged stat, or not."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    if not new_mtime:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture
def artifact(tmp_path):
    return write_artifact(tmp_path / "artifacts" / "one")


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def native(tmp_path, store):
    """An artifact with a pack, which nobody has used for a while."""
    artifact = write_native(tmp_path / "artifacts" / "one", store)
    aged(store)
    return artifact


@pytest.fixture
def roots(tmp_path):
    (tmp_path / "artifacts").mkdir(exist_ok=True)
    return [tmp_path / "artifacts"]


# -- verify ------------------------------------------------------------------------------------------------------------


def test_an_artifact_is_verified_by_stat_or_in_full(artifact):
    size = sum(file.bytes for file in artifact.descriptor.files)

    by_stat, full = run(cs.Verify(artifact)), run(cs.Verify(artifact, verify="full"))

    assert by_stat.receipt("verify").bytes == 0
    assert full.receipt("verify").bytes == size
    assert full.receipt("verify").effective == "3 files and 0 packs are what was captured"
    assert full.receipt("verify").seconds > 0
    assert full.artifact == artifact.path


def test_the_policy_says_how_to_verify_where_the_operation_does_not(artifact):
    policy = {"weights.verify": "full"}

    assert plan(cs.Verify(artifact), **policy)["verify"].mode == "full"
    assert plan(cs.Verify(artifact, verify="evidence"), **policy)["verify"].mode == "evidence"


@pytest.mark.parametrize("mode", ["evidence", "full"])
def test_a_flip_is_found_by_name_and_rule(artifact, mode):
    flip(artifact.path / IMAGE, new_mtime=True)

    with pytest.raises(IntegrityError, match=r"rule evidence\.5") as failed:
        run(cs.Verify(artifact, verify=mode))

    assert failed.value.path.endswith(IMAGE)
    assert failed.value.report.state == "failed"
    assert failed.value.report.workload == "nothing was started"


def test_a_flip_behind_an_unchanged_stat_is_found_in_full_only(artifact):
    flip(artifact.path / IMAGE, new_mtime=False)

    run(cs.Verify(artifact, verify="evidence"))
    with pytest.raises(IntegrityError, match=r"rule evidence\.5"):
        run(cs.Verify(artifact, verify="full"))


def test_packs_are_verified_and_coverage_is_proven(native, store):
    receipt = run(cs.Verify(native, verify="full", store=store.root)).receipt("verify")

    assert receipt.details["packs"] == 1
    assert receipt.details["coverage"].startswith("worker 0: ")
    assert receipt.bytes > store.packs()[0].bytes


def test_a_flip_in_a_pack_is_found_by_name_and_rule(native, store):
    flip(store.packs()[0].path, new_mtime=True)

    with pytest.raises(IntegrityError, match="rule") as failed:
        run(cs.Verify(native, store=store.root))

    assert failed.value.path == str(store.packs()[0].path)


def test_packs_without_a_store_are_refused_while_resolving(native):
    with pytest.raises(AdmissionError, match="names 1 pack; name the store"):
        plan(cs.Verify(native))


def test_a_pack_that_is_not_in_the_store_is_missing_by_digest(native, tmp_path):
    with pytest.raises(PayloadMissingError) as failed:
        run(cs.Verify(native, store=tmp_path / "another"))

    assert {failed.value.digest} == native.packs


@pytest.mark.parametrize("operation", [cs.Verify, cs.Delete])
def test_an_artifact_that_was_replaced_since_it_was_resolved_is_refused(artifact, operation):
    planned = plan(operation(artifact))
    shutil.rmtree(artifact.path)
    again = write_artifact(artifact.path, files={"capsule/rank0/images/core-1.img": b"another"})

    with pytest.raises(AdmissionError, match="is not the artifact of the plan"):
        cs.execute(planned)

    assert run(cs.Verify(again)).state == "succeeded"


# -- delete ------------------------------------------------------------------------------------------------------------


def test_a_deletion_takes_the_artifact_and_tells_what_went(artifact):
    size = sum(file.bytes for file in artifact.descriptor.files)

    told = run(cs.Delete(artifact, dry_run=True))
    assert cs.Artifact.open(artifact.path).verify("full")
    done = run(cs.Delete(artifact))

    assert told.receipt("delete").bytes == done.receipt("delete").bytes == size
    assert told.receipt("delete").effective == f"would delete {artifact.path}"
    assert done.receipt("delete").effective == f"deleted {artifact.path}"
    assert [] == list(artifact.path.parent.iterdir())
    assert done.artifact is None


def test_only_packs_that_nothing_else_names_go(tmp_path, native, store, roots):
    other = write_native(tmp_path / "artifacts" / "other", store)
    aged(store)
    (pack,) = native.packs
    size = store.packs()[0].bytes

    for artifact, gone in ((native, 0), (other, 1)):
        told = run(cs.Delete(artifact, store=store.root, roots=roots, dry_run=True)).receipt("packs")
        assert len(store.packs()) == 1
        done = run(cs.Delete(artifact, store=store.root, roots=roots)).receipt("packs")
        assert told.effective == f"would delete {gone} of 1 packs"
        assert done.effective == f"deleted {gone} of 1 packs"
        assert told.bytes == done.bytes == gone * size
        assert bool(done.reason) == (pack in done.reason) == (not gone)
        assert not artifact.path.exists()

    assert [] == only_packs(store)


def test_without_a_store_packs_stay_and_the_plan_says_so(native, store):
    planned = plan(cs.Delete(native))
    cs.execute(planned)

    assert planned.decision("packs").effective == "left"
    assert len(store.packs()) == 1


def test_roots_reached_through_a_link_are_the_same_roots(tmp_path, native, store, roots):
    (tmp_path / "link").symlink_to(roots[0])
    operation = cs.Delete(native, store=store.root, roots=[tmp_path / "link"], dry_run=True)

    assert run(operation).receipt("packs").effective == "would delete 1 of 1 packs"


def test_an_artifact_that_its_capture_still_holds_is_not_deleted(tmp_path, artifact):
    output = tmp_path / "held"
    with ArtifactWriter.create(output) as writer:
        writer.directory("capsule/rank0/images")
        (writer.path / IMAGE).write_bytes(b"p")
        document = artifact.descriptor
        (unit,) = document.capsule.units
        files = writer.seal("capsule/rank0")
        held = writer.commit(evolved(document, unit, files))
        for dry_run in (True, False):
            with pytest.raises(ArtifactError, match="in use by the capture that wrote it"):
                run(cs.Delete(held, dry_run=dry_run))
        assert cs.Artifact.open(output).verify("full")

    run(cs.Delete(held))
    assert not output.exists()


def evolved(document, unit, files):
    from attrs import evolve

    from coldsnap.artifact import Capsule

    return evolve(document, capsule=Capsule(units=(evolve(unit, volatile=(), files=files),)))


def test_packs_stay_while_a_capture_that_may_name_them_is_in_flight(native, store, roots):
    with ArtifactWriter.create(roots[0] / "coming"):
        with pytest.raises(ArtifactError, match="a capture is writing .*coming, which may name the packs"):
            run(cs.Delete(native, store=store.root, roots=roots))
        assert run(cs.Verify(native, store=store.root)).state == "succeeded"


def test_a_pack_that_a_capture_comes_to_use_during_the_deletion_stays(tmp_path, native, store, roots):
    began = []

    def begin(step, when, *, keeper_pid):
        if (step, when) == ("packs", "before"):
            began.append(write_native(tmp_path / "elsewhere", store))  # finds the pack there, and leaves its stamp

    report = cs.execute(plan(cs.Delete(native, store=store.root, roots=roots)), fault_point=begin)

    assert report.receipt("packs").effective == "deleted 0 of 1 packs"
    assert "used since" in report.receipt("packs").reason
    assert run(cs.Verify(began[0], verify="full", store=store.root)).state == "succeeded"


def test_an_owner_that_cannot_be_read_stops_the_deletion_before_anything_is_gone(tmp_path, native, store, roots):
    other = write_native(tmp_path / "artifacts" / "other", store)
    (other.path / "artifact.json").write_bytes(b"{}")

    with pytest.raises(FormatError):
        run(cs.Delete(native, store=store.root, roots=roots))

    assert cs.Artifact.open(native.path).verify("full")
    assert len(store.packs()) == 1


def test_a_root_that_is_not_there_stops_the_deletion(native, store, tmp_path):
    with pytest.raises(ArtifactError, match="not a directory"):
        run(cs.Delete(native, store=store.root, roots=[tmp_path / "nowhere"]))

    assert native.path.exists()


def test_what_is_not_an_artifact_is_not_deleted(artifact):
    planned = plan(cs.Delete(artifact))
    shutil.rmtree(artifact.path)
    artifact.path.mkdir(mode=0o700)
    (artifact.path / "thesis.txt").write_text("years of work")

    with pytest.raises(ArtifactError, match="is not an artifact"):
        cs.execute(planned)
    with pytest.raises(PolicyError, match="expected an opened artifact"):
        cs.Delete(artifact.path)

    assert (artifact.path / "thesis.txt").read_text() == "years of work"


def test_a_link_to_an_artifact_is_not_an_artifact_to_delete(artifact, tmp_path):
    (tmp_path / "link").symlink_to(artifact.path)

    with pytest.raises(ArtifactError):
        run(cs.Delete(cs.Artifact.open(tmp_path / "link")))

    assert cs.Artifact.open(artifact.path).verify("full")


@pytest.mark.parametrize("options", [{"store": "/s"}, {"roots": ["/a"]}])
def test_store_and_roots_are_named_together(artifact, options):
    with pytest.raises(PolicyError, match="roots"):
        cs.Delete(artifact, **options)


def test_one_root_may_be_written_as_a_text(artifact):
    assert cs.Delete(artifact, store="/s", roots="/artifacts").roots == ("/artifacts",)


def test_a_killed_deletion_leaves_the_artifact_whole_or_nothing_that_looks_like_one(tmp_path):
    outcomes = []
    for count in range(100):
        store = Store(tmp_path / "store")
        native = write_native(tmp_path / "artifacts" / "one", store)
        aged(store)
        killed = deleted_by_a_child_that_dies(native, store, tmp_path / "artifacts", count)
        whole = (native.path / "artifact.json").exists()
        outcomes.append(whole)
        if whole:
            assert run(cs.Verify(native, verify="full", store=store.root)).state == "succeeded"
        else:
            with pytest.raises(ArtifactError):
                cs.Artifact.open(native.path)
        # The next capture to the same output removes what is left, and its deletion leaves nothing.
        again = native if whole else write_native(native.path, store)
        aged(store)
        run(cs.Delete(again, store=store.root, roots=[tmp_path / "artifacts"]))
        assert [] == list((tmp_path / "artifacts").iterdir())
        assert [] == only_packs(store)
        if not killed:
            break

    assert not killed  # every point was reached
    assert outcomes[0] and not outcomes[-1]
    assert sorted(outcomes, reverse=True) == outcomes


def deleted_by_a_child_that_dies(artifact, store, root, count):
    """Delete in a child that is killed just before its count-th change of a name; tell whether it was."""
    child = os.fork()
    if child == 0:
        remaining = [count]

        def audit(event, _):
            if event in {"os.rename", "os.remove", "os.rmdir", "os.unlink"}:
                remaining[0] -= 1
                if remaining[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(60)  # in a thread: the signal ends the process, at once or a little later

        try:
            sys.addaudithook(audit)
            run(cs.Delete(artifact, store=store.root, roots=[root]))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.criu
def test_a_real_capture_in_flight_keeps_its_artifact(lab):
    refusals = []

    def strike(step, when, *, keeper_pid):
        if (step, when) == ("settle", "before"):
            artifact = cs.Artifact.open(lab.directory / "artifact0")
            with pytest.raises(ArtifactError, match="in use by the capture") as refused:
                run(cs.Delete(artifact))
            refusals.append(refused.value)

    report = lab.capture(lab.engine(), fault_point=strike)

    assert len(refusals) == 1
    assert run(cs.Verify(cs.Artifact.open(report.artifact), verify="full")).state == "succeeded"
    run(cs.Delete(cs.Artifact.open(report.artifact)))
    assert not report.artifact.exists()


# -- publish -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    with HubServer() as server:
        yield server


@pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload:DeprecationWarning")
def test_packs_are_published_once_and_the_receipt_names_the_revision(native, store, hub):
    operation = cs.Publish(native, store=store.root, repository="team/packs", endpoint=hub.endpoint, create=True)

    first, second = run(operation).receipt("packs"), run(operation).receipt("packs")

    assert first.effective == "1 packs sent, 0 were there"
    assert second.effective == "0 packs sent, 1 were there"
    assert (first.bytes, second.bytes) == (store.packs()[0].bytes, 0)
    assert first.details["revision"] == second.details["revision"]
    assert len(hub.uploads) == 1


def test_an_artifact_is_pushed_and_comes_back_the_same(artifact, registry, tmp_path):
    address, _ = registry

    receipt = run(cs.Publish(artifact, reference=f"{address}/team/one:v1", insecure=True)).receipt("push")

    assert receipt.effective.startswith(f"{address}/team/one@sha256:")
    assert pull(receipt.effective, tmp_path / "again", insecure=True).digest == artifact.digest


def test_a_damaged_artifact_is_not_pushed(artifact, registry):
    flip(artifact.path / IMAGE, new_mtime=True)

    with pytest.raises(IntegrityError, match=r"rule evidence\.5"):
        run(cs.Publish(artifact, reference=f"{registry[0]}/team/damaged:v1", insecure=True))


def test_publishing_packs_of_an_artifact_without_any_is_refused(artifact, store):
    with pytest.raises(AdmissionError, match="names no pack"):
        plan(cs.Publish(artifact, store=store.root, repository="team/packs"))


def test_a_registry_that_cannot_be_reached_is_an_error_with_its_name(artifact, free_port):
    with pytest.raises(ArtifactError, match=f"127.0.0.1:{free_port}"):
        run(cs.Publish(artifact, reference=f"127.0.0.1:{free_port}/team/one:v1", insecure=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repository": "a/b"},
        {"store": "/s", "reference": "r/x:v1"},
        {"reference": "r/x:v1", "create": True},
        {"store": "/s", "repository": "a/b", "insecure": True},
    ],
)
def test_where_to_publish_is_said_completely(artifact, options):
    with pytest.raises(PolicyError):
        cs.Publish(artifact, **options)
