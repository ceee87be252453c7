"""Writing an artifact: private, locked, hashed, and committed by one rename.

The one rule: the descriptor is written last, about files that already have their final bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coldsnap.artifact.capsule import FileRecord
from coldsnap.artifact.committed import Artifact
from coldsnap.artifact.descriptor import Descriptor
from coldsnap.artifact.durable import COMMITTED, FaultPoint, StagedDirectory, staged_directory, unharmed
from coldsnap.artifact.evidence import Admitted, PrivateFile, identity_of, write_evidence
from coldsnap.artifact.lanes import Lanes, sha256_streams
from coldsnap.errors import ArtifactError

__all__ = ["ArtifactWriter"]


class ArtifactWriter:
    """An artifact in the making.

    Use as::

        with ArtifactWriter.create(output) as writer:
            dump_into(writer.directory("capsule/rank0/images"))
            files = writer.seal("capsule/rank0")
            artifact = writer.commit(descriptor)

    Leaving the block without a commit removes everything, unless :meth:`leave` was called. A killed process leaves a
    directory that no one takes for an artifact and that the next capture to the same output removes.
    """

    def __init__(self, staged: StagedDirectory, at: FaultPoint, lanes: Lanes | None) -> None:
        self._lanes = lanes
        self.path = staged.path
        self._staged = staged
        self._at = at
        self._sealed: dict[str, Admitted] = {}

    @classmethod
    @contextmanager
    def create(
        cls, output: str | os.PathLike[str], *, at: FaultPoint = unharmed, lanes: Lanes | None = None
    ) -> Iterator[ArtifactWriter]:
        """Begin an artifact at ``output``; missing parent directories are made, private.

        Args:
            output: Where it will be.
            at: Fault point, called before every write, fsync and rename.
            lanes: Who hashes several files at once on each core; None: nobody.

        Raises:
            ArtifactError: The output exists, lies in an artifact or cannot be made, or another capture is writing it.
        """
        final = Path(os.path.abspath(output))
        if around := next((parent for parent in final.parents if (parent / COMMITTED).exists()), None):
            raise ArtifactError(f"the output {final} lies in the artifact {around}; choose another")
        try:
            final.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ArtifactError(f"the output {final} cannot be created: {error.strerror}; choose another") from error
        with staged_directory(final, at=at) as staged:
            yield cls(staged, at, lanes)

    def directory(self, relative: str) -> Path:
        """Make a private directory inside the artifact, with its parents, and return its path."""
        path = self.path
        for part in relative.split("/"):
            path /= part
            path.mkdir(mode=0o700, exist_ok=True)
        return path

    def seal(self, relative: str, *, keep_mtimes: bool = False, threads: int | None = None) -> tuple[FileRecord, ...]:
        """Make every file below a directory private, hash it and remember its evidence.

        Args:
            relative: A directory inside the artifact.
            keep_mtimes: Record modification times (cache seeds).
            threads: Hashing threads; None: all cores.

        Returns:
            The records for the descriptor, ordered by path. The files must not change any more.

        Raises:
            ArtifactError: Something there is neither a regular file nor a directory.
        """
        paths = sorted(self._private_files(relative))
        at = [self.path / path for path in paths]
        streams = [PrivateFile(size=path.lstat().st_size, name=str(path), label=str(path)) for path in at]
        digests = sha256_streams(streams, threads=threads, lanes=self._lanes)
        for path, stream, digest in zip(paths, streams, digests, strict=True):
            self._sealed[path] = _admitted(path, stream.status, digest)
        return tuple(
            FileRecord(
                path=path,
                bytes=self._sealed[path].bytes,
                sha256=self._sealed[path].sha256,
                mtime_ns=self._sealed[path].identity.mtime_ns if keep_mtimes else None,
            )
            for path in paths
        )

    def commit(self, descriptor: Descriptor) -> Artifact:
        """Write evidence and descriptor, make all durable, and let ``artifact.json`` appear.

        Args:
            descriptor: Lists exactly the sealed files.

        Raises:
            ArtifactError: It lists something else, or somebody has removed what was written.
        """
        listed = {file.path for file in descriptor.files}
        if listed != self._sealed.keys():
            odd = ", ".join(sorted(listed ^ self._sealed.keys())[:5])
            raise ArtifactError(f"the descriptor and the sealed files of {self.path} do not agree: {odd}")
        try:
            write_evidence(self.path, list(self._sealed.values()), at=self._at)
            self._staged.commit(descriptor.encode())
        except FileNotFoundError as error:
            if self.path.exists():
                raise
            raise ArtifactError(
                f"the output {self.path} was removed before it was complete: the keeper of its engine has ended, and "
                "the capture was undone; capture again"
            ) from error
        return Artifact.open(self.path)

    def leave(self) -> None:
        """Let everything lie there uncommitted: someone still needs what was written."""
        self._staged.stays = True

    def _private_files(self, relative: str) -> Iterator[str]:
        for directory, names, files in os.walk(self.path / relative):
            for name in (*names, *files):
                path = Path(directory, name)
                if path.is_symlink() or not (path.is_file() or path.is_dir()):
                    raise ArtifactError(f"{path} is not a regular file; an artifact holds nothing else")
                path.chmod(0o700 if path.is_dir() else 0o600)
            yield from (os.path.relpath(os.path.join(directory, name), self.path) for name in files)


def _admitted(path: str, status: os.stat_result, digest: str) -> Admitted:
    return Admitted(
        path=path,
        bytes=status.st_size,
        sha256=digest,
        reason="full",
        identity=identity_of(status),
        ctime_ns=status.st_ctime_ns,
    )
