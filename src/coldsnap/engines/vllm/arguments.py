"""vLLM's arguments and environment, as far as this library owns or refuses them.

The one rule: the tables are data, read by ``VLLM.refusals`` and by whoever writes the list of limits. An argument that
is not named here is the user's business and reaches vLLM unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping

from coldsnap.engines.argument_limits import ONE, Limit, Limits, owned

__all__ = [
    "ARGUMENTS",
    "ENVIRONMENT",
    "ENVIRONMENT_DEFAULTS",
    "ENVIRONMENT_DEFAULTS_GPU",
    "ENVIRONMENT_OWNED",
    "LOAD_FORMATS",
]

_ARGUMENTS: tuple[Limit, ...] = (
    owned("--model", works="VLLM(model=…)"),
    owned("--host", "--port", works="the placement of the operation"),
    owned("--served-model-name", works="VLLM(served_model_name=…)"),
    owned("--revision", works="VLLM(revision=…)"),
    owned("--enable-sleep-mode", "--no-enable-sleep-mode", works="nothing: it is on where there is a GPU"),
    Limit(
        names=("--config",),
        why="would hide arguments from the checks made before the launch",
        works="write its contents in args=",
    ),
    Limit(
        names=("--data-parallel-size", "-dp", "--data-parallel-size-local", "-dpl"),
        why="asks for data parallelism: its engines coordinate by processes and sockets that are not captured together",
        works="one engine each, and a load balancer in front",
        allowed=ONE,
    ),
    Limit(
        names=(
            "--data-parallel-*",
            "-dpn",
            "-dpr",
            "-dpa",
            "-dpp",
            "-dpb",
            "-dph",
            "-dpe",
            "-dpm",
            "--enable-elastic-ep",
        ),
        why="belongs to data parallelism, which is not captured",
        works="one engine each, and a load balancer in front",
    ),
    Limit(
        names=("--nnodes", "-n"),
        why="spreads the engine over hosts",
        works="an engine whose processes are all on one host",
        allowed=ONE,
    ),
    Limit(
        names=("--node-rank", "-r", "--headless"),
        why="makes this process one part of an engine on several hosts",
        works="an engine whose processes are all on one host",
    ),
    Limit(
        names=("--distributed-executor-backend",),
        why="starts workers that are not descendants of the engine, or in the caller's process",
        works="mp or uni, or leaving it out",
        allowed=("mp", "uni"),
    ),
    Limit(
        names=("--api-server-count", "-asc"),
        why="asks for several API servers; there is one front end to quiesce",
        works="1",
        allowed=ONE,
    ),
    Limit(
        names=("--enable-lora", "--lora-modules", "--default-mm-loras"),
        why="asks for LoRA adapters, which are not part of the model's identity",
        works="a model with the adapter merged into its weights",
    ),
    Limit(
        names=("--api-key", "--hf-token"),
        why="is a secret, and would be in the process image",
        works="authentication in a proxy in front; models from the local cache",
    ),
    Limit(
        names=("--ssl-*", "--enable-ssl-refresh"),
        why="asks for TLS, whose private key would be in the process image",
        works="TLS in a proxy in front",
    ),
    Limit(
        names=("--uds", "--grpc", "--grpc-port", "--root-path"),
        why="moves the front end away from plain HTTP on the placement's address and port",
        works="a proxy in front",
    ),
    Limit(
        names=("--middleware",),
        why="runs foreign code in front of the requests that decide readiness and acceptance",
        works="a proxy in front",
    ),
    Limit(
        names=("--kv-transfer-config", "--kv-events-config", "--ec-transfer-config", "--weight-transfer-config"),
        why="connects the engine to processes outside, and such connections are not restored",
        works="leaving it out",
    ),
    Limit(
        names=("--otlp-traces-endpoint", "--tool-server"),
        why="connects the engine to a server outside, and such connections are not restored",
        works="leaving it out",
    ),
    Limit(
        names=("--runner",),
        why="serves a model that completes nothing, so that no answer can be compared",
        works="generate",
        allowed=("generate", "auto"),
    ),
    Limit(
        names=("--convert",),
        why="serves a model that completes nothing, so that no answer can be compared",
        works="none",
        allowed=("none", "auto"),
    ),
    Limit(
        names=("--skip-tokenizer-init",),
        why="leaves the engine without a tokenizer, so that the acceptance prompt cannot be read",
        works="leaving it out",
    ),
    Limit(
        names=("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens"),
        why="asks for speculative decoding; a draft model is not part of the model's identity",
        works="leaving it out",
    ),
    Limit(
        names=("--quantization", "-q", "--quantization-config"),
        why="asks for quantised weights, which are not qualified yet",
        works="bfloat16, float16 or float32 weights",
        allowed=("None", "none"),
    ),
)

_ENVIRONMENT: tuple[Limit, ...] = (
    Limit(
        names=("VLLM_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
        why="is a secret, and would be in the process image",
        works="authentication in a proxy in front; models from the local cache",
    ),
    Limit(
        names=("VLLM_DP_*",),
        why="belongs to data parallelism, which is not captured",
        works="one engine each, and a load balancer in front",
    ),
    Limit(
        names=("VLLM_WORKER_MULTIPROC_METHOD",),
        why="forks ranks that do not load the plugin",
        works="spawn",
        allowed=("spawn",),
    ),
    Limit(
        names=("VLLM_ENABLE_V1_MULTIPROCESSING",),
        why="puts the engine core into the front end's process",
        works="1",
        allowed=ONE,
    ),
    Limit(
        names=("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
        why="would let a captured engine hold connections to the hub",
        works="1; fetch the model before the launch",
        allowed=("1", "true", "True", "TRUE", "on", "ON", "yes", "YES"),
    ),
)

ARGUMENTS = Limits(_ARGUMENTS, complete=frozenset({"--convert", "--runner", "--quantization", "--data-parallel-size"}))
ENVIRONMENT = Limits(_ENVIRONMENT)

# What every vLLM is launched with; the user's ``env=`` cannot change the first table.
ENVIRONMENT_OWNED: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked rank has plugins marked as loaded, and runs none
}

ENVIRONMENT_DEFAULTS: Mapping[str, str] = {
    "VLLM_NO_USAGE_STATS": "1",  # an established connection to outside cannot be restored
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",  # all ranks are on one host, and its address may be another one at restore
}

ENVIRONMENT_DEFAULTS_GPU: Mapping[str, str] = {
    "NCCL_IB_DISABLE": "1",  # open InfiniBand devices cannot be dumped
    "NCCL_RAS_ENABLE": "0",  # its thread keeps sockets between all ranks
}

# Values of --load-format that are also the names of the distributions they need, the fastest first.
LOAD_FORMATS = ("instanttensor", "fastsafetensors")
