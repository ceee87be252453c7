"""vLLM starts anew without its checkpoint, on another port, and answers with the same tokens."""

import re
import socket
import sys
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from coldsnap.artifact.store import Store
from coldsnap.artifact.tree import Trees
from coldsnap.engines.acceptance import Question, compare
from coldsnap.engines.control import Ranks
from coldsnap.engines.endpoint import await_ready
from coldsnap.engines.settings import inherited_environment
from coldsnap.engines.start_files import start_files
from coldsnap.engines.vllm import VLLM
from coldsnap.errors import EngineError
from coldsnap.keeper.activation import ACTIVATION, activation_environment, activation_files, place
from coldsnap.keeper.client import Keeper
from coldsnap.keeper.control import request_control
from coldsnap.keeper.directive import (
    Checkpoint,
    Directive,
    Endpoint,
    Export,
    Hydration,
    WorkerSource,
    write_directive,
)
from coldsnap.keeper.undo import KILL
from coldsnap.transfer.safetensors import index

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from attrs import evolve  # noqa: E402

from make_tiny_model import make_tiny_model  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

QUESTION = Question(prompt="Reply with exactly: coldsnap")
ARGS = ("--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "4", "--num-gpu-blocks-override", "64")
ARGS += ("--enforce-eager", "--load-format", "coldsnap")
READING = {"backend": "auto", "read_mode": "direct", "verify_mode": "inline", "verify": "evidence"}


def free():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fixed_runtime(trees):
    """Stage an activation runtime that is another one than the installed: its version says so."""
    files = activation_files()
    meta = next(name for name in files if name.endswith(".dist-info/METADATA"))
    data = re.sub(rb"(?m)^Version: .*$", b"Version: 9.9+fix", files[meta])
    return trees.add({**files, meta: data})


@contextmanager
def running(directory, python, model, runtime=None, **told):
    """Start vLLM with a model that has no tensors, and tell its load more in the directive."""
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CACHE_ROOT": str(directory / "cache")}
    spec = VLLM(model, python=python, args=ARGS, env=env, served_model_name="tiny")
    environ = {name: value for name, value in inherited_environment().items() if name != "PYTHONPATH"}
    endpoint = Endpoint(host="127.0.0.1", port=free())
    with ExitStack() as stack:
        keeper = stack.enter_context(Keeper.start(directory / f"run-{endpoint.port}"))
        stack.callback(stop, keeper)
        with keeper.operation("launch", [KILL]):
            directive = Directive.new(operation="launch", endpoint=endpoint, provider=told.pop("provider"))
            write_directive(keeper.rank_dir, evolve(directive, **told))
            command = spec.launch_command(endpoint, environ=environ)
            env = command.env
            if runtime is not None:
                place(keeper.rank_dir, ACTIVATION, Trees(directory / "store"), runtime.sha256)
                env = activation_environment(env, keeper.tree_dir)
            keeper.spawn_engine(command.argv, env=env, cwd=command.cwd)
            await_ready(endpoint, timeout_s=300, ended=lambda: ended(keeper), log=keeper.log_path)
        answer = spec.ask(endpoint, QUESTION, timeout_s=60)
        reports = request_control(keeper.rank_dir, "load_report", timeout_s=30)
        (report,) = (reply for reply in reports.values() if not reply.get("skipped"))
        yield answer, report, Ranks(keeper.rank_dir)


def stop(keeper):
    with suppress(EngineError):
        keeper.stop(grace_s=10)


def ended(keeper):
    status = keeper.status()
    return None if status.state == "running" else f"{status.state} ({status.exit})"


@pytest.fixture(scope="module")
def started(tmp_path_factory, engine_python):
    """Capture with a checkpoint, take it away, start without."""
    directory = tmp_path_factory.mktemp("fresh")
    checkpoint, store = make_tiny_model(directory / "tiny"), directory / "store"
    tree = Trees(store).add(start_files(checkpoint))
    export = Export(directory=str(directory / "weights"), store=str(store), capture_id="capture-0001", reserve_bytes=0)
    told = {"provider": "checkpoint", "checkpoint": Checkpoint(path=str(checkpoint)), "export": export}
    (directory / "weights").mkdir(mode=0o700)
    with running(directory, engine_python, tree.path, **told) as (before, left, _):
        stored = index(checkpoint.glob("*.safetensors"))
    checkpoint.rename(directory / "moved-away")
    source = WorkerSource(
        worker="worker-0",
        directory=str(directory / "weights" / "worker-0"),
        manifest_sha256=left["manifest_sha256"],
        pack=str(Store(store).path(left["pack"]["sha256"])),
        index_sha256=left["index_sha256"],
    )
    hydration = Hydration(**READING, queue_depth=4, chunk_bytes=64 << 20, workers=(source,))
    runtime = fixed_runtime(Trees(store))
    told = {"provider": "native", "hydration": hydration, "runtime": runtime}
    with running(directory, engine_python, tree.path, **told) as (after, moved, ranks):
        yield before, left, after, moved, stored, ranks
    Trees(store).verify(runtime.sha256)
    Trees(store).verify(tree.sha256)


def test_an_engine_without_its_checkpoint_answers_with_the_same_tokens(started):
    before, _, after, *_ = started

    compare(before, after)
    assert len(set(after.token_ids)) > 4


def test_everything_that_the_checkpoint_holds_comes_from_the_pack(started):
    _, left, _, moved, stored, _ = started

    assert left["task"] == "export" and left["kept"] == {}
    assert moved["task"] == "start" and moved["provider"] == "native"
    assert moved["bytes"]["pack"] == sum(one.length for one in stored.values())
    assert moved["pack_bytes"] == left["pack"]["bytes"]


def test_a_fresh_engine_is_one_like_any_other(started):
    *_, ranks = started

    ranks.quiesce(timeout_s=60)
    ranks.resume()


def test_a_fix_of_the_activation_runtime_reaches_every_rank_without_a_capture(started):
    *_, ranks = started

    assert {reply["versions"]["coldsnap"] for reply in ranks.ping().values()} == {"9.9+fix"}
