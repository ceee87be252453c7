"""A pack that is missing is written again out of the memory of a worker that is awake, or nothing is."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from sleepers import PLAIN, SMALL, Worker, files, only, release_request, status

from coldsnap.artifact.admission import Request, is_bound
from coldsnap.artifact.manifest import NativeManifest, read_document
from coldsnap.artifact.store import Store
from coldsnap.engines.rank import Busy
from coldsnap.errors import AdmissionError, FormatError, IntegrityError

WAIT_S = 30.0


def woken(made, tmp_path):
    """Put a worker to sleep and wake it; return what was written."""
    reply = made.worker.release(release_request(tmp_path, backend="python"))
    made.worker.hydrate({"op": "hydrate"})
    return reply


def request(tmp_path, released, **changes):
    return {
        "op": "materialize",
        "worker": "worker-0",
        "directory": str(tmp_path / "artifact" / "weights" / "worker-0"),
        "manifest_sha256": released["manifest_sha256"],
        "store": str(tmp_path / "again"),
        "wait_s": WAIT_S,
        "reserve_bytes": 0,
        **changes,
    }


def packs(store):
    return sorted(path.name for path in (store / "model-payloads" / "sha256").glob("*.pack"))


def test_the_pack_of_a_worker_that_is_awake_is_the_one_that_it_released(worker, tmp_path):
    released = woken(worker, tmp_path)

    reply = worker.worker.materialize(request(tmp_path, released))

    assert (reply["state"], reply["error"]) == ("ready", "")
    assert (reply["sha256"], reply["new_bytes"]) == (released["pack"]["sha256"], released["pack"]["bytes"])
    first, again = (only(tmp_path / name, "*.pack") for name in ("store", "again"))
    assert first.read_bytes() == again.read_bytes()
    assert again.stat().st_mode & 0o777 == 0o600
    assert status(worker)["materialization"] == reply
    assert worker.is_whole()


def test_the_pack_has_a_record_that_admits_it_without_a_look_at_its_bytes(worker, tmp_path):
    released = woken(worker, tmp_path)
    worker.worker.materialize(request(tmp_path, released))
    manifest = read_document(NativeManifest, only(tmp_path, "native-manifest.json"), sha256=released["manifest_sha256"])
    pack = only(tmp_path / "again", "*.pack")
    assert is_bound(Request(path=str(pack), expected_sha256=manifest.pack.sha256), manifest.index)
    assert Store(tmp_path / "again").find(manifest.index).path == pack


def test_a_pack_that_is_there_is_admitted_and_not_written(worker, tmp_path):
    released = woken(worker, tmp_path)
    before = only(tmp_path / "store", "*.pack").stat()

    reply = worker.worker.materialize(request(tmp_path, released, store=str(tmp_path / "store")))

    assert (reply["state"], reply["new_bytes"]) == ("ready", 0)
    assert only(tmp_path / "store", "*.pack").stat().st_mtime_ns == before.st_mtime_ns


def test_a_spoilt_pack_under_the_name_is_an_error_and_stays(worker, tmp_path):
    released = woken(worker, tmp_path)
    pack = only(tmp_path / "store", "*.pack")
    data = bytearray(pack.read_bytes())
    data[5] ^= 1
    pack.write_bytes(data)

    reply = worker.worker.materialize(request(tmp_path, released, store=str(tmp_path / "store")))

    assert reply["state"] == "failed"
    assert pack.name in reply["error"]
    assert pack.read_bytes() == data


def test_memory_that_holds_other_bytes_leaves_no_trace(worker, tmp_path):
    released = woken(worker, tmp_path)
    worker.memory.copy_from_host(worker.weights[0].address + 70_000, memoryview(b"other"))

    reply = worker.worker.materialize(request(tmp_path, released))

    assert reply["state"] == "failed"
    assert "are not those of the capture" in reply["error"]
    assert not [name for name in files(tmp_path / "again") if not name.endswith(".lock")]


def test_a_manifest_that_is_another_ones_is_refused_before_anything_is_written(worker, tmp_path):
    released = woken(worker, tmp_path)
    for changes, error in (
        ({"manifest_sha256": "sha256:" + "0" * 64}, IntegrityError),
        ({"worker": "worker-1"}, AdmissionError),
        ({"reserve_bytes": 1 << 62}, AdmissionError),
        ({"wait_s": "long"}, FormatError),
    ):
        with pytest.raises(error):
            worker.worker.materialize(request(tmp_path, released, **changes))
    assert not (tmp_path / "again").exists()
    assert status(worker)["materialization"]["state"] == "none"

    other = Worker(SMALL)
    with pytest.raises(AdmissionError, match="does not have the allocations"):
        other.worker.materialize(request(tmp_path, released))
    other.close()


def test_memory_that_sleeps_has_no_bytes_to_write(worker, tmp_path):
    released = worker.worker.release(release_request(tmp_path, backend="python"))
    with pytest.raises(Busy, match="sleeps; wake the engine first"):
        worker.worker.materialize(request(tmp_path, released))


def test_a_generation_without_a_pack_is_refused(worker, tmp_path):
    released = worker.worker.release(release_request(tmp_path, backend="python", export_model_payload=False))
    worker.worker.hydrate({"op": "hydrate"})
    with pytest.raises(AdmissionError, match="has no pack"):
        worker.worker.materialize(request(tmp_path, released))


class Gate:
    """A fault point that holds whoever comes to one place."""

    def __init__(self, place):
        self.place, self.reached, self.open = place, threading.Event(), threading.Event()

    def __call__(self, place):
        if place == self.place:
            self.reached.set()
            assert self.open.wait(WAIT_S)


@pytest.fixture
def held(tmp_path):
    """A worker whose writing stands still at its beginning."""
    gate = Gate("materialize:writing")
    made = Worker(PLAIN, at=gate)
    released = woken(made, tmp_path)
    reply = made.worker.materialize(request(tmp_path, released, wait_s=0.0))
    assert reply["state"] in ("scheduled", "writing")
    assert gate.reached.wait(WAIT_S)
    yield made, gate, released
    gate.open.set()
    made.worker.settle()
    made.close()


def test_who_asks_does_not_wait_and_the_state_says_how_it_is_going(held, tmp_path):
    made, gate, released = held
    assert status(made)["materialization"]["state"] == "writing"
    again = made.worker.materialize(request(tmp_path, released, wait_s=0.0))
    assert again["state"] == "writing"
    with pytest.raises(Busy, match="is being written already"):
        made.worker.materialize(request(tmp_path, released, store=str(tmp_path / "third")))

    gate.open.set()

    assert made.worker.materialize(request(tmp_path, released))["state"] == "ready"


def test_a_release_waits_for_the_end_of_the_writing(held, tmp_path):
    made, gate, _ = held
    releasing = threading.Thread(target=made.worker.release, args=(release_request(tmp_path, backend="python"),))
    releasing.start()
    releasing.join(0.2)
    assert releasing.is_alive()
    assert all(made.memory.is_mapped(region) for region in made.weights)

    gate.open.set()
    releasing.join(WAIT_S)

    assert status(made)["state"] == "sleeping"
    assert len(packs(tmp_path / "again")) == 1


def test_of_two_workers_with_one_pack_one_writes_and_the_other_finds_it(held, tmp_path):
    made, gate, released = held
    other = Worker(PLAIN, at=lambda _: None)
    # The same bytes at other addresses are another generation of the same pack.
    mine = other.worker.release(release_request(tmp_path / "other", backend="python", store=str(tmp_path / "store")))
    other.worker.hydrate({"op": "hydrate"})
    asked = request(tmp_path / "other", mine, store=str(tmp_path / "again"), wait_s=0.0)
    assert other.worker.materialize(asked)["state"] == "scheduled"

    gate.open.set()

    assert made.worker.materialize(request(tmp_path, released))["new_bytes"] == released["pack"]["bytes"]
    assert other.worker.materialize({**asked, "wait_s": WAIT_S})["new_bytes"] == 0
    assert len(packs(tmp_path / "again")) == 1
    other.close()


@pytest.mark.parametrize("place", ["materialize:writing", "materialize:verifying", "rename"])
def test_a_writer_that_is_killed_leaves_nothing_under_the_final_name(place, tmp_path):
    script = f"""
import os, signal, sys
sys.path[:0] = [{str(Path(__file__).parent)!r}]
from pathlib import Path
from sleepers import PLAIN, Worker
from test_materialize import request, woken
armed = []
def at(point):
    if armed and ({place!r} in point and ("materialize" in point or ".pack:" in point)):
        os.kill(os.getpid(), signal.SIGKILL)
made = Worker(PLAIN, at=at)
home = Path({str(tmp_path)!r})
released = woken(made, home)
armed.append(True)
made.worker.materialize(request(home, released))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr

    assert packs(tmp_path / "again") == []


def test_the_writing_leaves_the_processor_to_the_engine(tmp_path):
    seen = {}

    def at(place):
        if place == "materialize:writing":
            seen["nice"] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    made = Worker(PLAIN, at=at)
    made.worker.materialize(request(tmp_path, woken(made, tmp_path)))
    assert seen["nice"] >= 10 > os.getpriority(os.PRIO_PROCESS, 0)
    made.close()


def test_no_thread_is_left_when_the_writing_has_ended(tmp_path):
    made = Worker(PLAIN)
    released = woken(made, tmp_path)
    made.worker.materialize(request(tmp_path, released))
    deadline = time.monotonic() + WAIT_S
    while any(thread.name.startswith("coldsnap-") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    made.close()
