"""SGLang itself, on a processor: its memory goes and comes back, its door, and what must not end it."""

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from coldsnap.errors import EngineError
from coldsnap.keeper.start import Export, Hydration, WorkerSource
from coldsnap.transfer.samples import draw, search

sys.path.insert(0, str(Path(__file__).parent))
from sglang_server import PROMPT, Server, until  # noqa: E402

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory, sglang_python):
    """One server, for all tests of this module."""
    directory = tmp_path_factory.mktemp("sglang")
    export = Export(
        directory=str(directory / "exported"),
        store=str(directory / "store"),
        capture_id="capture-0",
        backend="python",
        reserve_bytes=0,
    )
    server = Server(directory, sglang_python, orders={"export": export})
    try:
        yield server.await_ready()
    finally:
        server.stop()


@pytest.fixture(scope="module")
def before(server):
    """What it answers before anything happens to it."""
    server.post("/flush_cache")
    return server.answer(), server.checksums()


@pytest.fixture
def asleep(server, before):
    """The server, quiesced and released; awake again afterwards, whatever the test did."""
    server.quiesce()
    resident = server.resident_bytes()
    replies = server.release()
    try:
        yield server, resident, replies
    finally:
        server.hydrate()
        server.ranks.resume()


def same(server, before):
    server.post("/flush_cache")
    return (server.answer(), server.checksums()) == before


def test_the_plugin_is_in_every_process_of_sglang(server):
    replies = server.ranks.ping()
    assert sorted(reply["role"] for reply in replies.values()) == ["api", "detokenizer", "worker"]
    assert {reply["engine"] for reply in replies.values()} == {"sglang"}


def test_the_load_is_seen_to_the_byte(server):
    reply = server.control("loaded", "worker")
    assert reply["copies"] > 30
    assert reply["unsupported"] == {}
    assert reply["loader"] == "DefaultModelLoader"


def test_a_worker_says_what_it_is(server):
    reply = server.control("identity", "worker")
    identity = reply["identity"]
    assert identity["engine"] == "sglang"
    assert identity["architectures"] == ["Qwen3ForCausalLM"]
    assert identity["parallel"] == {"tp": 1, "pp": 1, "dp": 1, "ep": 1, "global_rank": 0, "worker_id": "worker-0"}
    assert identity["device"]["name"] == "cpu"
    assert identity["engine_contract_sha256"].startswith("sha256:")
    assert server.control("identity", "worker") == reply


def test_released_memory_is_gone_and_hydrated_memory_is_the_same(asleep, before):
    server, resident, replies = asleep
    (reply,) = replies.values()
    gone = sum(reply["released"].values())
    assert gone > 15 << 20
    assert resident - server.resident_bytes() > gone * 0.8
    assert reply["pack"]["bytes"] > 5 << 20
    assert reply["kept"] == {}
    assert reply["pack"]["new_bytes"] == 0, "the pack is the one that was exported when the model was loaded"
    assert server.control("memory", "worker")["asleep"] == ["kv_cache", "weights"]
    (awake,) = server.hydrate().values()
    assert awake["state"] == "awake"
    server.ranks.resume()
    assert same(server, before)


def test_a_recovery_from_the_checkpoint_brings_the_same(server, before):
    server.quiesce()
    (reply,) = server.release(model={"model_id": "tiny", "revision": "0" * 40}).values()
    assert reply["recovery"]
    (awake,) = server.hydrate(provider="recovery").values()
    assert awake["state"] == "awake"
    server.ranks.resume()
    assert same(server, before)


def test_no_byte_of_the_checkpoint_is_left_in_memory(asleep, tmp_path):
    server, *_ = asleep
    (pack,) = (server.directory / "store").rglob("*.pack")
    samples = draw(pack, [(0, pack.stat().st_size)], 100, seed="live")
    assert len(samples) == 100
    assert search(server.memory(tmp_path), samples) == ()
    server.hydrate()
    assert len({found.sample for found in search(server.memory(tmp_path), samples)}) == 100


def test_a_resume_without_the_weights_gives_other_tokens_and_checksums(asleep, before):
    server, *_ = asleep
    server.hydrate(tags=["kv_cache"])
    server.ranks.resume()
    assert server.answer() != before[0]
    assert server.checksums() != before[1]
    server.hydrate()
    assert same(server, before)


def test_a_hydrate_that_failed_is_repeated(asleep, before):
    server, *_ = asleep
    path = server.directory / "generation" / "worker-0" / "weights.blob"
    good = path.read_bytes()
    path.write_bytes(good[::-1])
    with pytest.raises(EngineError, match=r"weights\.blob"):
        server.hydrate()
    path.write_bytes(good)
    assert server.control("memory", "worker")["state"] == "failed"
    server.hydrate()
    server.ranks.resume()
    assert same(server, before)


def test_what_a_user_releases_is_kept_on_disk_and_comes_back(server, before):
    for _ in range(2):
        assert server.post("/release_memory_occupation").status_code == 200
    assert server.control("memory", "worker")["state"] == "sleeping"
    assert (server.directory / "runtime" / "live" / "worker-0" / "native-manifest.json").exists()
    assert (server.status("/ready"), server.status("/health")) == (503, 503)
    refused = server.post("/generate", {"text": PROMPT, "sampling_params": {"max_new_tokens": 1}})
    assert refused.status_code == 400
    assert "the memory of this server (kv_cache, weights) was released" in refused.text
    assert server.post("/resume_memory_occupation", {"tags": ["weights"]}).status_code == 200
    assert server.post("/generate", {"text": PROMPT}).status_code == 400
    for _ in range(2):
        assert server.post("/resume_memory_occupation").status_code == 200
    assert server.status("/ready") == 200
    assert same(server, before)


def test_a_resume_without_a_release_does_nothing(server, before):
    assert server.post("/resume_memory_occupation").status_code == 200
    assert server.hydrate()
    assert same(server, before)


def test_a_release_during_a_request_is_refused_and_the_server_goes_on(server):
    answers = []
    running = threading.Thread(target=lambda: answers.append(server.answer(tokens=64)))
    running.start()
    until(lambda: server.control("status", "api")["unfinished"])
    refused = server.post("/release_memory_occupation")
    with pytest.raises(EngineError, match="still has requests"):
        server.release()
    running.join(120)
    assert refused.status_code == 400
    assert "still has requests" in refused.text
    assert len(answers[0]) == 64


def test_a_quiesced_server_says_503_and_answers_what_waited(asleep, before):
    server, *_ = asleep
    assert server.status("/ready") == 503
    assert server.status("/health") == 503
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(server.answer()))
    waiting.start()
    until(lambda: server.control("status", "api")["held"] == 1)
    assert answers == []
    server.hydrate()
    server.ranks.resume()
    waiting.join(120)
    assert answers == [before[0]]
    assert server.status("/ready") == 200


def test_only_the_request_with_the_key_passes_an_admitted_server(server, before):
    server.quiesce()
    server.ranks.admit("0123456789abcdef")
    try:
        assert server.answer(rid="accept-0123456789abcdef") == before[0]
        body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 1}}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/generate", json=body, timeout=0.5)
    finally:
        server.ranks.resume()
    assert server.answer() == before[0]


def test_the_prefix_cache_is_emptied(server, before):
    assert server.answer() == before[0]
    server.ranks.reset_prefix_cache()
    assert same(server, before)


@pytest.mark.slow
def test_a_server_is_started_from_the_pack_without_a_checkpoint_and_updated_from_one(
    server, before, sglang_python, tmp_path
):
    report = server.control("load_report", "worker")
    assert report["task"] == "export"
    model = tmp_path / "tiny"
    shutil.copytree(server.model, model, ignore=shutil.ignore_patterns("*.safetensors"))
    source = WorkerSource(
        worker=report["worker"],
        directory=str(server.directory / "exported" / report["worker"]),
        manifest_sha256=report["manifest_sha256"],
        index_sha256=report["index_sha256"],
        pack=str(next((server.directory / "store").rglob("*.pack"))),
    )
    hydration = Hydration(
        backend="python",
        read_mode="buffered",
        verify_mode="inline",
        verify="full",
        queue_depth=4,
        chunk_bytes=1 << 20,
        workers=(source,),
    )
    orders = {"provider": "native", "hydration": hydration}
    discard = {"COLDSNAP_LIVE_BACKING": "discard"}
    fresh = Server(tmp_path, sglang_python, "--load-format", "coldsnap", model=model, orders=orders, **discard)
    try:
        fresh.await_ready()
        assert fresh.control("load_report", "worker")["provider"] == "native"
        assert (fresh.answer(), fresh.checksums()) == before
        # What SGLang itself discarded is gone, until SGLang itself loads it again.
        fresh.post("/release_memory_occupation")
        fresh.post("/resume_memory_occupation", {"tags": ["weights"]})
        assert fresh.checksums() != before[1]
        update = {"model_path": str(server.model), "load_format": "coldsnap"}
        assert fresh.post("/update_weights_from_disk", update).json()["success"]
        fresh.post("/resume_memory_occupation")
        assert (fresh.answer(), fresh.checksums()) == before
    finally:
        fresh.stop()


def test_a_damaged_directive_ends_a_process_of_sglang(sglang_python, rank_dir):
    (rank_dir / "directive.json").write_text("{}")
    done = subprocess.run(
        [sglang_python, "-m", "sglang.launch_server", "--model-path", "none"],
        env={"COLDSNAP_DIRECTIVE": str(rank_dir / "directive.json"), "SGLANG_USE_CPU_ENGINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 70
    assert "[coldsnap] process" in done.stderr
