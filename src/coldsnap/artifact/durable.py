"""Names that appear whole or not at all: the only module that fsyncs and renames.

The one rule: data is on the disk before its name is, and a name that a reader trusts appears by exactly one rename.
Whatever is half done carries ``.partial-`` in its name (or is a directory whose ``artifact.json`` is still called
``artifact.json.partial``) and is locked by the process that works on it, so that anyone can tell a stale one and
remove it.

Every write, fsync and rename calls the fault point given by the caller first; tests kill the process there.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from coldsnap.artifact.held import is_kept, kept_for, user_of
from coldsnap.errors import ArtifactError

__all__ = [
    "COMMITTED",
    "FaultPoint",
    "StagedDirectory",
    "StagedFile",
    "fsync_tree",
    "is_committed",
    "is_uncommitted",
    "locked",
    "publish_file",
    "remove_committed",
    "remove_partials",
    "remove_tree",
    "remove_uncommitted",
    "staged_directory",
    "staged_file",
    "write_file_durably",
]

COMMITTED = "artifact.json"
UNCOMMITTED = "artifact.json.partial"
PARTIAL = ".partial-"


class FaultPoint(Protocol):
    """Called with a name such as ``artifact.json:rename`` just before the act it names; may raise or kill."""

    def __call__(self, point: str) -> None:
        """Do nothing, raise, or never return."""


def unharmed(point: str) -> None:
    """Do nothing: the fault point of real life."""


def _fsync_directory(path: Path, at: FaultPoint) -> None:
    at(f"{path.name}/:fsync")
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _create_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _create_directory(path: Path) -> int:
    os.mkdir(path, 0o700)
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _born_locked(final: Path, create: Callable[[Path], int]) -> tuple[int, Path]:
    # The lock dies with the process, so an unlocked partial name is a stale one. Between creation and lock a sweep
    # may take the name for stale; it removes what it holds locked, so a link count of zero tells us to begin again.
    while True:
        path = _partial_beside(final)
        fd = create(path)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd, path
        os.close(fd)


def _partial_beside(final: Path) -> Path:
    return final.with_name(f".{final.name}{PARTIAL}{secrets.token_hex(8)}")


# Files


class StagedFile:
    """A file under a partial name, open for writing; it gets its real name by :meth:`publish`."""

    def __init__(self, path: Path, stream: BinaryIO, at: FaultPoint) -> None:
        self.path = path
        self.stream = stream
        self.published: Path | None = None
        self._at = at

    def publish(self, final: Path, *, mode: int = 0o600) -> None:
        """Fsync, rename to ``final`` (same directory), fsync the directory."""
        self.stream.flush()
        os.fchmod(self.stream.fileno(), mode)
        self._at(f"{final.name}:fsync")
        os.fsync(self.stream.fileno())
        self._at(f"{final.name}:rename")
        os.rename(self.path, final)
        self.published = final
        _fsync_directory(final.parent, self._at)


@contextlib.contextmanager
def staged_file(directory: Path, label: str, *, at: FaultPoint = unharmed) -> Iterator[StagedFile]:
    """Open a private file under a partial name in ``directory``; remove it unless it was published.

    Args:
        directory: Where the final name will be.
        label: Part of the partial name, for people who look at the directory.
        at: Fault point.

    Yields:
        The staged file; its stream is unbuffered so that large writes are not copied twice.
    """
    at(f"{label}:create")
    fd, path = _born_locked(directory / label, _create_file)
    with open(fd, "w+b", buffering=0) as stream:
        staged = StagedFile(path, stream, at)
        try:
            yield staged
        finally:
            if staged.published is None:
                path.unlink(missing_ok=True)


def publish_file(path: Path, final: Path, *, mode: int = 0o600, at: FaultPoint = unharmed) -> None:
    """Give a file that someone else wrote (a download) its final name, on the same filesystem, durably."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(fd, mode)
        at(f"{final.name}:fsync")
        os.fsync(fd)
    finally:
        os.close(fd)
    at(f"{final.name}:rename")
    os.rename(path, final)
    _fsync_directory(final.parent, at)


def write_file_durably(path: Path, data: bytes, mode: int = 0o600, *, at: FaultPoint = unharmed) -> None:
    """Replace ``path`` by a file with these bytes, atomically and durably."""
    with staged_file(path.parent, path.name, at=at) as staged:
        at(f"{path.name}:write")
        _write_all(staged.stream, data)
        staged.publish(path, mode=mode)


def _write_all(stream: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[stream.write(view) :]


def fsync_tree(root: Path, *, at: FaultPoint = unharmed) -> None:
    """Fsync every regular file below ``root``, then its directories from the leaves up."""
    for directory, _, names in os.walk(root, topdown=False):
        for name in names:
            path = Path(directory, name)
            if not stat.S_ISREG(path.lstat().st_mode):
                continue
            at(f"{name}:fsync")
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        _fsync_directory(Path(directory), at)


# Artifact directories


class StagedDirectory:
    """A directory under its final name that is not yet an artifact: ``artifact.json`` is missing."""

    def __init__(self, path: Path, at: FaultPoint) -> None:
        self.path = path
        self.stays = False
        self._at = at

    def commit(self, descriptor: bytes) -> None:
        """Make everything durable, then let ``artifact.json`` appear: the commit point.

        Args:
            descriptor: The bytes of ``artifact.json``.
        """
        pending = self.path / UNCOMMITTED
        self._at(f"{UNCOMMITTED}:write")
        with open(pending, "r+b", buffering=0) as stream:
            _write_all(stream, descriptor)
        fsync_tree(self.path, at=self._at)
        _fsync_directory(self.path.parent, self._at)
        self._at(f"{COMMITTED}:rename")
        os.rename(pending, self.path / COMMITTED)
        _fsync_directory(self.path, self._at)


@contextlib.contextmanager
def staged_directory(final: Path, *, at: FaultPoint = unharmed) -> Iterator[StagedDirectory]:
    """Create an artifact directory, locked and uncommitted; remove it unless it was committed.

    The directory is born under a partial name with its marker inside and its lock held, and then moved to ``final``:
    nobody ever sees it unmarked or unlocked while it is in use. What a killed predecessor left at ``final`` is
    removed first.

    Args:
        final: Where the artifact will be. Its parent must exist.
        at: Fault point.

    Yields:
        The staged directory, mode 0700.

    Raises:
        ArtifactError: ``final`` exists and is not such a leftover, or another process is writing it.
    """
    remove_uncommitted(final, at=at)
    remove_partials(final.parent, of=final.name)
    at(f"{final.name}:mkdir")
    try:
        fd, born = _born_locked(final, _create_directory)
    except OSError as error:
        raise ArtifactError(f"the output {final} cannot be created: {error.strerror}; choose another") from error
    try:
        try:
            at(f"{UNCOMMITTED}:create")
            os.close(_create_file(born / UNCOMMITTED))
            at(f"{final.name}:rename")
            os.rename(born, final)
        except OSError as error:
            remove_tree(born)
            raise ArtifactError(f"the output {final} cannot be created: {error.strerror}; choose another") from error
        try:
            yield (staged := StagedDirectory(final, at))
        finally:
            if not staged.stays and not is_committed(final):
                _remove_aside(final)
    finally:
        os.close(fd)


def is_committed(path: Path) -> bool:
    """Tell whether ``path`` holds a committed artifact."""
    return (path / COMMITTED).is_file()


def is_uncommitted(path: Path) -> bool:
    """Tell whether ``path`` is a directory that a capture began and did not commit."""
    return (path / UNCOMMITTED).is_file() and not is_committed(path)


def remove_uncommitted(path: Path, *, woken: bool = False, at: FaultPoint = unharmed) -> bool:
    """Remove what an interrupted capture left at ``path``; never a committed artifact, never anything else.

    Args:
        path: An output path.
        woken: Whether the engine needs it no more for which it was kept.
        at: Fault point.

    Returns:
        True when something was removed, False when nothing was there.

    Raises:
        ArtifactError: Something else is there, or a living process is writing it.
    """
    if not os.path.lexists(path):
        return False
    if path.is_symlink() or not is_uncommitted(path):
        raise ArtifactError(f"the output {path} already exists; delete it or choose another")
    if is_kept(path) and not woken:
        raise ArtifactError(
            f"the output {path} has what the memory of the engine in {kept_for(path)} held, whose capture failed; wake "
            "that engine (Wake) or stop it, or choose another output"
        )
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ArtifactError(f"the output {path} is being written by another capture; wait for it") from error
        # Whoever removed it while we waited may have begun a new one under the same name.
        if os.path.lexists(path) and os.path.samestat(os.fstat(fd), os.lstat(path)):
            at(f"{path.name}:rename")
            _remove_aside(path)
    finally:
        os.close(fd)
    return True


def _remove_aside(path: Path) -> None:
    # Under a partial name first: a removal that dies in the middle leaves nothing that could be taken for the original.
    # The keeper of a workload undoes a failed capture too; whoever comes second finds nothing.
    aside = _partial_beside(path)
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, aside)
        remove_tree(aside)


def remove_committed(path: Path, *, at: FaultPoint = unharmed) -> None:
    """Delete a committed artifact: first it stops being one, by one rename, then its bytes go.

    Raises:
        ArtifactError: ``path`` is not a committed artifact.
    """
    if path.is_symlink() or not is_committed(path):
        raise ArtifactError(f"{path} is not a committed artifact; nothing was deleted")
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            user = user_of(path) or "another process"
            raise ArtifactError(f"{path} is in use by {user}; nothing was deleted, wait for its end") from error
        at(f"{COMMITTED}:rename")
        os.rename(path / COMMITTED, path / UNCOMMITTED)
        _fsync_directory(path, at)
        at(f"{path.name}:rename")
        _remove_aside(path)
    finally:
        os.close(fd)
    _fsync_directory(path.parent, at)


def remove_tree(path: Path) -> None:
    """Remove a directory tree and report the first failure; an absent one is fine."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def remove_partials(directory: Path, *, of: str = "", dry_run: bool = False) -> list[Path]:
    """Remove files and directories with partial names in ``directory`` that no living process has locked.

    Args:
        directory: Where to look, not below.
        of: Only those that would have got this name.
        dry_run: Only tell.

    Returns:
        What was (or would be) removed.
    """
    pattern = f".{glob.escape(of)}{PARTIAL}*" if of else f".*{PARTIAL}*"
    return [path for path in sorted(directory.glob(pattern)) if _remove_abandoned(path, dry_run=dry_run)]


def _remove_abandoned(path: Path, *, dry_run: bool) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False  # gone, or nothing that we made
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not dry_run:
            remove_tree(path) if stat.S_ISDIR(os.fstat(fd).st_mode) else path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock named by a file, which is created private.

    Args:
        path: The lock file. Only its holder may remove it.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        # A holder may have removed the name while we waited; then someone else may hold a newer file of that name.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.lstat(path)):
                break
        os.close(fd)
    try:
        yield
    finally:
        os.close(fd)
