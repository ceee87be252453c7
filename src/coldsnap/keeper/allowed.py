"""Which names of its environment a template takes from the destination.

The one rule: the standard library alone, for the launcher runs without anything else; and every name here says where a
process is placed or how it reaches its peers, never what it computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = [
    "MAX_VALUE_BYTES",
    "RUNTIME_NAMES",
    "TRANSPORT_NAMES",
    "TRANSPORT_PREFIXES",
    "is_transport",
    "placed",
    "problem",
]

RUNTIME_NAMES = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "HF_HOME",
        "HF_HUB_CACHE",
        "NVIDIA_VISIBLE_DEVICES",
        "OMP_NUM_THREADS",
        "TZ",
        "XDG_CACHE_HOME",
    }
)

TRANSPORT_PREFIXES = ("NCCL_", "UCX_", "OMPI_MCA_")
TRANSPORT_NAMES = frozenset({"GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "VLLM_HOST_IP", "HOST_IP", "SGLANG_HOST_IP"})

MAX_VALUE_BYTES = 4096


def is_transport(name: str) -> bool:
    """Tell whether a name says how peers are reached."""
    return name in TRANSPORT_NAMES or name.startswith(TRANSPORT_PREFIXES)


def problem(variables: Mapping[str, object], *, transport: bool) -> str | None:
    """Return what is wrong with names and values that a destination sets; None when nothing is.

    Args:
        variables: What it sets.
        transport: Whether they are of the network; else of the placement.
    """
    for name, value in variables.items():
        if not (is_transport(name) if transport else name in RUNTIME_NAMES):
            return f"{name} is not one of the names that a template takes from its destination"
        if not isinstance(value, str) or "\0" in value or len(value.encode()) > MAX_VALUE_BYTES:
            return f"the value of {name} must be a text without NUL of at most {MAX_VALUE_BYTES} bytes"
    return None


def placed(
    environment: Mapping[str, str], runtime: Mapping[str, str], transport: Mapping[str, str] | None
) -> dict[str, str]:
    """Return an environment with the names of its destination, and none that belonged to the capture's place.

    Args:
        environment: Of the capture.
        runtime: Names of the placement.
        transport: Names of the network; None keeps those of the capture.
    """
    gone: Iterable[str] = {*RUNTIME_NAMES}
    if transport is not None:
        gone = {*gone, *(name for name in environment if is_transport(name))}
    return {name: value for name, value in environment.items() if name not in gone} | {**runtime, **(transport or {})}
