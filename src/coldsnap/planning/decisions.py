"""What each leaf of the policy comes to for an operation, and why.

The one rule: only ``auto``, and defaults that nobody chose, may come to something else than was written, and then the
plan says to what and why.
"""

from __future__ import annotations

from coldsnap.behaviour import Context
from coldsnap.drivers.image_profile import image_compression
from coldsnap.plan import Decision
from coldsnap.policy import ResolvedPolicy

__all__ = ["decide", "native_decisions"]


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
    mode, also, recorded = _recorded(resolved)
    return [
        ("weights.mode", mode, f"{context.reason}, model bytes in the store {context.store}{also}"),
        ("process.discard", "kv_cache", "a template has no KV cache"),
        ("weights.recovery.enabled", _text(resolved["weights.recovery.enabled"]), recorded),
        *_unused(resolved, (*_LOADING, *_FETCHING), "it is about a restore", always=False),
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
    mode, also, recorded = _recorded(resolved)
    return [
        ("weights.mode", mode, f"{context.reason}: model bytes go into the store {context.store}{also}"),
        ("weights.recovery.enabled", _text(resolved["weights.recovery.enabled"]), recorded),
        *_unused(resolved, (*_LOADING[:-1], *_FETCHING), "it is about a restore", always=False),
        ("process.discard", _text(discard), "zero after a restore" if discard else "all of it stays in the image"),
        ("io.capture_backend", resolved["io.capture_backend"], _CAPTURE[resolved["io.capture_backend"]]),
    ]


def _recorded(resolved: ResolvedPolicy) -> tuple[str, str, str]:
    """Return what ``weights.mode`` comes to at a capture, what that demands, and what is kept for a recovery."""
    kept = "kept, too" if resolved["weights.recovery.enabled"] else "not kept"
    recorded = f"the manifest that a recovery from the checkpoint needs is {kept}"
    if resolved["weights.mode"] == "recovery":
        return "recovery", ", and the checkpoint must do as well", recorded
    return "native", "", recorded


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
