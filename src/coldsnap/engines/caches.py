"""Where an engine keeps its derived caches: compiled kernels, and plans that a start has made.

The one rule: a directory of its own for each engine as it was described, the same at every launch, so that a cache is
warm the next time and an artifact never carries another engine's.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping

from coldsnap.artifact.canonical import digest
from coldsnap.policy.process import MANAGED_CACHE_ROOT

__all__ = ["CACHES", "ENABLED", "bound", "managed", "planned"]

CACHES: Mapping[str, str] = {
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}
"""Names of the environment that engines and compilers look at, and what is theirs below the engine's directory."""

ENABLED = "VLLM_ENABLE_STARTUP_PLAN"
SHORTFALL = "COLDSNAP_STARTUP_PLAN_MAX_SHORTFALL_BYTES"
MAX_SHORTFALL_BYTES = 512 << 20


def bound(spec: str) -> Mapping[str, str]:
    """Return the environment that lets an engine keep its caches below the managed root.

    Args:
        spec: The engine as it was described, as text.
    """
    own = posixpath.join(MANAGED_CACHE_ROOT, digest(spec).removeprefix("sha256:")[:16])
    return {name: posixpath.join(own, part) for name, part in CACHES.items()}


def planned(kind: str) -> Mapping[str, str]:
    """Return the environment that lets an engine keep what its start has found out in its cache, and take it again.

    Args:
        kind: The engine's kind.
    """
    return {ENABLED: "1", SHORTFALL: str(MAX_SHORTFALL_BYTES)} if kind == "vllm" else {}


def managed(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the caches of an engine that lie below the managed root, by name: what it was launched with."""
    return {
        part: environment[name]
        for name, part in CACHES.items()
        if environment.get(name, "").startswith(f"{MANAGED_CACHE_ROOT}/")
    }
