"""Derived-cache seeds: compiled kernels and plans that an engine finds warm, with the mtimes its compilers compare.

The one rule: a seed is copied whole or not at all, and only regular files belong to one (rule manifest.9,
``docs/format/manifest.md``).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

from coldsnap.artifact.capsule import CacheSeed, FileRecord
from coldsnap.artifact.committed import Artifact
from coldsnap.artifact.durable import locked, remove_tree
from coldsnap.artifact.private import open_private
from coldsnap.artifact.writer import ArtifactWriter
from coldsnap.errors import ArtifactError, IntegrityError

__all__ = ["Planted", "collect_seed", "plant_seed", "reconcile_seed"]

_CHUNK_BYTES = 1 << 20
MODE = 0o700


def collect_seed(writer: ArtifactWriter, source: Path, *, unit: str, name: str, target: str) -> CacheSeed:
    """Copy a cache into an artifact in the making; its files are made private, in place.

    Args:
        writer: Of the artifact.
        source: The cache's directory on this machine.
        unit: Whose cache.
        name: Which of its caches.
        target: The directory inside the tree, absolute.

    Returns:
        The section for the descriptor.

    Raises:
        ArtifactError: The cache is not a directory, or holds something that is neither a regular file nor a directory.
    """
    if source.is_symlink() or not source.is_dir():
        raise ArtifactError(f"the cache {source} is not a directory")
    path = f"cache-seed/{unit}/{name}"
    writer.directory(path)
    for relative in _regular_files(source):
        directory = os.path.dirname(f"{path}/{relative}")
        copy = writer.directory(directory) / os.path.basename(relative)
        # The mode that a seed is planted with: CRIU compares the mode of every file that a process maps.
        (source / relative).chmod(MODE)
        shutil.copyfile(source / relative, copy, follow_symlinks=False)
        status = (source / relative).lstat()
        os.utime(copy, ns=(status.st_mtime_ns, status.st_mtime_ns))
    files = writer.seal(path, keep_mtimes=True)
    return CacheSeed(unit=unit, name=name, target=target, path=path, files=files)


def _regular_files(source: Path) -> Iterator[str]:
    for directory, directories, names in os.walk(source):
        for name in (*directories, *names):
            path = Path(directory, name)
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise ArtifactError(
                    f"{path} is neither a regular file nor a directory; a cache seed holds nothing else"
                )
        yield from (os.path.relpath(os.path.join(directory, name), source) for name in names)


def plant_seed(artifact: Artifact, seed: CacheSeed, target: Path) -> int:
    """Copy a seed to where the engine will look, digests compared on the way and mtimes given back.

    Args:
        artifact: Whose seed.
        seed: From its descriptor.
        target: A directory that does not exist yet, or is empty.

    Returns:
        Bytes copied.

    Raises:
        ArtifactError: The target holds something.
        IntegrityError: A file is not the captured one; nothing is left at the target.
    """
    if target.exists() and any(target.iterdir()):
        raise ArtifactError(f"{target} is not empty; a cache seed does not mix with another cache")
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        for file in seed.files:
            copy = target / _inside(seed, file)
            copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _copy(artifact.path / file.path, copy, file)
    except BaseException:
        remove_tree(target)
        raise
    return sum(file.bytes for file in seed.files)


@frozen(kw_only=True)
class Planted:
    """What became of a seed on a machine.

    Attributes:
        kept: Files that were there already.
        files: Files that were copied.
        bytes: Their size.
    """

    kept: int
    files: int
    bytes: int


def reconcile_seed(artifact: Artifact, seed: CacheSeed) -> Planted:
    """Let a seed be where the engine looks: what is there stays, what is missing is copied, nothing is replaced.

    Args:
        artifact: Whose seed.
        seed: From its descriptor.

    Raises:
        ArtifactError: A file of the cache is there with other content.
        IntegrityError: A file of the artifact is not the captured one; nothing of it is left at the target.
    """
    target = Path(seed.target)
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(target.parent / f".{target.name}.coldsnap-seed.lock"):
        if not target.exists() or not any(target.iterdir()):
            return Planted(kept=0, files=len(seed.files), bytes=plant_seed(artifact, seed, target))
        missing = [file for file in seed.files if not _is_there(target / _inside(seed, file), file)]
        for file in missing:
            final = target / _inside(seed, file)
            final.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            partial = final.with_name(f".{final.name}.coldsnap-{os.getpid()}")
            partial.unlink(missing_ok=True)
            try:
                _copy(artifact.path / file.path, partial, file)
                os.rename(partial, final)
            finally:
                partial.unlink(missing_ok=True)
    return Planted(kept=len(seed.files) - len(missing), files=len(missing), bytes=sum(file.bytes for file in missing))


def _inside(seed: CacheSeed, file: FileRecord) -> str:
    return file.path.removeprefix(f"{seed.path}/")


def _is_there(path: Path, file: FileRecord) -> bool:
    """Tell whether a file of a cache is there, its mtime put right; by stat when nothing says otherwise."""
    if not os.path.lexists(path):
        return False
    status = path.lstat()
    if stat.S_ISREG(status.st_mode) and (status.st_size, status.st_mtime_ns) == (file.bytes, file.mtime_ns):
        return True
    same = stat.S_ISREG(status.st_mode) and status.st_size == file.bytes
    if not same or f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}" != file.sha256:
        raise ArtifactError(
            f"{path} is another file than the one that was captured as {file.path}; remove it, or move the cache away"
        )
    os.utime(path, ns=(file.mtime_ns or 0, file.mtime_ns or 0))
    return True


def _copy(source: Path, copy: Path, file: FileRecord) -> None:
    state = hashlib.sha256()
    with open_private(source) as (fd, _), open(fd, "rb", closefd=False) as stream, copy.open("xb") as out:
        while data := stream.read(_CHUNK_BYTES):
            state.update(data)
            out.write(data)
    actual = f"sha256:{state.hexdigest()}"
    if actual != file.sha256:
        raise IntegrityError("wrong content (rule evidence.5)", path=str(source), expected=file.sha256, actual=actual)
    copy.chmod(MODE)  # compiled caches hold executables; nobody but the owner needs any of it
    os.utime(copy, ns=(file.mtime_ns or 0, file.mtime_ns or 0))
