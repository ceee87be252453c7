"""Which values of the policy have behaviour, and what decisions depend on beside it.

The one rule: a value that somebody chose either changes what is done or is refused with what works instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from coldsnap.errors import UnsupportedError
from coldsnap.policy import Policy, ResolvedPolicy, leaves

__all__ = ["Context", "engine_defaults", "refuse_without_behaviour", "runs_eagerly"]


@frozen(kw_only=True)
class Context:
    """What decisions depend on beside the policy.

    Attributes:
        operation: capture, restore, launch or stop.
        gpu: Whether the placement has GPUs.
        workers: Ranks of the engine.
        native: Whether the weights are outside the process image.
        store: Where their packs are; empty when they are inside.
        reason: Why they are where they are.
        driver: The snapshot driver.
        provider: What ``weights.mode`` comes to at a restore.
        recoverable: Whether the weights may come from the checkpoint.
    """

    operation: str
    gpu: bool
    workers: int
    native: bool = False
    store: str = ""
    reason: str = ""
    driver: str = "n610"
    provider: str = ""
    recoverable: bool = False

    @property
    def weights(self) -> str:
        """Where the weights are: native, image or checkpoint."""
        return "native" if self.native else "image" if self.driver == "n610" else "checkpoint"


class _Any:
    """Every legal value of the leaf has behaviour."""


ANY = _Any()

# Leaves not named here have no behaviour at all: setting one is refused. An entry goes when its last value works (ANY).
WORKING: Mapping[str, tuple[Any, ...] | _Any] = {
    "profile": ("default",),
    "compatibility.kernel": ANY,
    "compatibility.driver": ANY,
    "compatibility.enforce_captured_driver_floor": ANY,
    "weights.mode": ANY,
    "weights.native.repository": ANY,
    "weights.native.revision": ANY,
    "weights.native.files_by_worker": ANY,
    "weights.native.materialize": ANY,
    "weights.recovery.enabled": ANY,
    "weights.recovery.loader_backend": ANY,
    "weights.recovery.chunk_bytes": ANY,
    "weights.recovery.staging_bytes": ANY,
    "weights.recovery.queue_depth": ANY,
    "weights.recovery.verify_bytes": ANY,
    "weights.recovery.verify_model_bytes": ANY,
    "weights.recovery.derived_buffer_max_bytes": ANY,
    "weights.verify": ANY,
    "process.discard": ANY,
    "process.shape_calibration": ("auto", "disabled"),
    "process.artifact_scope": ANY,
    "process.cache_seed": ANY,
    "process.cache_paths": ANY,
    "process.namespace": ANY,
    "process.secrets": ANY,
    "graphs.policy": ("auto", "disabled", "recreate-from-plan"),
    "graphs.asynchronous": (False,),
    "io.hydration_backend": ANY,
    "io.capture_backend": ANY,
    "io.hibernate_read_mode": ANY,
    "io.hibernate_write_mode": ANY,
    "io.verify_mode": ANY,
    "io.reuse_blob": ANY,
    "io.queue_depth": ANY,
    "io.chunk_bytes": ANY,
    "io.native_library": ANY,
    "io.native_sha256": ANY,
    "io.image_compression": ANY,
}


def engine_defaults(*, native: bool, policy: Policy | None = None) -> Mapping[str, Any]:
    """Return the engine layer: defaults of the library that have no behaviour give way to what happens in fact.

    Args:
        native: Whether the weights are outside the process image.
        policy: The user's; caches that it names are carried, others are not unless it says so.
    """
    named = policy is not None and bool(policy.resolved()["process.cache_paths"])
    seed = {} if named else {"process.cache_seed": False}
    if native:
        # auto, and not direct: what was read ahead while CRIU worked is in the page cache, which direct goes around.
        return {**seed, "io.hydration_backend": "auto"}
    return {**seed, "process.discard": ()}


def runs_eagerly(resolved: ResolvedPolicy, context: Context) -> bool:
    """Tell whether an engine must be launched without CUDA graphs."""
    nccl = context.gpu and context.workers > 1 and context.driver == "n610"
    return resolved["graphs.policy"] == "disabled" or nccl


def refuse_without_behaviour(policy: Policy) -> None:
    """Refuse every chosen value that would be ignored.

    Raises:
        UnsupportedError: Names the first such leaf in ``.field`` and every one of them in ``.mismatches``.
    """
    refused = []
    for row in leaves():
        if row.path not in policy.explicit:
            continue
        value = policy.resolved()[row.path]
        working = WORKING.get(row.path, ())
        if not isinstance(working, _Any) and value not in working:
            works = " or ".join(_shown(item) for item in working) or "leaving it unset"
            refused.append((row.path, f"{row.path} = {_shown(value)} has no effect yet; works: {works}", works))
    if refused:
        path, sentence, works = refused[0]
        raise UnsupportedError(
            f"the policy asks for what this version cannot do: {sentence.split(';')[0]}",
            field=path,
            works=works,
            mismatches=[sentence for _, sentence, _ in refused[1:]],
        )


def _shown(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(list(value) if isinstance(value, tuple) else value).lower()
