"""Weights come back out of the checkpoint: every byte of the pinned files, and nothing of any other."""

import errno
import os

import pytest
from hypothesis import HealthCheck, given, settings
from sleepers import PLAIN, SMALL, Layout, Worker, layouts, only, release_request, status

from coldsnap.errors import AdmissionError, FormatError, IntegrityError
from coldsnap.transfer.safetensors import read_header

BACKENDS = ["mmap", "auto", "buffered", "direct"]


@pytest.fixture
def asleep(tmp_path, native_library):
    """A worker whose memory sleeps, and may be recovered."""
    worker = Worker(PLAIN)
    worker.checkpoint = worker.loaded_from(tmp_path / "model.safetensors")
    worker.told = worker.worker.release(
        release_request(tmp_path, backend="buffered", native_library=native_library, recovery="required")
    )
    yield worker
    worker.close()


def recover(worker, **loader):
    return worker.worker.hydrate({"op": "hydrate", "provider": "recovery", "loader": loader})


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_loaded_comes_back_out_of_the_checkpoint_byte_for_byte(asleep, tmp_path, backend):
    only(tmp_path, "*.pack").unlink()

    woken = recover(asleep, backend=backend)

    assert asleep.is_whole()
    assert asleep.is_forgotten()
    assert woken["state"] == "awake"
    size = sum(size for _, _, size in PLAIN.model)
    receipt = woken["receipts"]["checkpoint"]
    assert woken["bytes"]["checkpoint"] == receipt["local_read_bytes"] == size
    assert woken["bytes"]["pack"] == 0
    assert (receipt["requested"], receipt["verified_extents"], receipt["files"]) == (backend, len(PLAIN.model), 1)
    (observed,) = receipt["observed"]
    assert observed["path"] == str(asleep.checkpoint)
    assert observed["filesystem_type"]
    assert observed["device"]


def test_a_backend_that_was_asked_for_is_what_the_receipt_says(asleep):
    assert recover(asleep, backend="mmap")["receipt"] == {
        "requested": "mmap",
        "effective": "mmap",
        "reason": "explicit-policy",
    }


def test_a_release_tells_what_was_recorded(asleep):
    told = asleep.told["recovery"]
    assert told.pop("manifest_sha256").startswith("sha256:")
    count = len(PLAIN.model)
    assert told == {"reason": "", "files": 1, "copies": count, "plain": count, "derived_bytes": 0}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_byte_that_was_flipped_is_found_and_its_tensor_named(asleep, backend):
    name, stored = next((one.name, one) for one in read_header(asleep.checkpoint) if one.length == 4_096)
    flip(asleep.checkpoint, stored.file_offset + 100)

    with pytest.raises(IntegrityError, match=f"the tensor {name} is not the one that was loaded at capture"):
        recover(asleep, backend=backend)

    assert status(asleep)["state"] == "failed"
    flip(asleep.checkpoint, stored.file_offset + 100)
    assert recover(asleep, backend=backend)["state"] == "awake"
    assert asleep.is_whole()


def test_a_missing_file_is_refused_before_anything_is_mapped(asleep):
    asleep.checkpoint.rename(asleep.checkpoint.with_suffix(".away"))

    with pytest.raises(IntegrityError, match="a file of the checkpoint is missing"):
        recover(asleep)

    assert not any(asleep.memory.is_mapped(region) for region in asleep.weights)


@pytest.mark.parametrize("change", ["longer", "header", "not-safetensors"])
def test_another_revision_is_refused_before_anything_is_mapped(asleep, change):
    data = asleep.checkpoint.read_bytes()
    if change == "longer":
        asleep.checkpoint.write_bytes(data + b"\0")
    elif change == "header":
        flip(asleep.checkpoint, data.index(b"model.0"))
    else:
        asleep.checkpoint.write_bytes(b"\xff" * len(data))

    with pytest.raises((IntegrityError, FormatError), match=r"another model or revision|safetensors\.1"):
        recover(asleep)

    assert not any(asleep.memory.is_mapped(region) for region in asleep.weights)


def test_the_pack_still_brings_it_back_after_a_recovery_failed(asleep):
    flip(asleep.checkpoint, asleep.checkpoint.stat().st_size - 1)
    with pytest.raises(IntegrityError):
        recover(asleep)

    assert asleep.worker.hydrate({})["state"] == "awake"
    assert asleep.is_whole()


def test_what_was_not_recorded_cannot_be_recovered_and_the_reason_is_told(tmp_path):
    worker = Worker(SMALL)
    try:
        told = worker.worker.release(release_request(tmp_path, backend="python"))
        assert told["recovery"]["reason"] == "no copy of the load was seen"
        with pytest.raises(AdmissionError, match="no copy of the load was seen; bring them from the pack"):
            recover(worker)
    finally:
        worker.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"recovery": "off"}, "enabled is false"), ({"model": None}, "no identity"), ({}, "")],
)
def test_a_recovery_manifest_is_written_only_where_it_would_do(tmp_path, changes, reason):
    worker = Worker(SMALL)
    try:
        worker.loaded_from(tmp_path / "model.safetensors")
        told = worker.worker.release(release_request(tmp_path, backend="python", **changes))["recovery"]
    finally:
        worker.close()
    assert reason in told["reason"]
    assert bool(list(tmp_path.rglob("recovery-manifest.json"))) == (not reason) == bool(told["manifest_sha256"])


def test_a_recovery_that_is_required_and_impossible_fails_the_release_and_gives_nothing_away(tmp_path):
    worker = Worker(SMALL)
    try:
        with pytest.raises(AdmissionError, match="could not be recovered from the checkpoint: no copy"):
            worker.worker.release(release_request(tmp_path, backend="python", recovery="required"))
        assert status(worker)["state"] == "awake"
        assert worker.is_whole()
        assert not list(tmp_path.rglob("weights.blob"))
    finally:
        worker.close()


def test_a_recovery_that_fails_anywhere_is_repeated_as_a_whole(tmp_path):
    seen, fail_at = [], [-1]

    def at(point):
        seen.append(point)
        if len(seen) - 1 == fail_at[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    worker = Worker(SMALL, at=at)
    try:
        worker.loaded_from(tmp_path / "model.safetensors")
        worker.worker.release(release_request(tmp_path, backend="python"))
        count, seen[:] = 0, []
        while status(worker)["state"] != "awake":
            fail_at[0], seen[:] = count, []
            try:
                recover(worker, verify_bytes=16)
            except OSError:
                count += 1
                assert status(worker)["state"] == "failed"
        assert worker.is_whole()
        assert worker.is_forgotten()
    finally:
        worker.close()
    expected = {"checkpoint:fill", "checkpoint:plain:fill", "checkpoint:staged:fill", "checkpoint:verify:fill"}
    assert expected | {"residual:fill", "hydrate:commit"} <= set(seen)
    assert count == len(seen)


def test_both_ends_of_every_tensor_are_compared_where_that_is_asked_for(asleep):
    receipt = recover(asleep, verify_bytes=64)["receipts"]["checkpoint"]

    assert receipt["verified_sample_bytes"] == sum(2 * min(64, size) for _, _, size in PLAIN.model)


def test_samples_of_the_model_that_were_not_taken_are_not_compared(asleep):
    with pytest.raises(AdmissionError, match="verify_model_bytes is 64, and 0 bytes at each end were sampled"):
        recover(asleep, verify_model_bytes=64)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=layouts())
def test_any_memory_that_was_loaded_is_recovered(layout: Layout, tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("any")
    worker = Worker(layout)
    try:
        if not layout.model:
            return
        worker.loaded_from(tmp_path / "model.safetensors")
        worker.worker.release(release_request(tmp_path, backend="python", recovery="required"))
        recover(worker)
        assert worker.is_whole()
        assert worker.is_forgotten()
    finally:
        worker.close()
