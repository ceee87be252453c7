"""A worker's memory goes to sleep and comes back: every byte, at the same address, whoever moves it."""

import array
import mmap
import os

import pytest
from hypothesis import HealthCheck, given, settings
from sleepers import PLAIN, Layout, Worker, layouts, release_request

from coldsnap.artifact.extents import prove
from coldsnap.artifact.manifest import HibernateState, NativeManifest, RecoveryManifest, decode
from coldsnap.engines.rank import Rank


def resident_bytes(region) -> int:
    """What the kernel has behind the range: bit 63 of an entry of /proc/self/pagemap says that a page is present."""
    pages = region.mapped_bytes // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        entries = array.array("Q", os.pread(pagemap.fileno(), 8 * pages, 8 * (region.address // mmap.PAGESIZE)))
    return sum(entry >> 63 for entry in entries) * mmap.PAGESIZE


def document(cls, path):
    return decode(cls, path.read_bytes(), path=str(path))


def test_what_is_released_comes_back_byte_for_byte(worker, transfer, tmp_path):
    released = worker.worker.release(release_request(tmp_path, **transfer))
    assert released["state"] == "sleeping"

    woken = worker.worker.hydrate({"op": "hydrate", "backend": transfer["backend"]})

    assert woken["state"] == "awake"
    assert woken["mapped"] == len(worker.weights) + len(worker.kv_cache)
    assert worker.is_whole()
    assert worker.is_forgotten()


def test_a_release_gives_the_backing_away(worker, tmp_path):
    regions = [*worker.weights, *worker.kv_cache]
    assert [resident_bytes(region) for region in regions] == [region.mapped_bytes for region in regions]

    worker.worker.release(release_request(tmp_path, backend="python"))

    assert [resident_bytes(region) for region in regions] == [0] * len(regions)
    assert not any(worker.memory.is_mapped(region) for region in regions)


def test_a_generation_of_another_process_is_named_completely(worker, transfer, tmp_path):
    released = worker.worker.release(release_request(tmp_path, **transfer))
    elsewhere = tmp_path / "copied"
    os.rename(tmp_path / "artifact" / "weights" / "worker-0", elsewhere)

    woken = worker.worker.hydrate(
        {
            "op": "hydrate",
            "directory": str(elsewhere),
            "pack": str(pack_of(tmp_path, released)),
            "manifest_sha256": released["manifest_sha256"],
            **transfer,
        }
    )

    assert worker.is_whole()
    assert woken["bytes"]["pack"] + woken["bytes"]["residual"] == sum(PLAIN.weights)
    assert set(woken["receipts"]) == {"pack", "residual"}
    assert woken["receipt"]["requested"] == transfer["backend"]


def pack_of(tmp_path, released):
    return tmp_path / "store" / "model-payloads" / "sha256" / f"{released['pack']['sha256'][7:]}.pack"


def test_the_files_of_a_generation_are_those_of_the_format(worker, tmp_path):
    worker.loaded_from(tmp_path / "model.safetensors")
    released = worker.worker.release(release_request(tmp_path, backend="python"))

    directory = tmp_path / "artifact" / "weights" / "worker-0"
    native = document(NativeManifest, directory / "native-manifest.json")
    recovery = document(RecoveryManifest, directory / "recovery-manifest.json")
    state = document(HibernateState, directory / "hibernate-state.json")
    assert sorted(path.name for path in directory.iterdir()) == [
        "hibernate-state.json",
        "native-manifest.json",
        "recovery-manifest.json",
        "weights.blob",
    ]
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
    recovery.require_same_memory(native)
    assert str(native.prove()) == released["coverage"]
    assert native.pack.sha256 == released["pack"]["sha256"]
    assert native.residual.bytes == (directory / "weights.blob").stat().st_size
    assert (state.worker, state.generation) == ("worker-0", released["generation"])
    assert state.discarded == released["discarded"] == {"kv_cache": (1 << 20) + 8192}


def test_without_a_pack_the_residual_holds_everything(worker, transfer, tmp_path):
    released = worker.worker.release(release_request(tmp_path, export_model_payload=False, **transfer))

    assert released["pack"] is None
    assert not (tmp_path / "store").exists()
    native = document(NativeManifest, tmp_path / "artifact" / "weights" / "worker-0" / "native-manifest.json")
    assert prove(native.allocations, [one.extent for one in native.residual_extents]).bytes == sum(PLAIN.weights)
    woken = worker.worker.hydrate({"op": "hydrate", "backend": transfer["backend"]})
    assert woken["bytes"]["pack"] == 0
    assert worker.is_whole()


def test_a_load_of_which_nothing_was_seen_has_no_pack(tmp_path):
    worker = Worker(Layout(weights=(9000,), model=()))

    released = worker.worker.release(release_request(tmp_path, backend="python", model=None))
    worker.worker.hydrate({"op": "hydrate"})

    assert released["pack"] is None
    assert not (tmp_path / "artifact" / "weights" / "worker-0" / "recovery-manifest.json").exists()
    assert worker.is_whole()
    worker.close()


def test_a_model_that_fills_its_memory_leaves_an_empty_residual(transfer, tmp_path):
    worker = Worker(Layout(weights=(8192,), model=((0, 0, 8192),)))

    released = worker.worker.release(release_request(tmp_path, **transfer))
    worker.worker.hydrate({"op": "hydrate", "backend": transfer["backend"]})

    assert released["residual"]["bytes"] == 0
    assert worker.is_whole()
    worker.close()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=layouts())
def test_any_layout_comes_back(layout, native_library, tmp_path_factory):
    for backend in ("python", "auto"):
        tmp_path = tmp_path_factory.mktemp("generation")
        worker = Worker(layout)
        try:
            request = release_request(tmp_path, backend=backend, native_library=native_library)
            worker.worker.release(request)
            worker.worker.hydrate({"op": "hydrate", "backend": backend})
            assert worker.is_whole()
            assert worker.is_forgotten()
        finally:
            worker.close()


def test_a_rank_answers_for_its_memory(worker, rank_dir, tmp_path):
    path = str(rank_dir / "directive.json")
    rank = Rank("worker", path, engine="test", versions={}, operations=worker.worker.operations())

    released = rank.answer(release_request(tmp_path, backend="python"))
    status = rank.answer({"op": "memory"})
    woken = rank.answer({"op": "hydrate"})

    assert (released["ok"], status["state"], woken["ok"]) == (True, "sleeping", True)
    assert status["regions"]["weights"] == {"bytes": sum(PLAIN.weights), "mapped_bytes": 0}
    assert rank.answer({"op": "hydrate", "tasg": []})["kind"] == "format"


@pytest.mark.parametrize("op", ["release", "hydrate", "memory"])
def test_a_rank_without_memory_skips(op, rank_dir):
    rank = Rank("api", str(rank_dir / "directive.json"), engine="test", versions={})

    assert rank.answer({"op": op}) == {"ok": True, "skipped": True}
