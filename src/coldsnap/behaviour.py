"""Which values of the policy have behaviour, and what the automatic ones come to.

The one rule: a value that somebody chose either changes what is done or is refused with what works instead. Only
``auto``, and defaults nobody chose, may come to something else, and then the plan says to what and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from coldsnap.drivers.image_profile import image_compression
from coldsnap.errors import UnsupportedError
from coldsnap.plan import Decision
from coldsnap.policy import Policy, ResolvedPolicy, leaves

__all__ = ["Context", "decide", "engine_defaults", "refuse_without_behaviour", "runs_eagerly"]


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


def decide(resolved: ResolvedPolicy, context: Context) -> tuple[Decision, ...]:
    """Settle every leaf that the operation uses, with the reason for what it comes to."""
    rows = {"capture": _capture, "restore": _restore, "launch": _launch}[context.operation](resolved, context)
    namespace = resolved["process.namespace"]
    native = () if context.operation == "launch" else native_decisions(resolved)
    return native + tuple(
        Decision(
            name=path,
            requested=_text(resolved[path]),
            layer=resolved.provenance[path],
            effective=effective,
            reason=reason,
        )
        for path, effective, reason in [*rows, ("process.namespace", namespace, _NAMESPACE[namespace])]
    )


_Rows = list[tuple[str, str, str]]

_NAMESPACE = {
    "private": "own pid, mount and ipc namespaces: captured pids are free wherever it is restored",
    "host": "pids of the host: a restore needs the captured ones to be free",
}


def _launch(resolved: ResolvedPolicy, context: Context) -> _Rows:
    chosen = "recovery" if context.native and resolved["weights.mode"] == "recovery" else context.weights
    return [("weights.mode", chosen, context.reason)]


def _capture(resolved: ResolvedPolicy, context: Context) -> _Rows:
    graphs = ("kept", "a single worker's CUDA graphs are part of its CUDA state")
    if context.driver == "n580":
        graphs = ("recreate-from-plan", "every engine that is started captures its graphs by its own plan")
    if not context.gpu:
        graphs = ("disabled", "a host without GPU has no CUDA graphs")
        if resolved["graphs.policy"] == "recreate-from-plan":
            graphs = ("not used", graphs[1])
    elif context.workers > 1 and context.driver == "n610":
        graphs = ("disabled", "graphs of several workers hold NCCL state that cannot come back yet: it runs eagerly")
    if resolved["graphs.policy"] == "disabled":
        graphs = ("disabled", "the engine runs eagerly")
    calibration = "graphs are not recreated after a restore, so no shape has to be calibrated"
    if context.driver == "n580":
        calibration = "no graph is captured later than at the start of an engine, which warms its own shapes"
    return [
        *_weights_of_capture(resolved, context),
        *_scope(resolved, context),
        ("process.shape_calibration", "disabled", calibration),
        *_seeded(resolved),
        ("process.secrets", resolved["process.secrets"], _SECRETS[resolved["process.secrets"]]),
        ("graphs.policy", *graphs),
        ("io.image_compression", *image_compression(resolved["io.image_compression"])),
    ]


def _weights_of_capture(resolved: ResolvedPolicy, context: Context) -> _Rows:
    if context.native and context.driver == "n580":
        return _exported(resolved, context)
    if context.native:
        return _released(resolved, context)
    return _in_image(resolved, context) if context.driver == "n610" else _in_checkpoint(resolved, context)


def _scope(resolved: ResolvedPolicy, context: Context) -> _Rows:
    if context.driver == "n610":
        return []
    scope = resolved["process.artifact_scope"]
    return [("process.artifact_scope", scope, _SCOPE[scope])]


_SCOPE = {
    "portable": "the template stops before the engine's interpreter begins (pre_exec)",
    "target-local": "the template has imported the engine, and with it libraries of this machine (imported)",
}


def _exported(resolved: ResolvedPolicy, context: Context) -> _Rows:
    backend = resolved["io.capture_backend"]
    return [
        ("weights.mode", "native", f"{context.reason}, model bytes in the store {context.store}"),
        ("process.discard", "kv_cache", "a template has no KV cache"),
        *_unused(resolved, ("weights.recovery.enabled",), "an engine that is started reads its packs"),
        ("io.capture_backend", backend, _CAPTURE[backend]),
    ]


def _in_checkpoint(resolved: ResolvedPolicy, context: Context) -> _Rows:
    return [
        ("weights.mode", "checkpoint", f"an engine that is started loads its checkpoint: {context.reason}"),
        ("process.discard", "kv_cache", "a template has no KV cache"),
        *_unused(resolved, ("weights.recovery.enabled",), "the checkpoint is all there is"),
        *_unused(resolved, _WRITING, "CRIU writes the process image itself"),
    ]


def _seeded(resolved: ResolvedPolicy) -> _Rows:
    if not resolved["process.cache_seed"]:
        return []
    paths = resolved["process.cache_paths"]
    where = "those that the policy names" if paths else "those that the engine is launched with, below the managed root"
    rows = [("process.cache_seed", "true", f"the artifact carries derived caches: {where}")]
    return [*rows, ("process.cache_paths", _text(paths), "each goes back to where it was")] if paths else rows


def _in_image(resolved: ResolvedPolicy, context: Context) -> _Rows:
    where = "CUDA state, moved into host memory by the driver," if context.gpu else "process memory"
    discard = "nothing releases the KV cache before the dump: it is part of the image"
    return [
        ("weights.mode", "image", f"weights stay in {where} and so in the process image: {context.reason}"),
        ("process.discard", _text(resolved["process.discard"]), discard),
        *_unused(resolved, ("weights.recovery.enabled", *_RECOVERY), "weights come back with the process image"),
        *_unused(resolved, _WRITING, "CRIU writes the process image itself"),
    ]


_LOADING = tuple(
    f"weights.recovery.{leaf}"
    for leaf in ("loader_backend", "chunk_bytes", "staging_bytes", "queue_depth", "verify_bytes", "verify_model_bytes")
)
_FETCHING = ("weights.native.repository", "weights.native.revision")
_RECOVERY = (*_LOADING, *_FETCHING, "weights.recovery.derived_buffer_max_bytes")
_WRITING = (
    "io.capture_backend",
    "io.hibernate_write_mode",
    "io.reuse_blob",
    "io.queue_depth",
    "io.chunk_bytes",
)
_READING = (
    "io.hydration_backend",
    "io.hibernate_read_mode",
    "io.verify_mode",
    "io.queue_depth",
    "io.chunk_bytes",
)


def native_decisions(resolved: ResolvedPolicy) -> tuple[Decision, ...]:
    """Return what is settled of the native library: nothing, unless somebody chose one."""
    reason = "everything native of this operation: digests, page images, and transfers in ranks"
    return tuple(
        Decision(
            name=path,
            requested=resolved[path],
            layer=resolved.provenance[path],
            effective=resolved[path],
            reason=reason,
        )
        for path in ("io.native_library", "io.native_sha256")
        if resolved[path]
    )


def _released(resolved: ResolvedPolicy, context: Context) -> _Rows:
    discard = resolved["process.discard"]
    recovery = resolved["weights.recovery.enabled"]
    recorded = "the manifest that a recovery from the checkpoint needs is " + ("kept, too" if recovery else "not kept")
    mode = "recovery" if resolved["weights.mode"] == "recovery" else "native"
    also = ", and the checkpoint must do as well" if mode == "recovery" else ""
    return [
        ("weights.mode", mode, f"{context.reason}: model bytes go into the store {context.store}{also}"),
        ("weights.recovery.enabled", _text(recovery), recorded),
        *_unused(resolved, (*_LOADING[:-1], *_FETCHING), "it is about a restore", always=False),
        ("process.discard", _text(discard), "zero after a restore" if discard else "all of it stays in the image"),
        ("io.capture_backend", resolved["io.capture_backend"], _CAPTURE[resolved["io.capture_backend"]]),
    ]


_CAPTURE = {
    "auto": "around the page cache where layout and filesystem allow it",
    "python": "one thread, through the page cache",
    "buffered": "through the page cache",
    "direct": "around the page cache",
}

_SECRETS = {
    "refuse": "environment names that look secret stop the capture: memory of a process holds its environment",
    "allow": "environment names that look secret are captured with the process",
}


def _restore(resolved: ResolvedPolicy, context: Context) -> _Rows:
    verify = resolved["weights.verify"]
    how = {
        "evidence": "files unchanged since their last full check are admitted by stat, others by digest",
        "full": "every file is digested",
    }
    kernel = resolved["compatibility.kernel"]
    kernels = {
        "capability": "the kernel may differ where CRIU's check passes",
        "exact": "the kernel release must be the captured one",
    }
    return [
        ("weights.mode", context.provider or context.weights, context.reason),
        *_recovering(resolved, context),
        ("weights.verify", verify, how[verify]),
        ("compatibility.kernel", kernel, kernels[kernel]),
        *(_hydrated(resolved) if context.native else _unhydrated(resolved)),
    ]


_MATERIALIZE = {
    "async": "packs that the store lacks are begun once the question is answered",
    "required": "the restore succeeds when the store has every pack",
}


def _recovering(resolved: ResolvedPolicy, context: Context) -> _Rows:
    """Say what holds of the checkpoint, as far as somebody chose it."""
    chosen = [path for path in _LOADING if resolved.provenance[path] == "user"]
    rows = [("weights.recovery.derived_buffer_max_bytes", "not used", "it is about a capture")]
    rows += [(path, "not used", "a pack that is absent is told, and brought by whoever restores") for path in _FETCHING]
    used = context.recoverable
    why = "where the weights come from the checkpoint" if used else "the weights do not come from the checkpoint"
    return [
        *(row for row in rows if resolved.provenance[row[0]] == "user" and not (used and row[0] in _FETCHING)),
        *((path, _text(resolved[path]) if used else "not used", why) for path in chosen),
    ]


def _unhydrated(resolved: ResolvedPolicy) -> _Rows:
    return _unused(resolved, _READING, "CRIU reads the process image itself")


def _unused(resolved: ResolvedPolicy, paths: tuple[str, ...], why: str, *, always: bool = True) -> _Rows:
    """Say of what somebody chose that nothing uses it here; the first is told of even if nobody did, unless not so."""
    told = paths[:1] if always else ()
    return [(path, "not used", why) for path in paths if path in told or resolved.provenance[path] == "user"]


def _hydrated(resolved: ResolvedPolicy) -> _Rows:
    backend, verify = resolved["io.hydration_backend"], resolved["io.verify_mode"]
    backends = {
        "auto": "through the page cache what it holds by then, around it what it does not",
        "python": "one thread, through a mapping",
        "buffered": "through the page cache",
        "direct": "around the page cache; nothing is read ahead",
        "gds": "straight to the GPU; nothing is read ahead",
    }
    verified = {"inline": "digests are compared while bytes move", "preverified": "the evidence of each file stands"}
    asked = resolved["weights.native.materialize"]
    return [
        ("io.hydration_backend", backend, backends[backend]),
        ("io.verify_mode", verify, verified[verify]),
        *([] if asked == "off" else [("weights.native.materialize", asked, _MATERIALIZE[asked])]),
    ]


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "nothing"
    return str(value).lower() if isinstance(value, bool) else str(value)
