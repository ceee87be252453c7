"""``SGLang`` as data: what it refuses, what it launches, how it is asked."""

import json
import pickle
import shlex
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from coldsnap.artifact import record
from coldsnap.engines.acceptance import Answer, Question
from coldsnap.engines.base import Engine, StartsFromPacks
from coldsnap.engines.environment import EngineEnvironment
from coldsnap.engines.sglang import SGLang
from coldsnap.engines.sglang.arguments import ARGUMENTS, ENVIRONMENT
from coldsnap.engines.specs import spec_from_text, spec_to_text
from coldsnap.engines.start_files import start_files
from coldsnap.errors import AdmissionError, EngineError, UnsupportedError
from coldsnap.keeper.directive import Endpoint

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from make_tiny_model import make_tiny_model  # noqa: E402

ENDPOINT = Endpoint(host="127.0.0.1", port=8000)
REVISION = "0123456789abcdef0123456789abcdef01234567"


def spec(**changes):
    return SGLang("/models/tiny", python="/opt/sglang/bin/python", **changes)


def launch(engine=None, *, environ=None, gpu=False):
    return (engine or spec()).launch_command(ENDPOINT, environ=environ or {}, gpu=gpu)


def environment(package):
    return EngineEnvironment(
        executable="/opt/sglang/bin/python",
        python_version="3.12.3",
        python_abi="cpython-312",
        versions={"sglang": "0.0.0"},
        packages={"sglang": str(package)},
        coldsnap_digest="sha256:0",
        entry_points=(),
        sites=(),
    )


def test_a_specification_is_an_engine_and_survives_pickling_records_and_text():
    engine = spec(args=("--dtype", "bfloat16"), env={"A": "b"})
    assert isinstance(engine, Engine)
    assert pickle.loads(pickle.dumps(engine)) == engine
    assert record.read(SGLang, record.write(engine), path="spec") == engine
    assert spec_from_text(spec_to_text(engine)) == engine


def test_on_a_processor_the_device_is_named_and_the_users_is_kept():
    command = launch(spec(args=("--context-length", "512"), served_model_name="tiny"))
    assert shlex.join(command.argv) == (
        "/opt/sglang/bin/python -m sglang.launch_server --model-path /models/tiny --served-model-name tiny "
        "--host 127.0.0.1 --port 8000 --device cpu --context-length 512"
    )
    assert command.env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert launch(spec(args=("--device", "cpu"))).argv.count("--device") == 1


def test_a_model_of_the_hub_is_launched_at_its_revision():
    engine = SGLang("Qwen/Qwen3-0.6B", revision=REVISION)
    assert f"--model-path Qwen/Qwen3-0.6B --revision {REVISION}" in shlex.join(launch(engine).argv)


def test_a_template_starts_with_start_files_under_the_name_that_its_model_had():
    engine = SGLang("Qwen/Qwen3-0.6B", revision=REVISION, args=("--load-format", "safetensors"))
    assert isinstance(engine, StartsFromPacks)
    assert engine.exports
    placed = shlex.join(engine.with_start_files(launch(engine).argv, "/dev/shm/coldsnap/model"))
    assert "--model-path /dev/shm/coldsnap/model --host" in placed
    assert placed.endswith("--load-format safetensors --served-model-name Qwen/Qwen3-0.6B")
    assert "--revision" not in placed

    named = spec(served_model_name="tiny")
    assert shlex.join(named.with_start_files(launch(named).argv, "/m")).count("--served-model-name") == 1


def test_its_start_files_are_those_of_the_model_and_its_checkpoint_is_the_directory(tmp_path):
    make_tiny_model(tmp_path / "tiny")
    engine = SGLang(tmp_path / "tiny")
    assert engine.checkpoint({}) == str(tmp_path / "tiny")
    assert engine.start_files({}) == start_files(tmp_path / "tiny")


def test_where_weights_may_leave_the_memory_saver_is_asked_for_once():
    releasing = {"COLDSNAP_EXPORT_MODEL_PAYLOAD": "1"}
    assert "--enable-memory-saver" not in launch().argv
    assert "--enable-memory-saver" in launch(environ=releasing, gpu=True).argv
    asked = spec(args=("--enable-memory-saver",))
    assert launch(asked, environ=releasing).argv.count("--enable-memory-saver") == 1


def test_weights_can_leave_a_gpu_always_and_a_processor_where_the_saver_was_asked_for():
    assert spec().memory_provider(gpu=True) == "cuda"
    assert spec().memory_provider() is None
    assert spec(args=("--enable-memory-saver",)).memory_provider() == "host"


def test_several_gpus_are_reduced_over_without_shared_handles():
    assert "--disable-custom-all-reduce" in launch(spec(args=("--tp", "2")), gpu=True).argv
    assert "--disable-custom-all-reduce" not in launch(spec(args=("--tp", "2"))).argv
    assert "--disable-custom-all-reduce" not in launch(gpu=True).argv


def test_the_environment_is_offline_stays_on_this_host_and_loads_the_plugin():
    env = launch(spec(env={"SGLANG_PLUGINS": "mine"}), environ={"HF_TOKEN": "secret", "PATH": "/bin"}).env
    assert env["SGLANG_PLUGINS"] == "mine,coldsnap"
    assert env["HF_HUB_OFFLINE"] == env["TRANSFORMERS_OFFLINE"] == "1"
    assert env["SGLANG_HOST_IP"] == "127.0.0.1"
    assert env["COLDSNAP_LIVE_BACKING"] == "discard"
    assert env["PATH"] == "/bin"
    assert "HF_TOKEN" not in env
    assert "SGLANG_USE_CPU_ENGINE" not in launch(gpu=True).env
    assert launch(gpu=True).env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:False"


def test_names_of_this_library_in_env_are_refused():
    with pytest.raises(AdmissionError, match="COLDSNAP_DIRECTIVE"):
        launch(spec(env={"COLDSNAP_DIRECTIVE": "/tmp/mine"}))


@pytest.mark.parametrize(
    "args",
    [
        "--model-path x",
        "--port 1",
        "--dp 2",
        "--dp-size=2",
        "--pp-size 2",
        "--nnodes 2",
        "--api-key k",
        "--admin-api-k k",
        "--ssl-certfile c",
        "--speculative-algorithm EAGLE",
        "--quantization fp8",
        "--enable-weights-cpu-backup",
        "--weight-cache-mode client",
        "--disaggregation-mode prefill",
        "--tokenizer_worker_num 2",
        "--lora-paths a",
        "--config f",
    ],
)
def test_what_cannot_be_captured_is_refused_by_name(args):
    (refusal,) = spec(args=args.split()).refusals()
    assert isinstance(refusal, UnsupportedError)
    assert args.split()[0].partition("=")[0].replace("_", "-") in str(refusal)
    assert refusal.field == "SGLang.args"
    assert refusal.works


@pytest.mark.parametrize(
    "args",
    [
        "--tp 2",
        "--tp-size 2",
        "--dp-size 1",
        "--nnodes 1",
        "--random-seed 3",
        "--disaggregation-mode null",
        "--mem-fraction-static 0.1",
        "--quantization None",
        "--enable-memory-saver",
    ],
)
def test_everything_else_reaches_sglang_unchanged(args):
    engine = spec(args=args.split())
    assert engine.refusals() == ()
    assert shlex.join(launch(engine).argv).endswith(args)


def test_the_environment_is_held_to_limits():
    names = [refusal.field for refusal in spec(env={"HF_TOKEN": "x", "HF_HUB_OFFLINE": "0"}).refusals()]
    assert names == ["SGLang.env", "SGLang.env"]


def test_every_limit_has_a_reason_and_a_way_out():
    for limit in (*ARGUMENTS.rows, *ENVIRONMENT.rows):
        assert limit.why
        assert limit.works


def test_ranks_are_counted_from_the_arguments_and_the_release():
    assert spec().roles() == {"api": 1, "worker": 1, "detokenizer": 1}
    assert spec(args=("--tensor-parallel-size", "2")).roles() == {"api": 1, "worker": 2, "detokenizer": 1}
    with pytest.raises(AdmissionError, match="must be a positive number"):
        spec(args=("--tp", "two")).roles()


@pytest.mark.parametrize(("route", "expected"), [('@app.get("/ready")', "/ready"), ('@app.get("/health")', None)])
def test_readiness_is_asked_where_the_release_tells_it_without_generating(tmp_path, route, expected):
    (tmp_path / "srt" / "entrypoints").mkdir(parents=True)
    (tmp_path / "srt" / "entrypoints" / "http_server.py").write_text(f"{route}\nasync def route(): ...\n")

    assert spec().ready_path(environment(tmp_path), closed=False) == expected
    assert spec().ready_path(environment(tmp_path), closed=True) is None


def test_eager_disables_graphs_and_a_seed_of_the_user_is_seen():
    assert spec().eager().args == ("--disable-cuda-graph",)
    assert spec().eager().eager() == spec().eager()
    assert spec(args=("--random-seed", "3")).user_seeded
    assert not spec().user_seeded


class Server(BaseHTTPRequestHandler):
    events: tuple = ()
    asked: list

    def do_POST(self):
        self.asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
        self.send_response(200)
        self.end_headers()
        for event in self.events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *args):
        pass


@pytest.fixture
def served():
    kind = type("Kind", (Server,), {"asked": []})
    with HTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield kind, Endpoint(host="127.0.0.1", port=server.server_port)
        server.shutdown()
        thread.join()


def event(text, ids, count):
    return {"text": text, "output_ids": ids, "meta_info": {"completion_tokens": count}}


@pytest.mark.parametrize(
    "events",
    [
        [event("a", [5], 1), event("ab", [5, 6], 2), event("abc", [5, 6, 7], 3)],
        [event("a", [5], 1), event("b", [6], 2), event("c", [7], 3)],
    ],
    ids=["events-repeat", "events-add"],
)
def test_an_answer_is_read_whether_events_repeat_or_add(served, events):
    kind, endpoint = served
    kind.events = events

    answer = spec().ask(endpoint, Question(prompt="Hello", max_tokens=3), timeout_s=10, request_id="a" * 32)

    assert answer == Answer(token_ids=(5, 6, 7), text="abc")
    ((path, body),) = kind.asked
    assert path == "/generate"
    assert body["rid"] == "a" * 32
    assert body["sampling_params"] == {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}


@pytest.mark.parametrize(
    ("events", "message"),
    [([{"error": {"message": "out of memory"}}], "out of memory"), ([event("a", [5], 1)], "expected 3 token ids")],
)
def test_an_answer_that_breaks_off_is_an_error(served, events, message):
    kind, endpoint = served
    kind.events = events

    with pytest.raises(EngineError, match=message):
        spec().ask(endpoint, Question(prompt="Hello", max_tokens=3), timeout_s=10)
