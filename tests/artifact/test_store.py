"""The store holds each pack once, whole, whoever brings it and however often."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import attrs
import pytest
from faults import killed_at, points_of
from made import descriptor, in_mounts_of_its_own
from memory import captured, payload

import coldsnap
from coldsnap.artifact import Artifact, ArtifactWriter, Weights
from coldsnap.artifact.collect import artifacts_below, collect, delete_artifact, verify_artifact
from coldsnap.artifact.difference import diff
from coldsnap.artifact.durable import remove_committed, staged_file, unharmed
from coldsnap.artifact.manifest import encode
from coldsnap.artifact.pack import Bytes
from coldsnap.artifact.payloads import ModelPayloads, WorkerWeights
from coldsnap.artifact.store import Store
from coldsnap.errors import ArtifactError, FormatError, IntegrityError, PayloadMissingError
from coldsnap.host.kernel import KernelFiles
from coldsnap.host.probe import probe_store

SOURCE = str(Path(coldsnap.__file__).parents[1])


@pytest.fixture(name="store")
def _store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def write_native(output: Path, store: Store, *, seed: int = 0, at=unharmed, **changes: object) -> Artifact:
    """Write an artifact with its weights in a pack, as a native capture does."""
    with ArtifactWriter.create(output, at=at) as writer:
        writer.directory("capsule/rank0/images")
        (writer.path / "capsule/rank0/images/core-1.img").write_bytes(b"core")
        weights = writer.directory("weights/0")
        native, recovery, _ = captured(weights, store, seed=seed)
        (weights / "native-manifest.json").write_bytes(encode(native))
        (weights / "recovery-manifest.json").write_bytes(encode(recovery))
        files = {file.path.rsplit("/")[-1]: file for file in writer.seal("weights/0")}
        made = descriptor(writer.seal("capsule/rank0"))
        section = Weights(
            kind="packs",
            payloads=ModelPayloads(objects=(payload(native),)),
            workers=(
                WorkerWeights(
                    worker="0",
                    residual=files["weights.blob"],
                    native_manifest=files["native-manifest.json"],
                    recovery_manifest=files["recovery-manifest.json"],
                ),
            ),
        )
        return writer.commit(attrs.evolve(made, weights=section, **changes))


def only_packs(store: Store) -> list[str]:
    return [path.name for path in store.directory.iterdir() if not path.name.endswith(".lock")]


def test_two_captures_of_the_same_weights_store_them_once(tmp_path: Path, store: Store) -> None:
    one = write_native(tmp_path / "one", store)
    two = write_native(tmp_path / "two", store)

    assert one.packs == two.packs
    assert 1 == len(store.packs())
    shares = diff(one, two).bytes["packs"]
    assert (store.packs()[0].bytes, 0, 0) == (shares.shared, shares.left, shares.right)


def test_a_whole_artifact_is_verified_with_its_packs_and_its_coverage(tmp_path: Path, store: Store) -> None:
    artifact = write_native(tmp_path / "one", store)

    first, second = verify_artifact(artifact, store), verify_artifact(artifact, store)
    full = verify_artifact(artifact, store, "full")

    assert "revalidated_existing" == first.packs[0].validation.reason
    assert "cached_validation" == second.packs[0].validation.reason
    assert "revalidated_existing" == full.packs[0].validation.reason
    assert "no gap, no overlap" in first.coverage[0]
    with pytest.raises(ArtifactError, match="in which store"):
        verify_artifact(artifact, None)


@pytest.mark.parametrize("verify", ["evidence", "full"])
@pytest.mark.parametrize("name", ["weights/0/weights.blob", "weights/0/native-manifest.json", "pack"])
def test_a_flip_anywhere_refuses_the_artifact(tmp_path: Path, store: Store, verify, name: str) -> None:
    artifact = write_native(tmp_path / "one", store)
    verify_artifact(artifact, store)
    path = store.packs()[0].path if name == "pack" else artifact.path / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

    with pytest.raises(IntegrityError, match=r"rule (evidence|validation|pack)\.\d") as caught:
        verify_artifact(artifact, store, verify)
    assert str(path) == caught.value.path


def test_an_absent_pack_is_named_by_its_digest(tmp_path: Path, store: Store) -> None:
    artifact = write_native(tmp_path / "one", store)
    (pack,) = artifact.packs
    assert store.packs()[0].bytes == store.delete(pack)
    assert 0 == store.delete(pack)

    with pytest.raises(PayloadMissingError) as caught:
        verify_artifact(artifact, store)
    assert pack == caught.value.digest


def test_everything_in_the_store_is_private_and_its_facts_feed_probe(tmp_path: Path, store: Store) -> None:
    artifact = write_native(tmp_path / "one", store)
    verify_artifact(artifact, store)

    for path in (store.root, *store.root.rglob("*")):
        assert not path.stat().st_mode & 0o077, path
    facts = probe_store(store.root, KernelFiles())
    assert [(pack.sha256, pack.bytes) for pack in store.packs()] == [
        (one.digest, one.size_bytes) for one in facts.packs
    ]
    assert store.packs()[0].evidence
    assert store.size_bytes["packs"] == store.packs()[0].bytes


def test_a_store_that_cannot_be_made_is_told_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in ("file", "file/below", "x" * 300):
        with pytest.raises(ArtifactError, match=f"the directory .*{place} of the store .* cannot be created: "):
            Store(tmp_path / place).prepare()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_store_open_to_others_is_refused(store: Store) -> None:
    store.prepare()
    store.directory.chmod(0o755)

    with pytest.raises(FormatError, match=r"evidence\.3"):
        store.write([Bytes(b"x")])


def test_a_pack_that_is_not_what_its_name_says_is_refused_and_kept(store: Store) -> None:
    pack = store.write([Bytes(b"x")])
    path = store.path(pack.sha256)
    path.write_bytes(b"y" * pack.bytes)

    with pytest.raises(IntegrityError):
        store.admit(payload_of(pack))
    assert path.exists()


def payload_of(pack):
    from coldsnap.artifact.payloads import PayloadObject

    return PayloadObject(
        worker="0", path=f"model-payloads/sha256/{pack.sha256[7:]}.pack", bytes=pack.bytes, sha256=pack.sha256
    )


# Staging


STAGER = """
import sys, time
from pathlib import Path
from coldsnap.artifact.payloads import PayloadObject
from coldsnap.artifact.store import Store

root, sha256, size, source, log = sys.argv[1:]

def fetch(staging):
    with open(log, "a") as stream:
        stream.write("fetched\\n")
    time.sleep(0.2)
    target = staging / "download"
    target.write_bytes(Path(source).read_bytes())
    return target

item = PayloadObject(worker="0", path=f"model-payloads/sha256/{sha256[7:]}.pack", bytes=int(size), sha256=sha256)
print(Store(root).stage(item, fetch).validation.reason)
"""


def test_sixteen_processes_staging_one_digest_make_one_copy(tmp_path: Path, store: Store) -> None:
    pack = Store(tmp_path / "elsewhere").write([Bytes(os.urandom(1 << 20)), Bytes(b"tail")])
    source, log = Store(tmp_path / "elsewhere").path(pack.sha256), tmp_path / "log"
    arguments = [str(store.root), pack.sha256, str(pack.bytes), str(source), str(log)]

    stagers = [
        subprocess.Popen(
            [sys.executable, "-c", STAGER, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": SOURCE},
        )
        for _ in range(16)
    ]
    ended = [stager.communicate(timeout=120) for stager in stagers]

    assert [0] * 16 == [stager.returncode for stager in stagers], ended
    assert "fetched\n" == log.read_text()
    assert ["cached_validation"] * 15 + ["revalidated_existing"] == sorted(out.strip() for out, _ in ended)
    assert sorted([f"{pack.sha256[7:]}.pack", f"{pack.sha256[7:]}.pack.coldsnap-validation.json"]) == sorted(
        only_packs(store)
    )


def test_a_wrong_download_is_refused_and_the_next_one_begins_anew(tmp_path: Path, store: Store) -> None:
    pack = Store(tmp_path / "elsewhere").write([Bytes(b"right")])
    good = Store(tmp_path / "elsewhere").path(pack.sha256).read_bytes()

    def fetcher(data: bytes):
        def fetch(staging: Path) -> Path:
            assert not (staging / "download").exists()
            (staging / "download").write_bytes(data)
            return staging / "download"

        return fetch

    with pytest.raises(IntegrityError, match=r"rule store\.3"):
        store.stage(payload_of(pack), fetcher(b"wrong"))
    assert not store.path(pack.sha256).exists()
    assert pack.bytes == store.stage(payload_of(pack), fetcher(good)).bytes


def test_a_killed_download_is_resumed_by_the_next_process(tmp_path: Path, store: Store) -> None:
    pack = Store(tmp_path / "elsewhere").write([Bytes(b"right" * 1000)])
    good = Store(tmp_path / "elsewhere").path(pack.sha256).read_bytes()

    def dying(staging: Path) -> Path:
        (staging / "download.incomplete").write_bytes(good[:100])
        raise KeyboardInterrupt

    def resuming(staging: Path) -> Path:
        part = (staging / "download.incomplete").read_bytes()
        (staging / "download").write_bytes(part + good[len(part) :])
        return staging / "download"

    with pytest.raises(KeyboardInterrupt):
        store.stage(payload_of(pack), dying)
    assert pack.bytes == store.stage(payload_of(pack), resuming).bytes
    assert 2 == len(only_packs(store))


# Crashes


def test_a_writer_killed_at_any_point_leaves_a_whole_pack_or_none(tmp_path: Path) -> None:
    def work(store_root: Path, at) -> None:
        Store(store_root, at=at).write([Bytes(b"x" * 5000), Bytes(b"y")])

    points = points_of(lambda at: work(tmp_path / "counted", at))
    assert {"create", "write", "fsync", "rename"} <= {point.rpartition(":")[2] for point in points}
    (name,) = [pack.path.name for pack in Store(tmp_path / "counted").packs()]

    for count in range(len(points)):
        root = tmp_path / f"store{count}"
        assert killed_at(count, lambda at, root=root: work(root, at))
        store = Store(root)
        for pack in store.packs():
            assert pack.path.read_bytes() == Store(tmp_path / "counted").packs()[0].path.read_bytes()
        collect(store, [store.root], dry_run=False)
        work(root, lambda point: None)
        assert [name] == only_packs(store)


def test_a_stager_killed_at_any_point_leaves_a_whole_pack_or_none(tmp_path: Path) -> None:
    pack = Store(tmp_path / "elsewhere").write([Bytes(b"right" * 1000)])
    good = Store(tmp_path / "elsewhere").path(pack.sha256).read_bytes()

    def fetch(staging: Path) -> Path:
        (staging / "download").write_bytes(good)
        return staging / "download"

    points = points_of(lambda at: Store(tmp_path / "counted", at=at).stage(payload_of(pack), fetch))
    assert {"fsync", "rename", "write"} <= {point.rpartition(":")[2] for point in points}

    for count in range(len(points)):
        root = tmp_path / f"store{count}"
        assert killed_at(count, lambda at, root=root: Store(root, at=at).stage(payload_of(pack), fetch))
        store = Store(root)
        assert all(one.path.read_bytes() == good for one in store.packs())
        assert pack.bytes == store.stage(payload_of(pack), fetch).bytes
        collect(store, [store.root], grace_s=3600)
        assert 2 == len(only_packs(store))


def test_a_native_capture_killed_at_any_point_leaves_no_artifact_or_a_whole_one(tmp_path: Path) -> None:
    def work(at) -> None:
        write_native(tmp_path / "one", Store(tmp_path / "store", at=at), at=at)

    points = points_of(work)
    delete_artifact(Artifact.open(tmp_path / "one"))
    for count in range(len(points)):
        assert killed_at(count, work)
        store = Store(tmp_path / "store")
        if (tmp_path / "one/artifact.json").exists():
            verify_artifact(Artifact.open(tmp_path / "one"), store, "full")
            delete_artifact(Artifact.open(tmp_path / "one"))
        artifact = write_native(tmp_path / "one", store)
        time.sleep(0.11)  # a pack that was used a moment ago stays
        delete_artifact(artifact, store, [tmp_path])
        collect(store, [tmp_path])
        assert ["store"] == [path.name for path in tmp_path.iterdir()]
        assert [] == only_packs(store)


def test_a_full_disk_leaves_nothing_behind(store: Store) -> None:
    def full(point: str) -> None:
        if point.endswith(":write"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"):
        Store(store.root, at=full).write([Bytes(b"x")])
    assert [] == only_packs(store)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small filesystem")
def test_a_really_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    script = f"""
import errno, os, subprocess, sys
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "none", {str(tmp_path)!r}], check=True)
from coldsnap.artifact.pack import Bytes
from coldsnap.artifact.store import Store
store = Store({str(tmp_path)!r})
store.write([Bytes(b"fits")])
try:
    store.write([Bytes(bytes(8 << 20))])
except OSError as error:
    assert error.errno == errno.ENOSPC, error
else:
    raise SystemExit("it fitted")
print(sorted(path.suffix for path in store.directory.iterdir() if path.suffix != ".lock"))
"""
    assert (0, "['.pack']\n", "") == in_mounts_of_its_own(script)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a filesystem")
@pytest.mark.parametrize("verified_before", [True, False])
def test_a_store_on_a_read_only_medium_admits_its_packs(tmp_path: Path, store: Store, verified_before: bool) -> None:
    artifact = write_native(tmp_path / "one", store)
    if verified_before:
        verify_artifact(artifact, store)
    script = f"""
import subprocess
for options in (["--bind", {str(tmp_path)!r}, {str(tmp_path)!r}], ["-o", "remount,ro,bind", {str(tmp_path)!r}]):
    subprocess.run(["mount", *options], check=True)
from coldsnap.artifact import Artifact
from coldsnap.artifact.collect import verify_artifact
from coldsnap.artifact.store import Store
for mode in ("evidence", "full"):
    found = verify_artifact(Artifact.open({str(artifact.path)!r}), Store({str(store.root)!r}), mode)
    print(found.packs[0].validation.reason)
"""
    first = "cached_validation" if verified_before else "revalidated_existing"
    assert (0, f"{first}\nrevalidated_existing\n", "") == in_mounts_of_its_own(script)


def test_whoever_lists_admits_stages_and_deletes_one_pack_at_once_gets_an_answer_or_that_it_is_not_there(
    tmp_path: Path, store: Store
) -> None:
    pack = Store(tmp_path / "elsewhere").write([Bytes(os.urandom(1 << 16))])
    good = Store(tmp_path / "elsewhere").path(pack.sha256)
    store.prepare()
    (tmp_path / "artifacts").mkdir()

    def fetch(staging: Path) -> Path:
        return Path(shutil.copy(good, staging / "download"))

    acts = {
        "stage": lambda: store.stage(payload_of(pack), fetch),
        "admit": lambda: store.admit(payload_of(pack), "full"),
        "list": lambda: (store.packs(), store.size_bytes),
        "delete": lambda: store.delete(pack.sha256),
        "collect": lambda: collect(store, [tmp_path / "artifacts"], grace_s=0),
    }
    answered = dict.fromkeys(acts, 0)
    end = time.monotonic() + 1.5

    def go_on(name: str) -> None:
        while time.monotonic() < end:
            with suppress(PayloadMissingError):
                acts[name]()
                answered[name] += 1

    with ThreadPoolExecutor(len(acts)) as pool:
        for done in [pool.submit(go_on, name) for name in acts]:
            done.result()
    assert all(answered.values()), answered
    assert store.stage(payload_of(pack), fetch).sha256 == pack.sha256


# Garbage


def aged(store: Store) -> None:
    long_ago = time.time() - 10 * 24 * 3600
    for path in (*store.directory.iterdir(), *store.directory.glob(".*")):
        os.utime(path, (long_ago, long_ago), follow_symlinks=False)


def test_garbage_collection_keeps_what_is_named_and_what_is_recent(tmp_path: Path, store: Store) -> None:
    artifact = write_native(tmp_path / "artifacts" / "one", store)
    orphan = store.write([Bytes(b"orphan")])
    aged(store)
    recent = store.write([Bytes(b"recent")])

    planned = collect(store, [tmp_path / "artifacts"], dry_run=True)
    assert [orphan.sha256] == [pack.sha256 for pack in planned.removed]
    assert 3 == len(store.packs())
    done = collect(store, [tmp_path / "artifacts"])

    assert attrs.evolve(planned, dry_run=False) == done
    assert {*artifact.packs, recent.sha256} == {pack.sha256 for pack in store.packs()}
    assert {"recent", f"named by {artifact.path}"} == {reason for _, reason in done.kept}
    assert orphan.bytes == done.bytes


def test_a_pack_that_a_capture_found_again_is_recent(store: Store) -> None:
    pack = store.write([Bytes(b"again")])
    aged(store)
    store.write([Bytes(b"again")])

    assert [(pack.sha256, "recent")] == list(collect(store, [store.root]).kept)


def test_garbage_collection_removes_what_killed_processes_left(store: Store) -> None:
    store.prepare()
    (store.directory / ".new.pack.partial-00").write_bytes(b"x" * 100)
    (store.directory / f".{'0' * 64}.staging").mkdir()
    (store.directory / f".{'0' * 64}.staging/part").write_bytes(b"y" * 10)
    aged(store)
    with staged_file(store.directory, "busy.pack"):
        planned = collect(store, [store.root], dry_run=True)
        done = collect(store, [store.root])
        assert 1 == len([name for name in only_packs(store) if "busy" in name])

    assert attrs.evolve(planned, dry_run=False) == done
    assert (2, 110) == (len(done.partials), done.bytes)
    assert [] == only_packs(store)


def test_what_has_another_name_than_a_digest_is_nobodys_garbage(store: Store) -> None:
    store.prepare()
    for name in ("notes.pack", f"{'A' * 64}.pack", ".notes.staging"):
        (store.directory / name).touch()
    (store.directory / f"{'0' * 64}.pack").mkdir()
    aged(store)
    before = sorted(store.directory.iterdir())

    assert () == store.packs()
    assert () == collect(store, [store.root], grace_s=0).removed
    assert before == sorted(store.directory.iterdir())


def test_garbage_collection_refuses_when_no_place_of_artifacts_is_named(tmp_path: Path, store: Store) -> None:
    write_native(tmp_path / "one", store)
    with pytest.raises(ArtifactError, match="no root was named"):
        collect(store, [], grace_s=0)
    assert 1 == len(store.packs())


def test_garbage_collection_refuses_when_it_cannot_read_an_artifact(tmp_path: Path, store: Store) -> None:
    artifact = write_native(tmp_path / "artifacts" / "one", store)
    aged(store)
    (artifact.path / "artifact.json").write_bytes(b"{}")

    for roots in ([tmp_path / "artifacts"], [tmp_path / "nowhere"]):
        with pytest.raises(ArtifactError):
            collect(store, roots)
    assert 1 == len(store.packs())


def test_artifacts_are_found_below_roots(tmp_path: Path, store: Store) -> None:
    write_native(tmp_path / "a" / "deep" / "one", store)
    write_native(tmp_path / "b", store)

    assert {"one", "b"} == {artifact.path.name for artifact in artifacts_below([tmp_path])}


def test_deleting_an_artifact_takes_the_packs_that_nobody_else_names(tmp_path: Path, store: Store) -> None:
    roots = [tmp_path / "artifacts"]
    one = write_native(roots[0] / "one", store)
    two = write_native(roots[0] / "two", store)
    (pack,) = one.packs
    time.sleep(0.11)  # a pack that was used a moment ago stays

    planned = delete_artifact(one, store, roots, dry_run=True)
    first = delete_artifact(one, store, roots)
    assert planned == first
    assert ((pack, f"named by {two.path}"),) == first.packs_left
    assert not one.path.exists()
    planned = delete_artifact(two, store, roots, dry_run=True)
    second = delete_artifact(two, store, roots)

    assert planned == second
    assert (pack,) == second.packs_deleted
    assert () == store.packs()


def test_deleting_without_looking_for_other_owners_leaves_the_packs(tmp_path: Path, store: Store) -> None:
    artifact = write_native(tmp_path / "one", store)

    deleted = delete_artifact(artifact, store)
    assert ((*artifact.packs, "no root was given to look for other owners"),) == deleted.packs_left
    assert 1 == len(store.packs())


# Difference


def test_two_captures_are_compared_by_fields_and_by_bytes(tmp_path: Path, store: Store) -> None:
    one = write_native(tmp_path / "one", store)
    two = write_native(tmp_path / "two", store, seed=1, capture_id="capture-0002")
    engine = attrs.evolve(one.descriptor.engine, torch="2.14.0")
    three = write_native(tmp_path / "three", store, engine=engine)

    assert (("$.engine.torch", "2.13.0", "2.14.0"),) == diff(one, three).fields
    assert 0 == diff(one, two).bytes["packs"].shared
    assert diff(one, one).same
    assert "torch" in str(diff(one, three))


def test_nothing_is_deleted_while_a_capture_may_name_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    artifact = write_native(tmp_path / "one", store)
    time.sleep(0.11)

    with ArtifactWriter.create(tmp_path / "two") as writer:
        with pytest.raises(ArtifactError, match="a capture is writing .*two"):
            delete_artifact(artifact, store, [tmp_path])
        with pytest.raises(ArtifactError, match="a capture is writing .*two"):
            collect(store, [tmp_path], grace_s=0)
        assert 1 == len(list(store.packs())) and writer.path.exists()

    delete_artifact(artifact, store, [tmp_path])
    assert [] == list(store.packs())


def test_an_artifact_is_not_deleted_while_its_own_capture_holds_it(tmp_path: Path) -> None:
    with ArtifactWriter.create(tmp_path / "one") as writer:
        writer.directory("capsule/rank0/images")
        (writer.path / "capsule/rank0/images/inventory.img").write_bytes(b"inventory")
        os.rename(writer.path / "artifact.json.partial", writer.path / "artifact.json")

        with pytest.raises(ArtifactError, match="in use by the capture that wrote it"):
            remove_committed(writer.path)

        assert (writer.path / "artifact.json").exists()


def test_a_pack_that_was_used_a_moment_ago_stays_and_the_receipt_says_so(tmp_path: Path, store: Store) -> None:
    artifact = write_native(tmp_path / "artifacts" / "one", store)
    (pack,) = artifact.packs
    soon = time.time_ns() + 60 * 10**9  # whenever the deletion begins, another capture stamps the pack after that
    os.utime(store.directory / f".{pack.removeprefix('sha256:')}.lock", ns=(soon, soon))

    deleted = delete_artifact(artifact, store, [tmp_path / "artifacts"])

    assert ((pack, "used since the deletion began"),) == deleted.packs_left
    assert () == deleted.packs_deleted
