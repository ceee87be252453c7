"""A committed artifact, opened for reading.

The one rule: opening reads the descriptor and nothing else (milliseconds, whatever the size); its bytes count only
after :meth:`Artifact.verify`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from attrs import field, frozen

from coldsnap.artifact import descriptor as documents
from coldsnap.artifact.capsule import FileRecord
from coldsnap.artifact.compatibility import Comparison, CompatibilityPolicy, Target, compare
from coldsnap.artifact.descriptor import MAX_DESCRIPTOR_BYTES, Descriptor
from coldsnap.artifact.durable import COMMITTED, is_uncommitted
from coldsnap.artifact.evidence import TreeAdmission, Verify, admit_tree
from coldsnap.artifact.lanes import Lanes
from coldsnap.artifact.private import open_directory, read_small
from coldsnap.errors import ArtifactError, FormatError, IntegrityError

__all__ = ["Artifact"]


@frozen
class Artifact:
    """A committed artifact.

    Attributes:
        path: Its directory, absolute.
        descriptor: What ``artifact.json`` says.
        digest: ``sha256:<hex>``, the identity of the artifact.
    """

    path: Path
    descriptor: Descriptor = field(repr=False)
    digest: str

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Artifact:
        """Open an artifact.

        Args:
            path: Its directory.

        Raises:
            ArtifactError: There is none, or its capture never committed it.
            FormatError: The directory is not private, or the descriptor breaks a rule.
            IntegrityError: The descriptor's seal does not match.
        """
        try:
            root = Path(os.path.abspath(path))
            found, uncommitted = root.exists(), is_uncommitted(root)
        except OSError as error:
            raise ArtifactError(
                f"{path!r} cannot be looked at ({error}); open it as the user who captured it"
            ) from error
        if not found:
            raise ArtifactError(f"there is no artifact at {root}")
        if uncommitted:
            raise ArtifactError(
                f"{root} is not committed: its capture is running or was interrupted (rule descriptor.10)"
            )
        if not (root / COMMITTED).exists():
            raise ArtifactError(f"{root} is not an artifact: it has no {COMMITTED} (rule descriptor.10)")
        os.close(open_directory(root))
        data = read_small(root / COMMITTED, max_bytes=MAX_DESCRIPTOR_BYTES)
        document, seal = documents.decode(data, path=str(root / COMMITTED))
        return cls(root, document, seal)

    @property
    def size_bytes(self) -> Mapping[str, int]:
        """Size by kind: images, volatile, residual, manifests, cache_seeds, packs (in the store)."""
        sizes: Counter[str] = Counter()
        for kind, _, size in self.contents():
            sizes[kind] += size
        return dict(sizes)

    @property
    def packs(self) -> frozenset[str]:
        """The digests of the packs it names."""
        payloads = self.descriptor.weights.payloads
        return frozenset(item.sha256 for item in payloads.objects) if payloads is not None else frozenset()

    def contents(self) -> Iterator[tuple[str, str, int]]:
        """Yield kind, digest and size of every file, and of every pack once."""
        for kind, file in self._kinds():
            yield kind, file.sha256, file.bytes
        payloads = self.descriptor.weights.payloads
        for sha256, size in {item.sha256: item.bytes for item in payloads.objects}.items() if payloads else ():
            yield "packs", sha256, size

    def _kinds(self) -> Iterator[tuple[str, FileRecord]]:
        for unit in self.descriptor.capsule.units:
            for file in unit.files:
                yield ("images" if file.path.startswith(f"{unit.images}/") else "volatile"), file
        for worker in self.descriptor.weights.workers:
            for file in worker.files:
                yield ("residual" if file is worker.residual else "manifests"), file
        if (archive := self.descriptor.weights.start_files) is not None:
            yield "start_files", archive
        for seed in self.descriptor.cache_seeds:
            for file in seed.files:
                yield "cache_seeds", file

    def verify(
        self, verify: Verify = "evidence", *, threads: int | None = None, lanes: Lanes | None = None
    ) -> TreeAdmission:
        """Admit every file of the artifact, and demand that its capsules hold nothing else.

        Args:
            verify: ``evidence`` hashes what has no valid evidence, ``full`` hashes all.
            threads: Hashing threads; None: all cores.
            lanes: Who hashes several files at once on each core; None: nobody.

        Raises:
            IntegrityError: A file is missing or not the captured one.
            FormatError: A file is not private, or a capsule holds a file that is not listed.
        """
        for unit in self.descriptor.capsule.units:
            listed = {file.path for file in unit.files}
            try:
                odd = next((path for path in _files_below(self.path, unit.path) if path not in listed), None)
            except OSError as error:
                at = str(self.path / unit.path)
                raise IntegrityError(
                    f"cannot be read ({error.strerror})", path=at, expected="files", actual="an error"
                ) from error
            if odd is not None:
                raise FormatError("the file is not listed", path=str(self.path / odd), rule="descriptor.9")
        return admit_tree(self.path, self.descriptor.files, verify, threads=threads, lanes=lanes)

    def compare(self, target: Target, policy: CompatibilityPolicy) -> Comparison:
        """Compare what was captured with what is there: mismatches, and notes for the receipt."""
        return compare(self.descriptor, target, policy)

    def check_compatibility(self, target: Target, policy: CompatibilityPolicy) -> list[str]:
        """Return every reason, in words, why this artifact cannot be restored on ``target``."""
        return list(self.compare(target, policy).mismatches)


def _files_below(root: Path, relative: str) -> Iterator[str]:
    with os.scandir(root / relative) as entries:
        for entry in entries:
            path = f"{relative}/{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                yield from _files_below(root, path)
            else:
                yield path
