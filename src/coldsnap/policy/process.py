"""What the process image holds, and in which namespaces the engine lives.

The one rule: caches are seeded only below roots that are known to be derived data, written the same on every machine
(``~`` for the engine's home), so that an artifact never carries a user's files.
"""

# leaf() and part() return attrs fields, which no two instances share.
# ruff: noqa: RUF009

from __future__ import annotations

import posixpath
from itertools import combinations
from typing import Any, Literal, get_args

from attrs import frozen

from coldsnap.policy.leaf import Section, leaf, section
from coldsnap.policy.limits import Flag, Limit, OneOf, Subset, found

__all__ = ["CACHE_ROOTS", "MANAGED_CACHE_ROOT", "Process"]

Region = Literal["kv_cache"]
ShapeCalibration = Literal["auto", "enabled", "disabled"]
ArtifactScope = Literal["portable", "target-local"]
Namespace = Literal["private", "host"]
Secrets = Literal["refuse", "allow"]

MANAGED_CACHE_ROOT = "/var/cache/coldsnap/runtime"
CACHE_ROOTS = (
    "/var/cache/coldsnap",
    "/tmp/coldsnap-derived-cache",  # noqa: S108  a name that engines use, not a temporary file of ours
    "/tmp/torchinductor_root",  # noqa: S108
    "~/.cache/flashinfer",
    "~/.cache/torch",
    "~/.cache/torch_extensions",
    "~/.cache/vllm",
    "~/.triton/cache",
)


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root + "/")


@frozen
class CachePaths(Limit):
    """Directories of derived caches: clean, below an allowed root, none inside another."""

    type_name = "list of text"

    @property
    def allowed(self) -> str:
        """The rule in words."""
        return "directories below " + ", ".join(CACHE_ROOTS)

    def freeze(self, value: Any) -> Any:
        """Take a list for a tuple."""
        return tuple(value) if type(value) is list else value

    def problem(self, value: Any) -> str | None:
        """Refuse anything that is not such a list, naming the first path that breaks the rule."""
        if type(value) is not tuple:
            return f"expected a list of directories; {found(value)}"
        for path in value:
            if problem := self._of_one(path):
                return problem
        for one, other in combinations(sorted(value), 2):
            if _is_below(other, one):
                how = "twice" if one == other else f"although {one} already covers it"
                return f"expected directories that do not overlap; found {other} {how}"
        return None

    @staticmethod
    def _of_one(path: object) -> str | None:
        if type(path) is not str or not path.isprintable() or not path.startswith(("/", "~/")):
            return f"expected an absolute path, or one that starts with ~/; {found(path)}"
        if posixpath.normpath(path) != path or path.startswith("//"):
            return f"expected a clean path (no . or .. or doubled or trailing slash); {found(path)}"
        if not any(_is_below(path, root) for root in CACHE_ROOTS):
            return f"expected a directory below one of {', '.join(CACHE_ROOTS)}; {found(path)}"
        return None

    def samples(self, default: Any) -> tuple[Any, ...]:
        """Return the default and two directories."""
        return (default, (f"{MANAGED_CACHE_ROOT}/vllm", "~/.triton/cache"))


@section("process")
@frozen(kw_only=True, repr=False)
class Process(Section):
    """What the process image holds, and in which namespaces the engine lives."""

    discard: tuple[Region, ...] = leaf(
        ("kv_cache",),
        Subset(get_args(Region)),
        doc="Memory regions whose contents are thrown away at capture and are zero after restore.",
    )
    shape_calibration: ShapeCalibration = leaf(
        "auto",
        OneOf(get_args(ShapeCalibration)),
        doc="Compile the engine's planned graph shapes at capture. auto: when graphs.asynchronous is true. "
        "enabled: needs graphs.asynchronous.",
    )
    artifact_scope: ArtifactScope = leaf(
        "portable",
        OneOf(get_args(ArtifactScope)),
        doc="portable: for every compatible machine. target-local: an n580 vLLM template with the engine already "
        "imported, for this machine and driver only.",
    )
    cache_seed: bool = leaf(True, Flag(), doc="Carry the engine's derived caches (compiled kernels) in the artifact.")
    cache_paths: tuple[str, ...] = leaf(
        (),
        CachePaths(),
        doc=f"The cache directories to carry. Empty: the managed root, {MANAGED_CACHE_ROOT}. "
        "Must stay empty when cache_seed is false.",
    )
    namespace: Namespace = leaf(
        "private",
        OneOf(get_args(Namespace)),
        doc="private: own pid, mount and ipc namespaces, with an own /dev/shm. "
        "host: the host's; the captured pids must be free at restore.",
    )
    secrets: Secrets = leaf(
        "refuse",
        OneOf(get_args(Secrets)),
        doc="Refuse or allow a capture whose environment or arguments look like holding secrets; "
        "errors show names, never values.",
    )

    @property
    def seeded_paths(self) -> tuple[str, ...]:
        """The cache directories an artifact carries: none, those listed, or the managed root."""
        return (self.cache_paths or (MANAGED_CACHE_ROOT,)) if self.cache_seed else ()
