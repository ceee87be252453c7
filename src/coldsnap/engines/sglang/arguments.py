"""SGLang's arguments and environment, as far as this library owns or refuses them.

The one rule: the tables are data, read by ``SGLang.refusals`` and by whoever writes the list of limits. An argument
that is not named here is the user's business and reaches SGLang unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping

from coldsnap.engines.argument_limits import ONE, Limit, Limits, owned

__all__ = [
    "ARGUMENTS",
    "ENVIRONMENT",
    "ENVIRONMENT_CPU",
    "ENVIRONMENT_DEFAULTS",
    "ENVIRONMENT_DEFAULTS_GPU",
    "ENVIRONMENT_OWNED",
    "MEMORY_SAVER",
]

MEMORY_SAVER = "--enable-memory-saver"

_ONE_HOST = "an engine whose processes are all on one host"
_BALANCER = "one engine each, and a load balancer in front"
_PROXY = "a proxy in front"
_OUT = "leaving it out"

_ARGUMENTS: tuple[Limit, ...] = (
    owned("--model-path", "--model", works="SGLang(model=…)"),
    owned("--host", "--port", works="the placement of the operation"),
    owned("--served-model-name", works="SGLang(served_model_name=…)"),
    owned("--revision", works="SGLang(revision=…)"),
    Limit(
        names=("--config",),
        why="would hide arguments from the checks made before the launch",
        works="write its contents in args=",
    ),
    Limit(
        names=("--dp-size", "--dp", "--data-parallel-size", "--attn-dp-size"),
        why="asks for data parallelism, whose controller is one more process between the front end and the schedulers",
        works=_BALANCER,
        allowed=ONE,
    ),
    Limit(
        names=("--pp-size", "--pp", "--pipeline-parallel-size"),
        why="asks for pipeline parallelism: its stages do not reach the boundary of a release in one pass",
        works="tensor parallelism",
        allowed=ONE,
    ),
    Limit(names=("--nnodes",), why="spreads the engine over hosts", works=_ONE_HOST, allowed=ONE),
    Limit(
        names=("--node-rank", "--dist-init-addr", "--use-ray", "--elastic-ep-*", "--enable-elastic-expert-backup"),
        why="makes this process one part of an engine on several hosts",
        works=_ONE_HOST,
    ),
    Limit(
        names=("--tokenizer-worker-num", "--detokenizer-worker-num"),
        why="asks for several front ends; there is one to quiesce",
        works="1",
        allowed=ONE,
    ),
    Limit(
        names=("--enable-lora", "--lora-paths", "--uno-lora-path"),
        why="asks for LoRA adapters, which are not part of the model's identity",
        works="a model with the adapter merged into its weights",
    ),
    Limit(
        names=("--api-key", "--admin-api-key", "--ssl-keyfile-password"),
        why="is a secret, and would be in the process image",
        works="authentication in a proxy in front",
    ),
    Limit(
        names=("--ssl-*", "--enable-ssl-refresh"),
        why="asks for TLS, whose private key would be in the process image",
        works="TLS in a proxy in front",
    ),
    Limit(
        names=(
            "--grpc-mode",
            "--smg-grpc-mode",
            "--grpc-port",
            "--smg-http-sidecar-port",
            "--sidecar",
            "--sidecar-args",
            "--fastapi-root-path",
            "--enable-http2",
        ),
        why="moves the front end away from plain HTTP on the placement's address and port",
        works=_PROXY,
    ),
    Limit(
        names=("--disaggregation-mode",),
        why="makes the engine one half of a pair, and connections to the other are not restored",
        works="null",
        allowed=("null",),
    ),
    Limit(
        names=("--encoder-only", "--language-only", "--encoder-urls", "--encoder-register-urls"),
        why="makes the engine one half of a pair, and connections to the other are not restored",
        works=_OUT,
    ),
    Limit(
        names=(
            "--kv-events-config",
            "--load-publish-endpoint",
            "--enable-lmcache",
            "--enable-flexkv",
            "--hicache-storage-backend",
            "--decoupled-spec-*",
            "--remote-instance-*",
            "--modelexpress-config",
        ),
        why="connects the engine to processes outside, and such connections are not restored",
        works=_OUT,
    ),
    Limit(
        names=("--enable-trace", "--otlp-traces-endpoint", "--tool-server"),
        why="connects the engine to a server outside, and such connections are not restored",
        works=_OUT,
    ),
    Limit(
        names=("--weight-cache-mode",),
        why="shares weights with a daemon, and SGLang then refuses to release them",
        works="off",
        allowed=("off",),
    ),
    Limit(
        names=("--enable-weights-cpu-backup", "--enable-draft-weights-cpu-backup", "--cpu-offload-gb"),
        why="keeps weights in host memory, where they would be part of every process image",
        works=_OUT,
    ),
    Limit(
        names=("--checkpoint-engine-wait-weights-before-ready", "--custom-weight-loader"),
        why="has somebody else bring the weights, so that nobody knows what is served",
        works=_OUT,
    ),
    Limit(
        names=("--delete-ckpt-after-loading",),
        why="deletes files that a restore needs",
        works=_OUT,
    ),
    Limit(
        names=("--enable-symm-mem", "--enable-torch-symm-mem", "--enable-nccl-nvls", "--enable-mscclpp"),
        why="maps memory of several GPUs at once, which the CUDA checkpoint does not save",
        works=_OUT,
    ),
    Limit(
        names=("--is-embedding",),
        why="serves a model that completes nothing, so that no answer can be compared",
        works="a model that generates",
    ),
    Limit(
        names=("--skip-tokenizer-init",),
        why="leaves the engine without a tokenizer, so that the acceptance prompt cannot be read",
        works=_OUT,
    ),
    Limit(
        names=("--speculative-*",),
        why="asks for speculative decoding; a draft model is not part of the model's identity",
        works=_OUT,
    ),
    Limit(
        names=("--quantization", "--quantize-and-serve", "--modelopt-quant", "--modelopt-checkpoint-restore-path"),
        why="asks for quantised weights, which are not qualified yet",
        works="bfloat16, float16 or float32 weights",
        allowed=("None", "none"),
    ),
)

_ENVIRONMENT: tuple[Limit, ...] = (
    Limit(
        names=("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
        why="is a secret, and would be in the process image",
        works="models from the local cache",
    ),
    Limit(
        names=("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
        why="would let a captured engine hold connections to the hub",
        works="1; fetch the model before the launch",
        allowed=("1", "true", "True", "TRUE", "on", "ON", "yes", "YES"),
    ),
    Limit(
        names=("SGLANG_USE_MODELSCOPE",),
        why="takes the model from another hub, whose revisions are not known here",
        works="the directory of the model",
        allowed=("0", "false", "False"),
    ),
)

ARGUMENTS = Limits(_ARGUMENTS, complete=frozenset({"--tp", "--quantization"}))
ENVIRONMENT = Limits(_ENVIRONMENT)

# What every SGLang is launched with; the user's ``env=`` cannot change this table.
ENVIRONMENT_OWNED: Mapping[str, str] = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

ENVIRONMENT_DEFAULTS: Mapping[str, str] = {
    "COLDSNAP_LIVE_BACKING": "discard",  # a user's own release does what SGLang's does
    "DO_NOT_TRACK": "1",
    "SGLANG_HOST_IP": "127.0.0.1",  # all ranks are on one host, and its address may be another one at restore
}

ENVIRONMENT_CPU: Mapping[str, str] = {"SGLANG_USE_CPU_ENGINE": "1"}  # else it looks for a GPU and ends

ENVIRONMENT_DEFAULTS_GPU: Mapping[str, str] = {
    "NCCL_IB_DISABLE": "1",  # open InfiniBand devices cannot be dumped
    "NCCL_RAS_ENABLE": "0",  # its thread keeps sockets between all ranks
    "NCCL_NVLS_ENABLE": "0",  # multicast memory is not saved by the CUDA checkpoint
}
