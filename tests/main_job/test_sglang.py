"""Real SGLang, captured and restored: weights in the image, out of packs and out of the checkpoint, one rank and two.

The one rule: every comparison is of token ids and of SGLang's own checksums of its weights, each with what the same
server said before its capture.
"""

import contextlib
import http.client
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import coldsnap as cs
from coldsnap.transfer.samples import draw, search

sys.path.insert(0, str(Path(__file__).parents[1] / "execute"))
from lab import kill_rank, until

pytestmark = [pytest.mark.sglang, pytest.mark.criu, pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS = ("You may convey verbatim copies of the", "The capital of France is")
MAKER = Path(__file__).parents[2] / "examples" / "make_tiny_model.py"
ARGS = (
    *("--attention-backend", "torch_native", "--max-total-tokens", "2048", "--mem-fraction-static", "0.1"),
    *("--context-length", "512", "--sleep-on-idle"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    subprocess.run([sys.executable, str(MAKER), str(path)], check=True, stdout=subprocess.DEVNULL)
    return path


@pytest.fixture
def run(criu):
    """Resolve an operation with facts of this moment, and execute it."""

    def run(operation, **policy):
        plan = cs.resolve(cs.Policy().evolve(**policy), operation, cs.probe(criu=criu))
        return cs.execute(plan, on_event=cs.progress(file=sys.stdout))

    return run


def post(engine, path, body, *, timeout_s=120):
    """Return status and body of an answer; the connection is closed by the server."""
    connection = http.client.HTTPConnection(engine.endpoint.host, engine.endpoint.port, timeout=timeout_s)
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read()


def get(engine, path, *, timeout_s=120):
    """Return the status of a path."""
    connection = http.client.HTTPConnection(engine.endpoint.host, engine.endpoint.port, timeout=timeout_s)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={"Connection": "close"})
        return connection.getresponse().status


def said(engine):
    """Return what a server answers to each prompt, and the checksum of its weights."""
    assert post(engine, "/flush_cache", {})[0] == 200
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    answers = [post(engine, "/generate", {"text": text, "sampling_params": sampling}) for text in PROMPTS]
    assert [status for status, _ in answers] == [200] * len(PROMPTS)
    status, checked = post(engine, "/weights_checker", {"action": "checksum"})
    assert status == 200, checked
    told = json.loads(checked)
    return [json.loads(body)["output_ids"] for _, body in answers], told["per_engine_checksum"]


def restored(run, artifact, port, expected, *, times=1, **policy):
    """Restore several times, one after the other, and hold each against what was said before; return the last."""
    for _ in range(times):
        report = run(cs.Restore(artifact, placement=cs.local(port=port)), **policy)
        with report.serving as engine:
            assert get(engine, "/ready") == 200
            assert said(engine) == expected
            assert 0 < report.answer_s <= report.timeline.seconds
    return report


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_comes_back_with_its_weights_in_the_image_out_of_packs_and_out_of_the_checkpoint(
    ranks, model, sglang_python, tmp_path, free_ports, run
):
    first, second = free_ports(2)
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * ranks)}  # one NUMA node for all of them
    spec = cs.SGLang(model, args=(*ARGS, "--enable-memory-saver", "--tp", str(ranks)), python=sglang_python, env=env)
    began_s = time.monotonic()
    launched = run(cs.Launch(spec, placement=cs.local(port=first)), **{"weights.mode": "native"})
    cold_s = time.monotonic() - began_s
    with launched.engine as original:
        expected = said(original)
        image = run(cs.Capture(original, output=tmp_path / "image", then="keep"), **{"weights.mode": "image"})
        assert image.workload == "the engine serves on"
        within = cs.Artifact.open(tmp_path / "image")
        restored(run, within, second, expected, times=1)  # beside the living original
        assert said(original) == expected
        native = run(cs.Capture(original, output=tmp_path / "native"))
    assert native.workload == "the engine was stopped after the commit"

    outside = cs.Artifact.open(tmp_path / "native")
    assert (within.descriptor.weights.kind, outside.descriptor.weights.kind) == ("image", "packs")
    assert [len(one.descriptor.topology.workers) for one in (within, outside)] == [ranks, ranks]
    assert outside.size_bytes["images"] < within.size_bytes["images"] - (5 << 20)
    assert not found_in(outside.path, model)
    assert found_in(within.path, model), "the search would find what is there"

    restored(run, within, first, expected, times=2)
    restored(run, outside, second, expected, times=2)
    recovered_from_the_checkpoint(run, outside, second, expected)
    another_checkpoint_is_refused_by_name(run, outside, second, model)
    report = run(cs.Restore(outside, placement=cs.local(port=first)))
    print(f"cold start {cold_s:.2f} s, restore to the first token {report.answer_s:.2f} s")
    with report.serving as engine:
        assert said(engine) == expected
        a_dead_scheduler_ends_everything_with_its_name(engine, tmp_path, run)


def recovered_from_the_checkpoint(run, artifact, port, expected):
    """Restore in each of the three ways that lead to the checkpoint; the pack is looked at in none of them."""
    copied = sum(copies_of(artifact))
    asked = restored(run, artifact, port, expected, **{"weights.mode": "recovery"})
    assert asked.receipt("admit-packs").reason.startswith("no pack was looked at; 2 files of the checkpoint")
    with away(artifact.path.parent / "store") as packs:
        assert packs
        reports = [restored(run, artifact, port, expected, **{"weights.mode": way}) for way in WAYS]
    for report in reports:
        assert report.receipt("admit-packs").effective == "recovery"
        assert "is not in the store" in report.receipt("admit-packs").reason
    for report in (asked, *reports):
        details = report.receipt("hydrate").details
        assert (details["checkpoint_bytes"], details["pack_bytes"]) == (copied, 0)


WAYS = ("auto", "cache-only-auto")


def copies_of(artifact):
    """Return, of each worker, the bytes that its load copied."""
    for worker in artifact.descriptor.weights.workers:
        manifest = json.loads((artifact.path / worker.native_manifest.path).read_text())
        yield sum(extent["size"] for extent in manifest["model_extents"])


@contextlib.contextmanager
def away(store):
    """Hide every pack of a store."""
    packs = sorted(store.rglob("*.pack"))
    for pack in packs:
        pack.rename(pack.with_suffix(".away"))
    try:
        yield packs
    finally:
        for pack in packs:
            pack.with_suffix(".away").rename(pack)


def another_checkpoint_is_refused_by_name(run, artifact, port, model):
    """Spoil the checkpoint in three ways, one after the other; each is an IntegrityError that names what it found."""
    path = min(model.glob("*.safetensors"))
    data = path.read_bytes()
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    ways = {
        "is not the one that was loaded at capture": lambda: path.write_bytes(flipped),
        "another model or revision": lambda: path.write_bytes(data + bytes(4096)),
        "a file of the checkpoint is missing": path.unlink,
    }
    for told, spoil in ways.items():
        spoil()
        try:
            with pytest.raises(cs.errors.ColdSnapError, match=told) as refused:
                run(cs.Restore(artifact, placement=cs.local(port=port)), **{"weights.mode": "recovery"})
        finally:
            path.write_bytes(data)
        assert "answer" not in [receipt.step for receipt in refused.value.report.receipts]


def found_in(artifact, model):
    """Return which of 100 samples of a checkpoint are in the process images of an artifact."""
    samples = []
    for path in sorted(model.glob("*.safetensors")):
        head = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        samples += draw(path, [(head, path.stat().st_size - head)], 50, seed=0)
    assert len(samples) == 100
    return search(sorted(artifact.rglob("pages-*.img")), samples)


def workers(engine):
    """Return the control sockets of the schedulers."""
    return sorted(path.name for path in (Path(engine.run_dir) / "rank" / "control").glob("worker.*"))


def a_dead_scheduler_ends_everything_with_its_name(engine, tmp_path, run):
    pid = kill_rank(engine.run_dir, workers(engine)[0])

    with pytest.raises(cs.ColdSnapError, match=rf"worker \(pid {pid}\) has died|ended"):
        run(cs.Capture(engine, output=tmp_path / "after"))
    assert not (tmp_path / "after").exists()
    assert until(lambda: engine.status().state != "running", "the end of a server without its scheduler")
