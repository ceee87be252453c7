"""Where the model's weights come from at restore: a native pack, the original safetensors, or the process image.

The one rule: an explicit provider or loader never degrades; only ``auto`` chooses, and the receipt says what it chose.
"""

# leaf() and part() return attrs fields, which no two instances share.
# ruff: noqa: RUF009

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from attrs import frozen

from coldsnap.policy.leaf import Section, leaf, part, section
from coldsnap.policy.limits import GIB, MIB, PAGE_BYTES, Flag, FrozenMap, Limit, OneOf, Pattern, Span, found

__all__ = ["NativeWeights", "RecoveryWeights", "Weights"]

WeightsMode = Literal["auto", "native", "recovery", "cache-only-auto", "image"]
Materialize = Literal["off", "async", "required"]
LoaderBackend = Literal["auto", "direct", "buffered", "mmap", "torch"]
Verify = Literal["evidence", "full"]

_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_REPOSITORY = rf"{_ID}(/{_ID})?"


@frozen
class WorkerFiles(Limit):
    """A table of worker id to a relative path inside the repository."""

    type_name = "table of text"

    @property
    def allowed(self) -> str:
        """The shape in words."""
        return "worker id = relative path in the repository"

    def freeze(self, value: Any) -> Any:
        """Take any table of text; what is in it is judged afterwards."""
        if isinstance(value, Mapping) and all(type(key) is str for key in value):
            return FrozenMap(value)
        return value

    def problem(self, value: Any) -> str | None:
        """Refuse ids that are none, and paths that leave the repository."""
        if not isinstance(value, FrozenMap):
            return f"expected a table ({self.allowed}); {found(value)}"
        for worker, path in value.items():
            if not re.fullmatch(_ID, worker):
                return f"expected worker ids of letters, digits, dots, dashes; {found(worker)}"
            if not _is_inside(path):
                return f"expected a relative path without .. for worker {worker}; {found(path)}"
        return None

    def samples(self, default: Any) -> tuple[Any, ...]:
        """Return the empty table and one with a worker."""
        return (default, FrozenMap({"worker-0": "model-payloads/worker-0.pack"}))


def _is_inside(path: object) -> bool:
    if type(path) is not str or not path or not path.isprintable() or path.startswith("/"):
        return False
    return posixpath.normpath(path) == path and path.split("/")[0] not in ("..", ".")


@section("weights.native")
@frozen(kw_only=True, repr=False)
class NativeWeights(Section):
    """Published packs: the model's bytes in the order of the engine's own memory."""

    repository: str | None = leaf(
        None,
        Pattern(_REPOSITORY, "a repository, owner/name", "example/qwen3-8b-packs"),
        doc="Hugging Face repository that holds the published packs; needs revision.",
    )
    revision: str | None = leaf(
        None,
        Pattern(r"[0-9a-f]{40}", "a commit of 40 lowercase hexadecimal digits", "0123456789abcdef" * 2 + "01234567"),
        doc="Immutable commit of the repository.",
    )
    files_by_worker: Mapping[str, str] = leaf(
        FrozenMap({}),
        WorkerFiles(),
        doc="Path of each worker's pack in the repository; a plan that uses it needs every worker in it. "
        "Empty: the paths recorded in the artifact.",
    )
    materialize: Materialize = leaf(
        "off",
        OneOf(get_args(Materialize)),
        doc="Write the native pack while recovering. off: never. async: after the first token. "
        "required: before the restore reports success; excludes a warm restore. SGLang has off only.",
    )


@section("weights.recovery")
@frozen(kw_only=True, repr=False)
class RecoveryWeights(Section):
    """Reading the original safetensors of the pinned model revision back into the captured memory."""

    enabled: bool = leaf(
        True, Flag(), doc="Record at capture what recovery needs; weights.mode auto and recovery use it."
    )
    loader_backend: LoaderBackend = leaf(
        "auto",
        OneOf(get_args(LoaderBackend)),
        doc="How safetensors are read. auto looks at the filesystem behind each opened file. "
        "direct never degrades. mmap and torch are for qualification.",
    )
    chunk_bytes: int = leaf(64 * MIB, Span(PAGE_BYTES, None, PAGE_BYTES), unit="bytes", doc="Size of one staged read.")
    staging_bytes: int = leaf(
        256 * MIB,
        Span(PAGE_BYTES, None, PAGE_BYTES),
        unit="bytes",
        doc="Largest staging slab in GPU memory, per rank.",
    )
    collective_bytes: int = leaf(
        64 * MIB,
        Span(PAGE_BYTES, None, PAGE_BYTES),
        unit="bytes",
        doc="Largest buffer of one broadcast between ranks.",
    )
    queue_depth: int = leaf(4, Span(1, 64), unit="reads", doc="Staged reads in flight, per rank.")
    pipeline_depth: int = leaf(
        1,
        Span(1, 2),
        unit="slabs",
        doc="1: read a batch, then broadcast it. 2: read the next batch meanwhile, for one more slab of "
        "staging_bytes per rank.",
    )
    distributed: bool = leaf(
        True,
        Flag(),
        doc="Let the ranks share out the reading and broadcast what they read; mmap ignores it.",
    )
    verify_bytes: int = leaf(
        0,
        Span(0, 4096),
        unit="bytes",
        doc="Bytes at the head and tail of every tensor compared after hydration and broadcast; 0: none.",
    )
    verify_model_bytes: int = leaf(
        0,
        Span(0, 4096),
        unit="bytes",
        doc="Bytes at the head and tail of every parameter and buffer sampled before sleep and compared after "
        "recovery; 0: none.",
    )
    derived_buffer_max_bytes: int = leaf(
        64 * MIB,
        Span(0, GIB),
        unit="bytes",
        doc="Largest total of small derived buffers kept in the process image; a capture that needs more fails.",
    )


@section("weights")
@frozen(kw_only=True, repr=False)
class Weights(Section):
    """Where the model's weights come from, and how they are verified."""

    mode: WeightsMode = leaf(
        "auto",
        OneOf(get_args(WeightsMode)),
        doc="auto: native when its packs can be had, else recovery. cache-only-auto: the same, but never fetches. "
        "native, recovery: that or nothing. image: the weights stay in the process image, which is what auto means "
        "where an engine has no memory provider.",
    )
    verify: Verify = leaf(
        "evidence",
        OneOf(get_args(Verify)),
        doc="evidence: files whose device, inode, size and mtime are those of an earlier full hash are admitted by "
        "stat. full: every file is hashed at every restore.",
    )
    native: NativeWeights = part(NativeWeights)
    recovery: RecoveryWeights = part(RecoveryWeights)
