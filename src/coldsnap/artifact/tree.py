"""Small directories under the name of their content, staged read-only and used by their path.

What an engine is started with besides weights is a directory: the files of its model that are no weights, and what runs
beside and inside its ranks. The one rule: the archive decides. Its bytes depend on names and contents alone, a staged
tree is what its archive says or is refused, and nobody writes into one (rules tree.1 to tree.4,
``docs/format/tree.md``).
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from attrs import frozen

from coldsnap.artifact.canonical import hex_of, sha256_of
from coldsnap.artifact.durable import FaultPoint, fsync_tree, locked, remove_tree, unharmed, write_file_durably
from coldsnap.artifact.private import open_directory, read_small
from coldsnap.errors import FormatError, IntegrityError

__all__ = ["MAX_ARCHIVE_BYTES", "TREES", "Tree", "Trees", "pack_tree", "unpack_tree"]

TREES = Path("trees", "sha256")
MAX_ARCHIVE_BYTES = 1 << 30
_FILE, _DIRECTORY = 0o444, 0o555


@frozen(kw_only=True)
class Tree:
    """A tree that is staged.

    Attributes:
        sha256: Digest of its archive.
        bytes: Size of its archive.
        archive: The archive.
        path: The directory, read-only.
    """

    sha256: str
    bytes: int
    archive: Path
    path: Path


def pack_tree(files: Mapping[str, bytes]) -> bytes:
    """Return the archive of some files: a tar that depends on their names and contents alone.

    Args:
        files: Contents by relative name, with slashes.

    Raises:
        FormatError: A name is absolute, leaves the tree, or is a directory of another (tree.2).
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(files):
            _require_inside(name, files)
            entry = tarfile.TarInfo(name)  # mtime, owner and group are zero or empty
            entry.size, entry.mode = len(files[name]), _FILE
            archive.addfile(entry, io.BytesIO(files[name]))
    return buffer.getvalue()


def unpack_tree(data: bytes, *, path: str) -> dict[str, bytes]:
    """Return the files of an archive.

    Args:
        data: The archive.
        path: What to call it in errors.

    Raises:
        FormatError: It is not exactly what :func:`pack_tree` makes of its files (tree.1).
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            files = {entry.name: _contents(archive, entry, path) for entry in archive}
    except tarfile.TarError as error:
        raise FormatError(f"not a tar: {error}", path=path, rule="tree.1") from None
    if pack_tree(files) != data:
        raise FormatError("another tar of the same files than this format has", path=path, rule="tree.1")
    return files


class Trees:
    """The trees of a store.

    Args:
        root: The root of the store; directories below are made private when they are first written to.
        at: Fault point.
    """

    def __init__(self, root: str | os.PathLike[str], *, at: FaultPoint = unharmed) -> None:
        self.root = Path(os.path.abspath(root))
        self.directory = self.root / TREES
        self._at = at

    def path(self, sha256: str) -> Path:
        """Return where a tree is staged, or would be."""
        return self.directory / hex_of(sha256)

    def add(self, files: Mapping[str, bytes]) -> Tree:
        """Pack some files and stage them.

        Raises:
            FormatError: A name cannot be in a tree.
            OSError: The medium is full or failed.
        """
        return self._stage(pack_tree(files))

    def bring(self, archive: Path, *, sha256: str) -> Tree:
        """Stage the archive of somebody else, an artifact for example.

        Args:
            archive: Its file, private.
            sha256: The digest that it must have.

        Raises:
            IntegrityError: It has another one; nothing is staged.
            FormatError: It is no archive of this format.
            OSError: The medium is full or failed.
        """
        data = read_small(archive, max_bytes=MAX_ARCHIVE_BYTES, rule="tree.1")
        _require_digest(data, sha256, archive)
        return self._stage(data)

    def verify(self, sha256: str) -> Tree:
        """Compare a staged tree with its archive, file by file.

        Raises:
            IntegrityError: It is not there, something was changed, added or taken away, or could be (tree.3).
        """
        path = self.path(sha256)
        archive = path.with_name(f"{path.name}.tar")
        data = read_small(archive, max_bytes=MAX_ARCHIVE_BYTES, rule="tree.1")
        _require_digest(data, sha256, archive)
        wanted, found = unpack_tree(data, path=str(archive)), dict(_walk(path))
        for name in sorted(wanted.keys() | found.keys()):
            if name not in wanted or wanted[name] != found.get(name):
                raise IntegrityError(
                    "a file of a staged tree is not the archive's (rule tree.3); remove the directory to stage it anew",
                    path=str(path / name),
                    expected=_told(wanted.get(name)),
                    actual=_told(found.get(name)),
                )
        return Tree(sha256=sha256, bytes=len(data), archive=archive, path=path)

    def _stage(self, data: bytes) -> Tree:
        sha256 = sha256_of(data)
        path, files = self.path(sha256), unpack_tree(data, path=sha256)
        archive = path.with_name(f"{path.name}.tar")
        self._prepare()
        with locked(self.directory / f".{path.name}.lock"):
            if not archive.exists():
                remove_tree(path)  # of somebody who was killed before the archive was there
                self._extract(path, files)
                write_file_durably(archive, data, at=self._at)  # the commit: a tree without its archive is half a tree
        return self.verify(sha256)

    def _extract(self, path: Path, files: Mapping[str, bytes]) -> None:
        self._at(f"{path.name}:extract")
        path.mkdir(mode=0o700)
        for name, data in files.items():
            target = path / name
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            target.write_bytes(data)
            target.chmod(_FILE)
        fsync_tree(path, at=self._at)
        for directory, _, _ in os.walk(path, topdown=False):
            os.chmod(directory, _DIRECTORY)

    def _prepare(self) -> None:
        path = self.root
        for part in ("", *TREES.parts):
            path = path / part
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(open_directory(path))


def _require_inside(name: str, files: Mapping[str, bytes]) -> None:
    parts = PurePosixPath(name).parts
    if not name or "\0" in name or name != "/".join(parts) or {"..", "/", "."} & set(parts):
        raise FormatError(f"the name {name!r} is not that of a file in a tree", path=name, rule="tree.2")
    above = ["/".join(parts[:count]) for count in range(1, len(parts))]
    if inner := next((one for one in above if one in files), None):
        raise FormatError(f"{inner!r} is a file, and {name!r} would be in it", path=name, rule="tree.2")


def _contents(archive: tarfile.TarFile, entry: tarfile.TarInfo, path: str) -> bytes:
    stream = archive.extractfile(entry) if entry.isreg() else None
    if stream is None:
        raise FormatError(f"{entry.name!r} is not a regular file", path=path, rule="tree.1")
    return stream.read()


def _walk(root: Path) -> Iterator[tuple[str, bytes | None]]:
    """Yield name and contents of everything below, None for what is no file that nobody may write to."""
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    except OSError as error:
        raise IntegrityError(
            "a staged tree cannot be read", path=str(root), expected="a directory", actual=str(error.strerror)
        ) from None
    if stat.S_IMODE(os.lstat(root).st_mode) != _DIRECTORY:
        raise IntegrityError(
            "a directory of a staged tree is not read-only (rule tree.3); remove the tree to stage it anew",
            path=str(root),
            expected=f"mode {_DIRECTORY:04o}",
            actual=f"mode {stat.S_IMODE(os.lstat(root).st_mode):04o}",
        )
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from ((f"{entry.name}/{name}", data) for name, data in _walk(Path(entry.path)))
        else:
            status = entry.stat(follow_symlinks=False)
            good = stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) == _FILE
            yield entry.name, Path(entry.path).read_bytes() if good else None


def _require_digest(data: bytes, sha256: str, path: Path) -> None:
    if (actual := sha256_of(data)) != sha256:
        raise IntegrityError("wrong content (rule tree.4)", path=str(path), expected=sha256, actual=actual)


def _told(data: bytes | None) -> str:
    return "no file, or one that is open to writing" if data is None else f"{sha256_of(data)}, {len(data)} bytes"
