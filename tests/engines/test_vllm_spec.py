"""``VLLM`` as data: what it refuses, what it launches."""

import pickle
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldsnap.artifact import record
from coldsnap.engines.argument_limits import MODEL_LIMITS, options
from coldsnap.engines.base import Engine, raise_refusals
from coldsnap.engines.environment import EngineEnvironment, Site
from coldsnap.engines.vllm import VLLM
from coldsnap.engines.vllm.arguments import ARGUMENTS, ENVIRONMENT
from coldsnap.errors import AdmissionError, PolicyError, UnsupportedError
from coldsnap.keeper.directive import Endpoint

ENDPOINT = Endpoint(host="127.0.0.1", port=8000)
REVISION = "0123456789abcdef0123456789abcdef01234567"


def spec(**changes):
    return VLLM("/models/tiny", python="/opt/vllm/bin/python", **changes)


def launch(engine=None, *, environ=None, gpu=False):
    return (engine or spec()).launch_command(ENDPOINT, environ=environ or {}, gpu=gpu)


def test_a_specification_is_an_engine_and_survives_pickling_and_records():
    engine = spec(args=("--dtype", "bfloat16"), env={"A": "b"})
    assert isinstance(engine, Engine)
    assert pickle.loads(pickle.dumps(engine)) == engine
    assert record.read(VLLM, record.write(engine), path="spec") == engine


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"revision": "main"}, "40 hex digits"),
        ({"revision": REVISION}, "is a path"),
        ({"args": "--dtype bfloat16"}, "expected a sequence of arguments"),
        ({"args": ("--max-model-len", 8192)}, "expected strings"),
        ({"env": {"A": 1}}, "expected strings"),
    ],
)
def test_a_wrong_specification_is_refused_where_it_is_written(arguments, message):
    with pytest.raises(PolicyError, match=message):
        spec(**arguments)


def test_a_model_must_have_a_name():
    with pytest.raises(PolicyError, match=r"\$\.engine\.model"):
        VLLM("")


def test_a_local_model_is_launched_by_its_absolute_path():
    command = launch(spec(args=("--max-model-len", "512"), served_model_name="tiny"))
    assert shlex.join(command.argv) == (
        "/opt/vllm/bin/python -m vllm.entrypoints.openai.api_server --model /models/tiny --served-model-name tiny "
        "--host 127.0.0.1 --port 8000 --max-model-len 512"
    )
    assert command.cwd == "/"


def test_a_model_of_the_hub_is_launched_at_its_revision():
    command = launch(VLLM("Qwen/Qwen3-8B", revision=REVISION))
    assert command.argv[3:7] == ("--model", "Qwen/Qwen3-8B", "--revision", REVISION)


def test_sleep_mode_is_asked_for_on_a_gpu_only():
    assert "--enable-sleep-mode" not in launch().argv
    assert "--enable-sleep-mode" in launch(gpu=True).argv


PAYLOAD = {"COLDSNAP_EXPORT_MODEL_PAYLOAD": "1"}


def test_where_weights_may_leave_on_a_gpu_vllms_own_sleep_uses_the_same_backend():
    assert launch(environ=PAYLOAD, gpu=True).env["COLDSNAP_VLLM_OVERRIDE_CUMEM"] == "1"
    assert "COLDSNAP_VLLM_OVERRIDE_CUMEM" not in launch(environ=PAYLOAD).env
    assert "COLDSNAP_VLLM_OVERRIDE_CUMEM" not in launch(gpu=True).env
    own = spec(env={"COLDSNAP_VLLM_OVERRIDE_CUMEM": "0"})
    assert launch(own, environ=PAYLOAD, gpu=True).env["COLDSNAP_VLLM_OVERRIDE_CUMEM"] == "0"


def test_a_worker_of_a_hub_model_is_told_which_one_it_is():
    env = launch(VLLM("org/model", revision=REVISION), environ=PAYLOAD).env
    assert (env["COLDSNAP_MODEL_ID"], env["COLDSNAP_MODEL_REVISION"]) == ("org/model", REVISION)
    assert "COLDSNAP_MODEL_ID" not in launch(environ=PAYLOAD).env


def environment(*distributions):
    site = Site(path="/site", distributions=tuple(f"{name}.dist-info" for name in distributions))
    return EngineEnvironment(
        executable="/python",
        python_version="3.12.3",
        python_abi="cp312",
        versions={},
        packages={},
        coldsnap_digest="",
        entry_points=(),
        sites=(site,),
    )


@pytest.mark.parametrize(
    ("installed", "args", "gpu", "expected"),
    [
        (("vllm-0.32.0", "fastsafetensors-0.5.0", "instanttensor-0.2.2"), (), True, ("--load-format", "instanttensor")),
        (("vllm-0.32.0", "fastsafetensors-0.5.0"), (), True, ("--load-format", "fastsafetensors")),
        (("vllm-0.32.0",), (), True, ()),
        (("instanttensor-0.2.2",), (), False, ()),
        (("instanttensor-0.2.2",), ("--load-format=auto",), True, ()),
        (("instanttensor-0.2.2",), ("--load_format", "safetensors"), True, ()),
    ],
)
def test_a_gpu_loads_with_the_fastest_loader_that_is_installed(tmp_path, installed, args, gpu, expected):
    (tmp_path / "model.safetensors").touch()
    engine = VLLM(tmp_path, args=args)
    argv = launch(engine, gpu=gpu).argv
    assert engine.installed_arguments(argv, environment(*installed), environ={}) == expected


def test_a_model_without_safetensors_is_loaded_as_vllm_likes(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    engine = VLLM(tmp_path)
    argv = launch(engine, gpu=True).argv
    assert engine.installed_arguments(argv, environment("instanttensor-0.2.2"), environ={}) == ()


def test_a_hub_model_is_looked_for_in_the_cache_of_the_launch(tmp_path):
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").touch()
    engine = VLLM("org/model", revision=REVISION)
    argv, installed = launch(engine, gpu=True).argv, environment("instanttensor-0.2.2")
    environ = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    assert engine.installed_arguments(argv, installed, environ=environ) == ("--load-format", "instanttensor")


def test_the_environment_is_offline_quiet_and_loads_the_plugin():
    env = launch().env
    assert env["VLLM_PLUGINS"] == "coldsnap"
    assert env["HF_HUB_OFFLINE"] == env["VLLM_NO_USAGE_STATS"] == env["DO_NOT_TRACK"] == "1"
    assert env["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in env and "NCCL_IB_DISABLE" not in env


def test_the_users_plugins_and_allocator_options_are_kept():
    env = {"VLLM_PLUGINS": "mine", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}
    command = launch(environ=env, gpu=True)
    assert command.env["VLLM_PLUGINS"] == "mine,coldsnap"
    assert command.env["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64,expandable_segments:False"
    assert launch(environ=command.env, gpu=True).env == command.env


def test_what_is_inherited_but_would_be_refused_is_left_out():
    env = launch(
        environ={"VLLM_API_KEY": "s3cret", "HF_TOKEN": "s3cret", "HF_HUB_OFFLINE": "0", "HOME": "/home/me"}
    ).env
    assert "s3cret" not in env.values()
    assert (env["HF_HUB_OFFLINE"], env["HOME"]) == ("1", "/home/me")


def test_env_wins_over_what_is_inherited():
    assert launch(spec(env={"OMP_NUM_THREADS": "2"}), environ={"OMP_NUM_THREADS": "8"}).env["OMP_NUM_THREADS"] == "2"


def test_names_of_this_library_in_env_are_refused():
    with pytest.raises(AdmissionError, match="COLDSNAP_DIRECTIVE"):
        launch(spec(env={"COLDSNAP_DIRECTIVE": "/tmp/x"}))


def refused(*args, gpu=False, **changes):
    return [str(refusal) for refusal in spec(args=args, **changes).refusals(gpu=gpu)]


@pytest.mark.parametrize(
    "args",
    [
        ("--port", "9000"),
        ("--host=0.0.0.0",),
        ("--model", "x"),
        ("--data-parallel-size", "2"),
        ("-dp=2",),
        ("--data_parallel_rank", "0"),
        ("--enable-lora",),
        ("--lora-modules", "a=b"),
        ("--api-key", "k"),
        ("--ssl-keyfile", "k"),
        ("--uds", "/x"),
        ("--api-server-count", "4"),
        ("-asc", "2"),
        ("--nnodes", "2"),
        ("--distributed-executor-backend", "ray"),
        ("--kv-transfer-config", "{}"),
        ("--runner", "pooling"),
        ("--speculative-config", "{}"),
        ("-q", "fp8"),
        ("--config", "serve.yaml"),
        ("--middleware", "m.M"),
        ("--por", "9000"),
        ("--api-ke", "k"),
        ("--data-parallel-siz", "2"),
    ],
)
def test_what_cannot_be_captured_is_refused_by_name(args):
    (refusal,) = refused(*args)
    assert args[0].partition("=")[0].replace("_", "-") in refusal
    assert "What works:" in refusal


@pytest.mark.parametrize(
    "args",
    [
        ("--data-parallel-size", "1"),
        ("-tp", "2"),
        ("--tensor-parallel-size=2", "--enforce-eager"),
        ("--distributed-executor-backend", "mp"),
        ("--runner", "generate"),
        ("--max-model-len", "512", "--seed", "-1"),
    ],
)
def test_everything_else_reaches_vllm_unchanged(args):
    assert refused(*args) == []
    assert launch(spec(args=args)).argv[-len(args) :] == args


def test_the_environment_is_held_to_the_same_limits():
    refusals = refused(env={"VLLM_API_KEY": "s3cret", "VLLM_DP_RANK": "1", "VLLM_WORKER_MULTIPROC_METHOD": "fork"})
    assert [text.split()[0] for text in refusals] == ["VLLM_API_KEY", "VLLM_DP_RANK", "VLLM_WORKER_MULTIPROC_METHOD"]
    assert not any("s3cret" in text for text in refusals)
    assert refused(env={"HF_HUB_OFFLINE": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}) == []


def test_expandable_segments_are_refused_on_a_gpu_only():
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert refused(env=env) == []
    assert "expandable_segments" in refused(env=env, gpu=True)[0]


def test_several_refusals_are_told_at_once():
    refusals = spec(args=("--enable-lora", "--api-key", "k")).refusals()
    with pytest.raises(AdmissionError, match="(?s)enable-lora.*api-key") as caught:
        raise_refusals("this vLLM", refusals)
    assert len(caught.value.mismatches) == 2
    with pytest.raises(UnsupportedError):
        raise_refusals("this vLLM", refusals[:1])
    raise_refusals("this vLLM", ())


def test_ranks_are_counted_from_the_arguments():
    assert spec().roles() == {"api": 1, "engine": 1, "worker": 1}
    assert spec(args=("-tp", "2", "--pipeline_parallel_size=2")).roles() == {"api": 1, "engine": 1, "worker": 4}
    assert spec().roles(gpu=True) == {"api": 1, "engine": 1}
    assert spec(args=("--distributed-executor-backend", "mp")).roles(gpu=True)["worker"] == 1
    assert spec(args=("-tp", "2")).roles(gpu=True)["worker"] == 2
    with pytest.raises(AdmissionError, match="positive number"):
        spec(args=("-tp", "two")).roles()


def test_a_seed_of_the_user_is_seen():
    assert not spec().user_seeded
    assert spec(args=("--seed", "7")).user_seeded and spec(args=("--seed=7",)).user_seeded


def test_options_are_read_as_the_parser_reads_them():
    assert list(options(["--a_b=c", "--d", "e", "-tp", "2", "--flag", "--seed", "-1"])) == [
        ("--a-b", "c"),
        ("--d", "e"),
        ("-tp", "2"),
        ("--flag", ""),
        ("--seed", ""),
    ]


@given(st.lists(st.text(max_size=20)))
def test_no_argument_list_confuses_the_reader(args):
    assert len(list(ARGUMENTS.of(args))) <= len(list(options(args))) <= len(args)


def test_every_limit_has_a_reason_and_a_way_out():
    for limit in (*ARGUMENTS.rows, *ENVIRONMENT.rows):
        assert limit.names and limit.why and limit.works and not limit.why.endswith(".")
    assert {limit.key for limit in MODEL_LIMITS} >= {"quantization_config", "vision_config"}
