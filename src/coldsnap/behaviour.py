"""Which values of the policy have behaviour, and what the automatic ones come to.

The one rule: a value that somebody chose either changes what is done or is refused with what works instead. Only
``auto``, and defaults nobody chose, may come to something else, and then the plan says to what and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

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
    """

    operation: str
    gpu: bool
    workers: int


class _Any:
    """Every legal value of the leaf has behaviour."""


ANY = _Any()

# Leaves not named here have no behaviour at all: setting one is refused. An entry goes when its last value works (ANY).
WORKING: Mapping[str, tuple[Any, ...] | _Any] = {
    "profile": ("default",),
    "compatibility.kernel": ANY,
    "compatibility.driver": ANY,
    "compatibility.enforce_captured_driver_floor": ANY,
    "weights.mode": ("auto", "image"),
    "weights.native.materialize": ("off",),
    "weights.recovery.enabled": (False,),
    "weights.verify": ANY,
    "process.discard": ((),),
    "process.shape_calibration": ("auto", "disabled"),
    "process.artifact_scope": ("portable",),
    "process.cache_seed": (False,),
    "process.namespace": ANY,
    "process.secrets": ANY,
    "graphs.policy": ("auto", "disabled"),
    "graphs.asynchronous": (False,),
    "io.hydration_backend": ("auto",),
    "io.capture_backend": ("auto",),
    "io.image_compression": ("auto", "none"),
}


def engine_defaults() -> Mapping[str, Any]:
    """Return the engine layer: defaults of the library that have no behaviour give way to what happens in fact."""
    return {"process.discard": (), "process.cache_seed": False}


def runs_eagerly(resolved: ResolvedPolicy, context: Context) -> bool:
    """Tell whether an engine must be launched without CUDA graphs."""
    return resolved["graphs.policy"] == "disabled" or (context.gpu and context.workers > 1)


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
    captures = context.operation == "capture"
    rows = _capture(resolved, context) if captures else _restore(resolved)
    common = [("process.namespace", resolved["process.namespace"], _NAMESPACE[resolved["process.namespace"]])]
    return tuple(
        Decision(
            name=path,
            requested=_text(resolved[path]),
            layer=resolved.provenance[path],
            effective=effective,
            reason=reason,
        )
        for path, effective, reason in [*rows, *(common if context.operation != "stop" else [])]
    )


_NAMESPACE = {
    "private": "own pid, mount and ipc namespaces: captured pids are free wherever it is restored",
    "host": "pids of the host: a restore needs the captured ones to be free",
}


def _capture(resolved: ResolvedPolicy, context: Context) -> list[tuple[str, str, str]]:
    where = "CUDA state, moved into host memory by the driver," if context.gpu else "process memory"
    graphs = ("kept", "a single worker's CUDA graphs are part of its CUDA state")
    if not context.gpu:
        graphs = ("disabled", "a host without GPU has no CUDA graphs")
    elif context.workers > 1:
        graphs = ("disabled", "graphs of several workers hold NCCL state that cannot come back yet: it runs eagerly")
    if resolved["graphs.policy"] == "disabled":
        graphs = ("disabled", "the engine runs eagerly")
    discard = "nothing releases the KV cache before the dump: it is part of the image"
    calibration = "graphs are not recreated after a restore, so no shape has to be calibrated"
    return [
        ("weights.mode", "image", f"weights stay in {where} and so in the process image"),
        ("weights.recovery.enabled", "false", "weights come back with the process image: none are loaded again"),
        ("process.discard", _text(resolved["process.discard"]), discard),
        ("process.shape_calibration", "disabled", calibration),
        ("process.secrets", resolved["process.secrets"], _SECRETS[resolved["process.secrets"]]),
        ("graphs.policy", *graphs),
        ("io.capture_backend", "not used", "CRIU writes the process image itself"),
        ("io.image_compression", "none", "images are restored as CRIU wrote them"),
    ]


_SECRETS = {
    "refuse": "environment names that look secret stop the capture: memory of a process holds its environment",
    "allow": "environment names that look secret are captured with the process",
}


def _restore(resolved: ResolvedPolicy) -> list[tuple[str, str, str]]:
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
        ("weights.verify", verify, how[verify]),
        ("compatibility.kernel", kernel, kernels[kernel]),
        ("io.hydration_backend", "not used", "CRIU reads the process image itself"),
    ]


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "nothing"
    return str(value).lower() if isinstance(value, bool) else str(value)
