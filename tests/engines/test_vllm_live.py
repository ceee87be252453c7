"""vLLM itself: the plugin in each of its processes, the door of its front end, its answers; and a vLLM of others."""

import subprocess
import sys
import textwrap
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from coldsnap.engines.acceptance import Question, compare
from coldsnap.engines.control import Ranks
from coldsnap.engines.endpoint import await_ready, stream
from coldsnap.engines.settings import inherited_environment
from coldsnap.engines.vllm import VLLM
from coldsnap.errors import EngineError
from coldsnap.keeper.client import Keeper
from coldsnap.keeper.control import request_control
from coldsnap.keeper.directive import Directive, Endpoint, read_acks, write_directive
from coldsnap.keeper.undo import KILL
from coldsnap.transfer.safetensors import index

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from make_tiny_model import make_tiny_model  # noqa: E402

pytestmark = [pytest.mark.vllm]

QUESTION = Question(prompt="Reply with exactly: coldsnap")
ARGS = ("--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "4", "--num-gpu-blocks-override", "64")


def environment():
    return {name: value for name, value in inherited_environment().items() if name != "PYTHONPATH"}


class Server:
    def __init__(self, spec, keeper, endpoint):
        self.spec, self.keeper, self.endpoint = spec, keeper, endpoint
        self.ranks = Ranks(keeper.rank_dir)

    def ask(self, **more):
        return self.spec.ask(self.endpoint, QUESTION, timeout_s=60, **more)

    def stream(self, **body):
        body = {"model": "tiny", "prompt": "the", "ignore_eos": True, "return_token_ids": True, "stream": True, **body}
        for _, event in stream(self.endpoint, "/v1/completions", body, timeout_s=120):
            for choice in event["choices"]:
                yield from choice.get("token_ids") or ()

    def direct(self, directive=None):
        directive = directive or Directive.new(operation="restore", endpoint=self.endpoint)
        write_directive(self.keeper.rank_dir, directive)
        return directive


class Long(threading.Thread):
    """A completion of 400 tokens; ``begun`` once its first is there."""

    def __init__(self, server):
        super().__init__()
        self.server, self.begun, self.tokens = server, threading.Event(), []
        self.start()

    def run(self):
        for token in self.server.stream(max_tokens=400, temperature=0):
            self.tokens.append(token)
            self.begun.set()


@pytest.fixture(scope="module")
def server(tmp_path_factory, engine_python):
    """One vLLM under a real keeper, for all tests of this module."""
    directory = tmp_path_factory.mktemp("vllm")
    model = make_tiny_model(directory / "tiny")
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CACHE_ROOT": str(directory / "cache")}
    spec = VLLM(model, python=engine_python, args=(*ARGS, "--enforce-eager"), env=env, served_model_name="tiny")
    spec.admit(spec.inspect(environment()))
    with ExitStack() as stack:
        endpoint = Endpoint(host="127.0.0.1", port=free())
        keeper = stack.enter_context(Keeper.start(directory / "run"))
        stack.callback(stop, keeper)
        with keeper.operation("launch", [KILL]):
            write_directive(keeper.rank_dir, Directive.new(operation="launch", endpoint=endpoint))
            command = spec.launch_command(endpoint, environ=environment())
            env = {**command.env, "COLDSNAP_EXPORT_MODEL_PAYLOAD": "1"}  # as for a capture that takes weights out
            keeper.spawn_engine(command.argv, env=env, cwd=command.cwd)
            await_ready(endpoint, timeout_s=240, ended=lambda: ended(keeper), log=keeper.log_path)
        yield Server(spec, keeper, endpoint)


def free():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ended(keeper):
    status = keeper.status()
    return None if status.state == "running" else f"{status.state} ({status.exit})"


def stop(keeper):
    with suppress(EngineError):
        keeper.stop(grace_s=10)


def until(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.005)


def test_the_plugin_is_in_every_process_of_vllm(server):
    ranks = server.ranks.require(server.spec.roles())
    assert [rank.role for rank in ranks] == ["api", "engine", "worker"]
    replies = server.ranks.ping()
    assert {reply["engine"] for reply in replies.values()} == {"vllm"}
    assert {reply["pid"] for reply in replies.values()} <= {process.pid for process in server.keeper.tree()}
    assert len({reply["incarnation"] for reply in replies.values()}) == 1


def test_the_worker_tells_what_its_load_wrote_and_why_the_rest_is_residual(server):
    replies = request_control(server.keeper.rank_dir, "loaded", timeout_s=30)
    loaded = {name.split(".")[0]: reply for name, reply in replies.items()}
    assert loaded["api"]["skipped"] and loaded["engine"]["skipped"]
    found = loaded["worker"]
    stored = index(Path(server.spec.model).glob("*.safetensors"))
    assert (found["copies"], found["loader"]) == (len(stored), "DefaultModelLoader")
    assert found["bytes"] + sum(found["kept"].values()) == sum(one.length for one in stored.values())
    # On a CPU with AVX-512 vLLM packs weights of linear layers anew after the load; on others they stay as they are.
    assert set(found["unsupported"]) <= {"replaced-after-load"} and found["bytes"]


def test_the_worker_tells_the_digest_of_every_parameter_and_buffer(server):
    (digests,) = server.ranks.digests(timeout_s=60).values()

    assert digests["model.embed_tokens.weight"] != digests["lm_head.weight"]
    assert {name.rpartition(".")[2] for name in digests} >= {"weight", "cos_sin_cache"}
    assert all(len(one) == 64 for one in digests.values())


def test_the_answer_repeats_on_an_emptied_prefix_cache(server):
    first = server.ask()
    assert len(set(first.token_ids)) > 4 and 0 < first.first_token_s <= first.seconds
    server.ranks.reset_prefix_cache()
    compare(first, server.ask())


def test_a_quiesce_waits_for_the_stream_and_holds_what_comes_later(server):
    answer = server.ask()
    first = Long(server)
    assert first.begun.wait(60)
    server.ranks.quiesce(timeout_s=120)
    assert {"unfinished": 0, "held": 0, "quiesced": True}.items() <= server.ranks.status().items()
    first.join(5)
    assert len(first.tokens) == 400
    late = Long(server)
    until(lambda: server.ranks.status()["held"] == 1)
    assert not late.begun.is_set()
    server.ranks.quiesce(timeout_s=5)  # once more is harmless
    server.ranks.resume()
    server.ranks.resume()
    late.join(120)
    assert late.tokens == first.tokens
    compare(answer, server.ask())


def test_only_the_request_with_the_key_passes_an_admitted_engine(server):
    answer = server.ask()
    server.ranks.quiesce(timeout_s=60)
    server.ranks.admit("k" * 32)
    stranger = Long(server)
    until(lambda: server.ranks.status()["held"])
    compare(answer, server.ask(request_id="k" * 32))
    assert not stranger.begun.is_set()
    server.ranks.resume()
    stranger.join(60)
    assert len(stranger.tokens) == 400


def test_a_quiesce_that_takes_too_long_leaves_the_engine_serving(server):
    first = Long(server)
    assert first.begun.wait(60)
    with pytest.raises(EngineError, match="1 requests still ran after 0.05 s; the engine serves on"):
        server.ranks.quiesce(timeout_s=0.05)
    with pytest.raises(EngineError, match="prefix cache is in use"):
        server.ranks.reset_prefix_cache()
    first.join(120)
    assert len(first.tokens) == 400 and server.ranks.status()["open"]


def test_a_resume_overtakes_a_quiesce(server):
    first = Long(server)
    assert first.begun.wait(60)
    failures = []

    def quiesce():
        try:
            server.ranks.quiesce(timeout_s=120)
        except EngineError as error:
            failures.append(str(error))

    thread = threading.Thread(target=quiesce)
    thread.start()
    until(lambda: not server.ranks.status()["open"])
    server.ranks.resume()
    thread.join(60)
    first.join(120)
    assert "resumed while it was being quiesced" in failures[0]
    assert server.ask()


def test_sampling_follows_the_seed_of_the_directive(server):
    first, second = server.direct(), server.direct()
    drawn = []
    for directive in (first, second, first):
        server.direct(directive)
        server.ranks.quiesce(timeout_s=60)
        server.ranks.adopt(incarnation=directive.incarnation)
        server.ranks.resume()
        drawn.append(list(server.stream(max_tokens=12, temperature=1.0)))
    assert drawn[0] == drawn[2] != drawn[1]
    acks = read_acks(server.keeper.rank_dir)
    assert {ack.incarnation for ack in acks} == {first.incarnation} and len(acks) == 3
    assert all({"random", "numpy", "torch"} <= set(ack.reseeded) for ack in acks)


# Without a server.


def run(python, code, **env):
    text = textwrap.dedent(code)
    base = {name: value for name, value in environment().items() if not name.startswith("VLLM_")}
    return subprocess.run(
        [python, "-c", text], env={**base, **env}, cwd="/", capture_output=True, text=True, timeout=120
    )


AS = "exec(compile('from coldsnap.engines.vllm.plugin import register; register()', 'x', 'exec'), {'__name__': ROLE})"


def test_a_vllm_that_was_not_launched_here_is_left_alone(engine_python):
    done = run(
        engine_python,
        """
        import sys, threading
        from vllm.plugins import load_general_plugins
        load_general_plugins()
        assert "coldsnap.engines.vllm.plugin" in sys.modules, "the entry point was not loaded at all"
        assert "coldsnap.engines.rank" not in sys.modules and "vllm.v1.engine.async_llm" not in sys.modules
        assert threading.active_count() == 1
        """,
    )
    assert done.returncode == 0, done.stderr


def test_a_damaged_directive_ends_the_process(engine_python, rank_dir):
    (rank_dir / "directive.json").write_text("{")
    code = AS.replace("ROLE", repr("vllm.v1.engine.core"))
    done = run(engine_python, code, COLDSNAP_DIRECTIVE=str(rank_dir / "directive.json"))
    assert done.returncode == 1 and "FormatError" in done.stderr


def test_a_process_of_unknown_role_ends(engine_python, rank_dir):
    code = AS.replace("ROLE", repr("somewhere"))
    done = run(engine_python, code, COLDSNAP_DIRECTIVE=str(rank_dir / "directive.json"))
    assert done.returncode == 1 and "loads plugins from none of" in done.stderr


def test_the_process_that_inspects_model_classes_is_no_rank(engine_python, rank_dir):
    code = AS.replace("ROLE", repr("vllm.model_executor.models.registry"))
    done = run(engine_python, code, COLDSNAP_DIRECTIVE=str(rank_dir / "directive.json"))
    assert done.returncode == 0 and list((rank_dir / "control").iterdir()) == []
