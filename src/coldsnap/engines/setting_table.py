"""The one table of environment names: which policy leaf each stands for, who owns it, which engine reads it.

The one rule: a name that nothing acts on is never set, and one that the library owns is never taken from a user.
The module loads inside engine ranks: it needs attrs and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

from attrs import frozen

if TYPE_CHECKING:
    from coldsnap.policy import Policy
__all__ = ["DIRECTIVE", "SETTINGS", "Engine", "Owner", "Setting"]

Owner = Literal["user", "controller"]
Engine = Literal["vllm", "sglang"]
Projection = Callable[..., str | None]

DIRECTIVE = "COLDSNAP_DIRECTIVE"


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _flag(value: bool) -> str:
    return "1" if value else "0"


def _words(value: tuple[str, ...]) -> str:
    return ",".join(value)


@frozen(kw_only=True)
class Setting:
    """One environment name.

    Attributes:
        name: The name.
        path: The policy leaf it is projected from; ``None`` when it is no matter of policy.
        owner: user: may stand in an engine's ``env=``. controller: only this library sets it.
        engine: Which engine's ranks read it.
        default: What a rank assumes when it is not set, as text; empty when nothing.
        meaning: What it decides.
        implemented: Whether this version acts on it; the others are known by name only, and refused or never set.
        beside: A second leaf that decides together with the first.
        projection: How the values of these leaves are written; ``None`` leaves the name unset.
    """

    name: str
    owner: Owner
    engine: Literal["vllm", "sglang", "both"]
    meaning: str
    path: str | None = None
    default: str = ""
    implemented: bool = False
    beside: str | None = None
    projection: Projection = _text

    def read_by(self, engine: Engine) -> bool:
        """Tell whether the ranks of an engine read this name."""
        return self.engine in (engine, "both")

    def value(self, policy: Policy) -> str | None:
        """Return the text that stands for the policy's value, or ``None`` for not set."""
        values = [attrgetter(path)(policy) for path in (self.path, self.beside) if path is not None]
        return self.projection(*values) if values else None


def _exports_payload(mode: str) -> str | None:
    return None if mode == "image" else "1"


def _recovers(enabled: bool) -> str | None:
    return "safetensors" if enabled else None


def _calibrates(choice: str, asynchronous: bool) -> str:
    return _flag(asynchronous and choice != "disabled")


def _preverified(mode: str) -> str:
    return _flag(mode == "preverified")


# The names made by the next three functions that this version acts on; those of native I/O all are.
_ACTED_ON = {"DISK_SLEEP_DIR", "KV_CAPACITY_GUARD", "MODEL_ID", "MODEL_METADATA_SHA256", "MODEL_REVISION"}
_ACTED_ON |= {"RECOVERY_WEIGHT_SOURCE", "RESTORE_TRANSPORT_ENVIRONMENT_PATH"}
_ACTED_ON |= {"STARTUP_PLAN_MAX_SHORTFALL_BYTES", "VLLM_OVERRIDE_CUMEM"}
# SGLang's.
_ACTED_ON |= {"ARTIFACT_DIR", "LIVE_BACKING", "MODE", "PROCESS_ARTIFACT_ROOT", "RUNTIME_DIR"}
_ACTED_ON |= {"SGLANG_RECOVERY_LOAD_FORMAT", "SGLANG_STARTUP_PROVIDER"}


def _recovery(suffix: str, leaf: str, default: str, meaning: str, projection: Projection = _text) -> Setting:
    """Make a row of the recovery loader, whose names all follow one pattern."""
    return Setting(
        name=f"COLDSNAP_RECOVERY_{suffix}",
        path=f"weights.recovery.{leaf}",
        # The plan settles auto by the filesystem behind each file; a name set beside it would go unnoticed.
        owner="controller" if suffix == "LOADER_BACKEND" else "user",
        engine="vllm",
        default=default,
        implemented=f"RECOVERY_{suffix}" in _ACTED_ON,
        meaning=meaning,
        projection=projection,
    )


def _io(suffix: str, leaf: str, default: str, meaning: str, projection: Projection = _text) -> Setting:
    """Make a row of vLLM's native I/O."""
    return Setting(
        name=f"COLDSNAP_{suffix}",
        path=f"io.{leaf}",
        owner="user",
        engine="vllm",
        default=default,
        implemented=True,
        meaning=meaning,
        projection=projection,
    )


def _plain(name: str, owner: Owner, engine: Literal["vllm", "sglang", "both"], default: str, meaning: str) -> Setting:
    """Make a row that stands for no policy leaf."""
    return Setting(
        name=f"COLDSNAP_{name}",
        owner=owner,
        engine=engine,
        default=default,
        implemented=name in _ACTED_ON,
        meaning=meaning,
    )


SETTINGS: tuple[Setting, ...] = (
    # Both engines.
    Setting(
        name=DIRECTIVE,
        owner="controller",
        engine="both",
        implemented=True,
        meaning="Path, inside the process, of the directive that each rank reads at launch and after every restore.",
    ),
    Setting(
        name="COLDSNAP_EXPORT_MODEL_PAYLOAD",
        path="weights.mode",
        owner="controller",
        engine="both",
        default="0",
        implemented=True,
        meaning="1: loads are observed, a release writes the worker's native pack; "
        "set for every weights.mode but image.",
        projection=_exports_payload,
    ),
    Setting(
        name="COLDSNAP_ASYNC_CUDA_GRAPHS",
        path="graphs.asynchronous",
        owner="controller",
        engine="both",
        default="0",
        meaning="1: serve eagerly first, capture graphs after the first completed request when the scheduler is idle.",
        projection=_flag,
    ),
    Setting(
        name="COLDSNAP_SHAPE_CALIBRATION",
        path="process.shape_calibration",
        beside="graphs.asynchronous",
        owner="controller",
        engine="both",
        default="0",
        meaning="1: warm the engine's whole graph plan at capture; incomplete coverage fails the capture.",
        projection=_calibrates,
    ),
    # vLLM: memory and hibernation.
    _plain("VLLM_OVERRIDE_CUMEM", "user", "vllm", "0", "1: vLLM's own sleep and wake-up use ColdSnap's backend."),
    _plain("DISK_SLEEP_DIR", "user", "vllm", "", "Absolute path of the files of vLLM's own sleep and wake-up."),
    _plain("KV_CAPACITY_GUARD", "user", "vllm", "", "1, 0: cap the KV cache vLLM chooses; unset: as the override."),
    Setting(
        name="COLDSNAP_DISCARD_REGIONS",
        path="process.discard",
        owner="user",
        engine="vllm",
        implemented=True,
        meaning="Empty, or kv_cache: contents thrown away at capture, zero after restore, checked by reading back.",
        projection=_words,
    ),
    _io("HIBERNATE_READ_MODE", "hibernate_read_mode", "direct", "How hibernated state is read: direct or buffered."),
    _io("HIBERNATE_WRITE_MODE", "hibernate_write_mode", "direct", "How it is written: direct or buffered."),
    _io("HIBERNATE_VERIFY_MODE", "verify_mode", "inline", "inline: digests on the way. preverified: needs evidence."),
    _io("HIBERNATE_REUSE_BLOB", "reuse_blob", "1", "1: keep using a restored blob of the same generation.", _flag),
    # vLLM: native I/O.
    _io(
        "CAPTURE_BACKEND", "capture_backend", "auto", "auto, python, buffered or direct; direct refuses the unaligned."
    ),
    _io(
        "HYDRATION_BACKEND",
        "hydration_backend",
        "python",
        "How weights reach memory: auto, python, buffered, direct or gds.",
    ),
    _io("HYDRATION_QUEUE_DEPTH", "queue_depth", "4", "Native I/O requests in flight."),
    _io("HYDRATION_NATIVE_LIBRARY", "native_library", "", "The native library, for backends other than python."),
    _io("HYDRATION_NATIVE_SHA256", "native_sha256", "", "Digest that the native library must have."),
    # vLLM: recovery from safetensors.
    _recovery("WEIGHT_SOURCE", "enabled", "", "safetensors: record what recovery needs, too.", _recovers),
    _recovery(
        "LOADER_BACKEND", "loader_backend", "auto", "How safetensors are read: auto, direct, buffered, mmap or torch."
    ),
    _recovery("LOADER_DISTRIBUTED", "distributed", "1", "1: ranks share out the reading and broadcast.", _flag),
    _recovery("LOADER_CHUNK_BYTES", "chunk_bytes", "67108864", "Size of one staged read, a multiple of 4096."),
    _recovery("LOADER_STAGING_BYTES", "staging_bytes", "268435456", "Largest staging slab in GPU memory, per rank."),
    _recovery("LOADER_COLLECTIVE_BYTES", "collective_bytes", "67108864", "Largest buffer of one broadcast."),
    _recovery("LOADER_VERIFY_BYTES", "verify_bytes", "0", "Head and tail bytes compared of each tensor, up to 4096."),
    _recovery("LOADER_VERIFY_MODEL_BYTES", "verify_model_bytes", "0", "The same for each live parameter and buffer."),
    _recovery("LOADER_QUEUE_DEPTH", "queue_depth", "4", "Staged reads in flight, 1 to 64."),
    _recovery("LOADER_TRANSPORT_PIPELINE_DEPTH", "pipeline_depth", "1", "2: read a batch while another is broadcast."),
    _recovery("DERIVED_BUFFER_MAX_BYTES", "derived_buffer_max_bytes", "67108864", "Cap of buffers kept in the image."),
    # vLLM: identity and handoffs of the orchestrator.
    _plain("MODEL_ID", "controller", "vllm", "", "Model identifier bound into the recovery manifest."),
    _plain("MODEL_REVISION", "controller", "vllm", "", "Immutable revision bound into the recovery manifest."),
    _plain("MODEL_METADATA_SHA256", "controller", "vllm", "", "Digest of the model's metadata, bound when present."),
    _plain(
        "STARTUP_PLAN_MAX_SHORTFALL_BYTES",
        "controller",
        "vllm",
        "536870912",
        "Largest loss of free memory a plan takes.",
    ),
    _plain(
        "RESTORE_TRANSPORT_ENVIRONMENT_PATH", "controller", "vllm", "", "File of the destination's network environment."
    ),
    _plain(
        "ASYNC_CUDA_GRAPHS_ARM_FILE", "controller", "vllm", "", "File whose appearance lets all ranks capture graphs."
    ),
    # vLLM: admission of packs.
    _plain("PAYLOAD_VALIDATION_TRANSPORT", "user", "vllm", "auto", "Who verifies packs: auto, python, cli or rpc."),
    _plain("PAYLOAD_VALIDATION_COMMAND", "user", "vllm", "", "Argument prefix of a validation command."),
    _plain("PAYLOAD_VALIDATION_RPC_SOCKET", "user", "vllm", "", "Unix socket of a validation service."),
    _plain("PAYLOAD_VALIDATION_RPC_TOKEN_FILE", "user", "vllm", "", "Absolute path of the service's token file."),
    _plain("PAYLOAD_VALIDATION_TIMEOUT_SECONDS", "user", "vllm", "1800", "Deadline, s, at most 86400."),
    # SGLang.
    _plain("MODE", "controller", "sglang", "off", "off or capture; a restored process goes on as captured."),
    _plain("ARTIFACT_DIR", "controller", "sglang", "", "Root of the semantic layout of one capsule."),
    _plain("PROCESS_ARTIFACT_ROOT", "controller", "sglang", "", "Root of the process artifact and of hydration."),
    _plain("LIVE_BACKING", "controller", "sglang", "disk", "discard, disk or cpu; a capture uses discard."),
    _plain("RUNTIME_DIR", "controller", "sglang", "", "Writable root of locks and transient state."),
    Setting(
        name="COLDSNAP_ARTIFACT_PREVERIFIED",
        path="io.verify_mode",
        owner="controller",
        engine="sglang",
        default="0",
        implemented=True,
        meaning="1: admit an immutable blob by its evidence record; set for preverified.",
        projection=_preverified,
    ),
    _plain("SGLANG_STARTUP_PROVIDER", "controller", "sglang", "", "native or recovery, chosen by the plan."),
    _plain("SGLANG_RECOVERY_LOAD_FORMAT", "controller", "sglang", "auto", "SGLang's load format when recovering."),
)
