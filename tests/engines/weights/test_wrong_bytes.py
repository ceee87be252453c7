"""What is not the generation of this memory is refused by name; so is a request that makes no sense."""

import json
import os

import pytest
from sleepers import PLAIN, SMALL, Layout, Worker, files, only, release_request, released, status

from coldsnap.artifact.canonical import sha256_of
from coldsnap.errors import (
    AdmissionError,
    CoverageError,
    FormatError,
    IntegrityError,
    PayloadMissingError,
    UnsupportedError,
)


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    before = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # so that only the bytes can tell


@pytest.mark.parametrize("pattern", ["weights.blob", "*.pack", "native-manifest.json"])
@pytest.mark.parametrize("place", [0, -4096])
def test_a_flipped_byte_is_refused_by_name_before_the_memory_counts_as_awake(
    worker, transfer, pattern, place, tmp_path
):
    worker.worker.release(release_request(tmp_path, **transfer))
    worker.worker.hydrate({"backend": transfer["backend"]})  # the admission of the pack is on record from now on
    worker.worker.release(release_request(tmp_path, **transfer))
    path = only(tmp_path, pattern)
    place = place if -place <= path.stat().st_size else -1
    flip(path, place)

    with pytest.raises(IntegrityError, match=path.name):
        worker.worker.hydrate({"backend": transfer["backend"]})

    assert status(worker)["state"] == "failed"
    flip(path, place)
    worker.worker.hydrate({"backend": transfer["backend"]})
    assert worker.is_whole()


@pytest.mark.parametrize("pattern", ["weights.blob", "*.pack", "native-manifest.json"])
def test_what_is_short_or_missing_is_refused_before_anything_is_mapped(worker, pattern, tmp_path):
    released(worker, tmp_path)
    path = only(tmp_path, pattern)
    data = path.read_bytes()

    path.write_bytes(data[:-1])
    with pytest.raises(IntegrityError, match=path.name):
        worker.worker.hydrate({})
    path.unlink()
    with pytest.raises(PayloadMissingError if pattern == "*.pack" else IntegrityError, match=path.name):
        worker.worker.hydrate({})

    assert status(worker)["regions"]["weights"]["mapped_bytes"] == 0


@pytest.mark.parametrize("verify_mode", ["inline", "preverified"])
def test_preverified_reads_the_residual_before_it_moves_it(worker, verify_mode, tmp_path):
    released(worker, tmp_path)
    flip(only(tmp_path, "weights.blob"), 0)

    with pytest.raises(IntegrityError, match=r"weights\.blob"):
        worker.worker.hydrate({"verify_mode": verify_mode})


def test_full_verification_finds_what_evidence_cannot(worker, tmp_path):
    released(worker, tmp_path)
    worker.worker.hydrate({})
    released(worker, tmp_path)
    flip(only(tmp_path, "*.pack"), 0)

    with pytest.raises(IntegrityError, match="extent at 0x0"):
        worker.worker.hydrate({"verify": "full", "verify_mode": "preverified"})

    assert status(worker)["regions"]["weights"]["mapped_bytes"] == 0


def test_a_caller_who_admits_the_pack_himself_leaves_name_size_and_checksums_to_the_worker(worker, tmp_path):
    released(worker, tmp_path)
    pack = only(tmp_path, "*.pack")
    record = pack.with_name(f"{pack.name}.coldsnap-validation.json")

    flip(pack, 0)
    with pytest.raises(IntegrityError, match="extent 0"):
        worker.worker.hydrate({"verify": "none"})
    flip(pack, 0)
    worker.worker.hydrate({"verify": "none"})

    assert worker.is_whole()
    assert not record.exists()


def test_another_pack_is_an_error_and_never_a_fallback(worker, tmp_path):
    reply = released(worker, tmp_path)
    other = Worker(Layout(weights=(8192,), model=((0, 0, 8192),), seed=5))
    other_reply = released(other, tmp_path / "other", store=str(tmp_path / "store"))
    wrong = tmp_path / "store" / "model-payloads" / "sha256" / f"{other_reply['pack']['sha256'][7:]}.pack"

    with pytest.raises(IntegrityError, match="another pack than the manifest's"):
        worker.worker.hydrate(
            {
                "directory": str(tmp_path / "artifact" / "weights" / "worker-0"),
                "manifest_sha256": reply["manifest_sha256"],
                "pack": str(wrong),
            }
        )
    other.close()


def test_the_generation_of_another_memory_is_refused_and_the_differences_are_named(worker, tmp_path):
    released(worker, tmp_path)
    other = Worker(SMALL)
    theirs = released(other, tmp_path / "other")

    with pytest.raises(AdmissionError) as refused:
        worker.worker.hydrate(
            {
                "directory": str(tmp_path / "other" / "artifact" / "weights" / "worker-0"),
                "manifest_sha256": theirs["manifest_sha256"],
                "pack": str(only(tmp_path / "other", "*.pack")),
            }
        )

    assert f"{worker.weights[0].address:#x}: {PLAIN.weights[0]} bytes of weights are only in the memory" in str(
        refused.value
    )
    assert f"{other.weights[0].address:#x}: 20000 bytes of weights are only in worker worker-0" in str(refused.value)
    other.close()


def test_an_earlier_generation_of_the_same_memory_is_refused(worker, tmp_path):
    first = released(worker, tmp_path)
    worker.worker.hydrate({})
    worker.memory.copy_from_host(worker.weights[2].address + 4_500, memoryview(b"later"))
    released(worker, tmp_path / "later")

    with pytest.raises(AdmissionError, match="not the one that this process released"):
        worker.worker.hydrate(
            {
                "directory": str(tmp_path / "artifact" / "weights" / "worker-0"),
                "manifest_sha256": first["manifest_sha256"],
                "pack": str(only(tmp_path / "store", "*.pack")),
            }
        )

    assert status(worker)["regions"]["weights"]["mapped_bytes"] == 0


def test_the_generation_of_another_worker_is_refused(worker, tmp_path):
    released(worker, tmp_path)
    other = Worker(SMALL)
    theirs = other.worker.release(release_request(tmp_path / "other", worker="worker-1", backend="python"))

    with pytest.raises(AdmissionError, match=r"is worker worker-1's, this is worker worker-0"):
        worker.worker.hydrate(
            {
                "directory": str(tmp_path / "other" / "artifact" / "weights" / "worker-0"),
                "manifest_sha256": theirs["manifest_sha256"],
                "pack": str(only(tmp_path / "other", "*.pack")),
            }
        )
    other.close()


def test_a_split_that_is_not_of_this_memory_is_refused_before_anything_is_written(worker, tmp_path):
    worker.memory.allocate(4096, tag="weights")

    with pytest.raises(AdmissionError, match="4096 bytes of weights are only in the memory of this process"):
        released(worker, tmp_path)

    assert files(tmp_path) == []
    assert status(worker)["state"] == "awake"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"directory": "relative"}, FormatError, "absolute path"),
        ({"reserve_bytes": "4096"}, FormatError, "expected int"),
        ({"compress": True}, FormatError, "unknown field 'compress'"),
        ({"chunk_bytes": 5000}, FormatError, "multiple of 4096"),
        ({"backend": "gds"}, FormatError, "expected 'auto'"),
        ({"discard": ["weights"]}, AdmissionError, "both preserved and discarded"),
    ],
)
def test_a_release_that_makes_no_sense_is_refused(change, error, message, worker, tmp_path):
    with pytest.raises(error, match=message):
        worker.worker.release(release_request(tmp_path, **{"backend": "python", **change}))

    assert status(worker)["state"] == "awake"
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        ({"provider": "recovery"}, AdmissionError, "nothing of how the weights were loaded was recorded"),
        ({"provider": "recovery", "loader": {"staging_bytes": 5000}}, FormatError, "multiple of 4096"),
        ({"provider": "recovery", "loader": {"verify_bytes": 4097}}, FormatError, "verify_bytes"),
        ({"provider": "recovery", "recovery_sha256": "sha256:" + "0" * 64}, FormatError, "come together"),
        ({"directory": "/somewhere"}, FormatError, "come together"),
        ({"pack": "/a.pack"}, FormatError, "come together"),
        ({"verify_mode": "never"}, FormatError, "'preverified'"),
        ({"backend": "gds"}, UnsupportedError, "preverified"),
        ({"verify": "none", "verify_mode": "preverified"}, FormatError, "something must look at the bytes"),
    ],
)
def test_a_hydrate_that_makes_no_sense_is_refused(request_, error, message, worker, tmp_path, native_library):
    released(worker, tmp_path)

    with pytest.raises(error, match=message):
        worker.worker.hydrate({"native_library": native_library, **request_})

    worker.worker.hydrate({})
    assert worker.is_whole()


def test_a_manifest_that_leaves_a_byte_out_is_no_manifest(worker, tmp_path):
    released(worker, tmp_path)
    path = only(tmp_path, "native-manifest.json")
    document = json.loads(path.read_text())
    del document["residual_extents"][0]
    data = json.dumps(document, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    path.write_bytes(data)
    with pytest.raises((CoverageError, FormatError)):
        worker.worker.hydrate(
            {"directory": str(path.parent), "manifest_sha256": sha256_of(data), "pack": str(only(tmp_path, "*.pack"))}
        )

    assert status(worker)["regions"]["weights"]["mapped_bytes"] == 0
