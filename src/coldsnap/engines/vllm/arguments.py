"""vLLM's arguments and environment, as far as this library owns or refuses them.

The one rule: the tables are data, read by ``VLLM.refusals`` and by whoever writes the list of limits. An argument that
is not named here is the user's business and reaches vLLM unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from attrs import frozen

__all__ = [
    "ARGUMENT_LIMITS",
    "CONFIG_LIMITS",
    "ENVIRONMENT_LIMITS",
    "ENVIRONMENT_OWNED",
    "LOAD_FORMATS",
    "ConfigLimit",
    "Limit",
    "last_value",
    "limits_of",
    "options",
    "refuses_variable",
]


@frozen(kw_only=True)
class Limit:
    """An argument, or an environment name, that is refused.

    Attributes:
        names: All its spellings; a trailing ``*`` stands for any ending.
        why: The reason, as a sentence without its subject.
        works: What to do instead.
        allowed: Values that are not refused; empty means that its presence is.
    """

    names: tuple[str, ...]
    why: str
    works: str
    allowed: tuple[str, ...] = ()

    def refuses(self, name: str, value: str) -> bool:
        """Tell whether this argument, with this value, is refused."""
        return self.spells(name) and value not in self.allowed

    def spells(self, name: str) -> bool:
        """Tell whether ``name`` is one of the spellings."""
        return any(name == known or (known.endswith("*") and name.startswith(known[:-1])) for known in self.names)


def _owned(*names: str, works: str) -> Limit:
    return Limit(names=names, why="is set by this library", works=works)


_ONE = ("1",)

ARGUMENT_LIMITS: tuple[Limit, ...] = (
    _owned("--model", works="VLLM(model=…)"),
    _owned("--host", "--port", works="the placement of the operation"),
    _owned("--served-model-name", works="VLLM(served_model_name=…)"),
    _owned("--revision", works="VLLM(revision=…)"),
    _owned("--enable-sleep-mode", "--no-enable-sleep-mode", works="nothing: it is on where there is a GPU"),
    Limit(
        names=("--config",),
        why="would hide arguments from the checks made before the launch",
        works="write its contents in args=",
    ),
    Limit(
        names=("--data-parallel-size", "-dp", "--data-parallel-size-local", "-dpl"),
        why="asks for data parallelism: its engines coordinate by processes and sockets that are not captured together",
        works="one engine each, and a load balancer in front",
        allowed=_ONE,
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
        allowed=_ONE,
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
        allowed=_ONE,
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

ENVIRONMENT_LIMITS: tuple[Limit, ...] = (
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
        allowed=_ONE,
    ),
    Limit(
        names=("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
        why="would let a captured engine hold connections to the hub",
        works="1; fetch the model before the launch",
        allowed=("1", "true", "True", "TRUE", "on", "ON", "yes", "YES"),
    ),
)

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


@frozen(kw_only=True)
class ConfigLimit:
    """A kind of model that is refused, recognised by a key of its ``config.json``.

    Attributes:
        key: The key; its presence with a value that is not null refuses the model.
        why: The reason.
        works: What to do instead.
    """

    key: str
    why: str
    works: str


_TEXT_ONLY = "a text model"
CONFIG_LIMITS: tuple[ConfigLimit, ...] = (
    ConfigLimit(
        key="quantization_config",
        why="has quantised weights, which are not qualified yet",
        works="bfloat16, float16 or float32 weights",
    ),
    *(
        ConfigLimit(key=key, why="is multimodal, which is not qualified yet", works=_TEXT_ONLY)
        for key in ("vision_config", "audio_config", "thinker_config", "visual")
    ),
)


def options(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Read a command line as vLLM's parser does: ``--a_b=c``, ``--a-b c`` and ``--a-b`` give ``("--a-b", value)``.

    Args:
        args: The arguments.

    Yields:
        Each option with its value, empty when none follows.
    """
    for index, argument in enumerate(args):
        if not argument.startswith("-") or argument.lstrip("-.").isdigit():
            continue
        name, equals, value = argument.partition("=")
        if not equals and index + 1 < len(args) and not args[index + 1].startswith("-"):
            value = args[index + 1]
        yield (name.replace("_", "-") if name.startswith("--") else name), value


def last_value(args: Sequence[str], *names: str, default: str) -> str:
    """Return the value of an option, which is the last one given."""
    return next((value for name, value in reversed(list(options(args))) if name in names), default)


def limits_of(args: Sequence[str]) -> Iterator[tuple[str, Limit]]:
    """Find the arguments that are refused.

    Yields:
        The argument as it was written, without its value, and the limit.
    """
    for name, value in options(args):
        for limit in ARGUMENT_LIMITS:
            if limit.refuses(name, value) or _abbreviates(name, limit):
                yield name, limit
                break
            if limit.spells(name):
                break  # an allowed value of a name that a later, wider row also spells


def refuses_variable(name: str, value: str) -> Limit | None:
    """Return the limit that refuses an environment variable, if one does."""
    return next((limit for limit in ENVIRONMENT_LIMITS if limit.refuses(name, value)), None)


def _abbreviates(name: str, limit: Limit) -> bool:
    # argparse takes any unambiguous beginning of an option for the option.
    return (
        name.startswith("--")
        and len(name) > len("--e")
        and name not in _NOT_ABBREVIATIONS
        and any(known.startswith(name) and known != name and not known.endswith("*") for known in limit.names)
    )


# Options of their own that are also the beginning of a refused one.
_NOT_ABBREVIATIONS = frozenset({"--convert", "--runner", "--quantization", "--data-parallel-size"})
