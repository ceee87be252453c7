"""``bootstrap-index.json``: the layout that a load has filled, by name, for an engine that is started anew.

The one rule: it says where things lay and never where they must lie; an allocation here is one storage of a process
that is gone, known by the tensors in it (rules bootstrap.1 to bootstrap.3, ``docs/format/manifest.md``).
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Literal

from attrs import field, frozen

from coldsnap.artifact import canonical, record
from coldsnap.artifact.capsule import WORKER
from coldsnap.artifact.manifest import NativeManifest, RecoveryManifest
from coldsnap.artifact.private import read_small
from coldsnap.errors import FormatError, IntegrityError

__all__ = ["BOOTSTRAP_INDEX", "BootstrapIndex", "BootstrapTensor"]

BOOTSTRAP_INDEX = "bootstrap-index.json"


@frozen(kw_only=True)
class BootstrapTensor:
    """One parameter or persistent buffer.

    Attributes:
        name: With dots.
        role: What it is in its module.
        dtype: As safetensors names it.
        shape: Elements of each dimension.
        stride: Distance of each dimension, in elements.
        allocation: Index into the allocations of the native manifest.
        offset: Of the first element in the allocation, bytes.
    """

    name: str
    role: Literal["parameter", "buffer"]
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    allocation: int = field(validator=record.at_least(0))
    offset: int = field(validator=record.at_least(0))


@frozen(kw_only=True)
class BootstrapIndex:
    """The tensors of one worker.

    Attributes:
        capture_id: Of the artifact.
        worker: Whose.
        tensors: Ascending by name.
    """

    MAX_BYTES: ClassVar[int] = 256 << 20

    format: Literal[1] = 1
    kind: Literal["coldsnap-bootstrap-index"] = "coldsnap-bootstrap-index"
    capture_id: str
    worker: str = field(validator=WORKER)
    tensors: tuple[BootstrapTensor, ...]

    def __attrs_post_init__(self) -> None:
        """Check the order of bootstrap.2."""
        for before, after in pairwise(self.tensors):
            if before.name >= after.name:
                raise record.Broken("bootstrap.2", f"{after.name!r} is there twice, or not in order")

    def encode(self) -> bytes:
        """Return the bytes of its file."""
        return canonical.encode(record.write_object(self))

    @classmethod
    def read(cls, path: Path, *, sha256: str) -> BootstrapIndex:
        """Read an index whose digest is known.

        Args:
            path: Its file, private.
            sha256: Digest; the bytes are compared with it before they are looked at.

        Raises:
            IntegrityError: They are other bytes.
            FormatError: A rule is broken.
        """
        data = read_small(path, max_bytes=cls.MAX_BYTES)
        if (actual := canonical.sha256_of(data)) != sha256:
            raise IntegrityError("wrong content (rule evidence.5)", path=str(path), expected=sha256, actual=actual)
        return record.read(cls, canonical.decode(data, path=str(path), max_bytes=cls.MAX_BYTES), path=str(path))

    def require_same_capture(self, manifest: NativeManifest | RecoveryManifest) -> None:
        """Check bootstrap.1, and that the tensors and the manifest's allocations belong together (bootstrap.2).

        Raises:
            FormatError: They do not.
        """
        if (self.capture_id, self.worker) != (manifest.capture_id, manifest.worker):
            text = (
                f"of {self.worker} in {self.capture_id}, the manifest is of {manifest.worker} in {manifest.capture_id}"
            )
            raise FormatError(text, path=BOOTSTRAP_INDEX, rule="bootstrap.1")
        sizes = {index: allocation.size for index, allocation in enumerate(manifest.allocations)}
        if outside := [one.name for one in self.tensors if one.offset >= sizes.get(one.allocation, 0)]:
            text = f"{', '.join(outside[:3])} lie outside of every allocation"
            raise FormatError(text, path=BOOTSTRAP_INDEX, rule="bootstrap.2")
        if {one.allocation for one in self.tensors} != set(sizes):
            raise FormatError("an allocation has no tensor", path=BOOTSTRAP_INDEX, rule="bootstrap.2")
