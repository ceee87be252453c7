"""Evidence: why an unchanged file need not be read again.

The one rule: a digest that was computed once holds as long as device, inode, size and mtime of the file are the same;
anything else is hashed in full. A file that is a link, belongs to someone else or is open to others is never
admitted. Rules: ``docs/format/evidence.md``.

``verify = "evidence"`` trusts the stat: a flipped byte with a new mtime is found, one with a restored mtime is not.
``verify = "full"`` trusts nothing and finds both.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from attrs import define, field, frozen

from coldsnap.artifact import canonical, record
from coldsnap.artifact.durable import FaultPoint, unharmed, write_file_durably
from coldsnap.artifact.hashing import pieces_of
from coldsnap.artifact.lanes import Lanes, sha256_streams
from coldsnap.artifact.private import open_directory, open_private, read_small, require_private
from coldsnap.errors import FormatError, IntegrityError

__all__ = [
    "EVIDENCE_NAME",
    "UNWRITABLE",
    "Admitted",
    "Identity",
    "PrivateFile",
    "TreeAdmission",
    "Verify",
    "admit_tree",
    "hash_file",
    "identity_of",
    "remembered",
]

EVIDENCE_NAME = "evidence.json"
MAX_EVIDENCE_BYTES = 64 << 20
Verify: TypeAlias = Literal["evidence", "full"]


class Listed(Protocol):
    """What a document says about one of its files."""

    @property
    def path(self) -> str:
        """Relative to the directory of the document."""

    @property
    def bytes(self) -> int:
        """Size."""

    @property
    def sha256(self) -> str:
        """``sha256:<hex>`` of the content."""


@frozen(kw_only=True)
class Identity:
    """What binds a digest to a file on this machine.

    Attributes:
        device: st_dev.
        inode: st_ino.
        size: Bytes.
        mtime_ns: Modification time, ns.
    """

    device: int = field(validator=record.at_least(0))
    inode: int = field(validator=record.at_least(0))
    size: int = field(validator=record.at_least(0))
    mtime_ns: int


@frozen(kw_only=True)
class Entry:
    """One file of a directory's evidence."""

    sha256: str = field(validator=record.sha256)
    identity: Identity
    ctime_ns: int  # diagnostic only: chmod and rename change it, the content they do not
    validated_unix_ns: int


@frozen(kw_only=True)
class Evidence:
    """``evidence.json``: what was proven about the files of one directory, on this machine."""

    format: Literal[1] = 1
    kind: Literal["coldsnap-evidence"] = "coldsnap-evidence"
    files: Mapping[str, Entry]


@frozen(kw_only=True)
class Admitted:
    """One admitted file.

    Attributes:
        path: As listed.
        bytes: Size.
        sha256: Digest, as listed.
        reason: ``unchanged`` (by stat), ``stale`` or ``absent`` (evidence; hashed), or ``full`` (asked for; hashed).
        identity: What the digest is bound to now.
        ctime_ns: Diagnostic.
    """

    path: str
    bytes: int
    sha256: str
    reason: Literal["unchanged", "stale", "absent", "full"]
    identity: Identity
    ctime_ns: int

    @property
    def bytes_hashed(self) -> int:
        """How much of the file was read."""
        return 0 if self.reason == "unchanged" else self.bytes


@frozen(kw_only=True)
class TreeAdmission:
    """Every file of a directory, admitted.

    Attributes:
        files: In the order of the document.
        seconds: How long it took, s.
        refreshed: Whether ``evidence.json`` was written.
    """

    files: tuple[Admitted, ...]
    seconds: float
    refreshed: bool

    @property
    def bytes_hashed(self) -> int:
        """How many bytes were read."""
        return sum(file.bytes_hashed for file in self.files)


def identity_of(status: os.stat_result) -> Identity:
    """Take the identity out of a stat."""
    return Identity(device=status.st_dev, inode=status.st_ino, size=status.st_size, mtime_ns=status.st_mtime_ns)


def hash_file(fd: int, before: os.stat_result, path: str) -> str:
    """Hash a file that must not change meanwhile.

    Raises:
        IntegrityError: It changed, or could not be read.
    """
    state = hashlib.sha256()
    for piece in _at_rest(fd, before, path):
        state.update(piece)
    return f"sha256:{state.hexdigest()}"


def _at_rest(fd: int, before: os.stat_result, path: str) -> Iterator[memoryview]:
    try:
        with pieces_of(fd, before.st_size) as pieces:
            yield from pieces(0, before.st_size)
    except OSError as error:
        raise IntegrityError(
            f"the file cannot be read ({error})", path=path, expected="its bytes", actual="an error"
        ) from error
    if identity_of(os.fstat(fd)) != identity_of(before):
        raise IntegrityError(
            "the file changed while it was verified (rule evidence.6)",
            path=path,
            expected="a file at rest",
            actual="a change",
        )


@define(kw_only=True)
class PrivateFile:
    """A private file as a stream for :func:`~coldsnap.artifact.lanes.sha256_streams`; it must not change meanwhile.

    Attributes:
        size: Bytes, for the order of the work only.
        name: To open it by, in ``directory`` if that is given.
        label: For errors.
        directory: An open directory.
        status: Of the file that was read, once it was.
    """

    size: int
    name: str
    label: str
    directory: int | None = None
    status: os.stat_result = field(init=False)

    def pieces(self) -> Iterator[memoryview]:
        """Open the file and yield its bytes.

        Raises:
            IntegrityError: It changed, or could not be read.
            FormatError: It is a link, foreign, or open to others.
        """
        with open_private(self.name, dir_fd=self.directory, name=self.label) as (fd, self.status):
            yield from _at_rest(fd, self.status, self.label)


def admit_tree(
    root: Path,
    files: Sequence[Listed],
    verify: Verify = "evidence",
    *,
    threads: int | None = None,
    at: FaultPoint = unharmed,
    lanes: Lanes | None = None,
) -> TreeAdmission:
    """Admit every listed file of a directory, by stat where evidence holds, else by its digest.

    Args:
        root: The directory of the document; its ``evidence.json`` is read and refreshed.
        files: What the document lists.
        verify: ``evidence`` or ``full``.
        threads: Hashing threads; None: all cores.
        at: Fault point.
        lanes: Who hashes several files at once on each core; None: nobody.

    Raises:
        IntegrityError: A file is missing, or its size or digest is not the listed one.
        FormatError: A file, directory or record is a link, foreign, or open to others.
    """
    begin = time.perf_counter()
    known = _read_evidence(root / EVIDENCE_NAME) if verify == "evidence" else {}
    with _directories(root, files) as opened:
        # A stat is too short for a thread: only what must be read goes to the pool.
        settled = {listed.path: _by_stat(root, listed, opened, known.get(listed.path)) for listed in files}
        open_ones = [listed for listed in files if settled[listed.path] is None]
        streams = [_stream(root, listed, opened) for listed in open_ones]
        digests = sha256_streams(streams, threads=threads, lanes=lanes)
        hashed = [
            _admit(listed, stream, digest, known.get(listed.path), verify)
            for listed, stream, digest in zip(open_ones, streams, digests, strict=True)
        ]
    settled.update({one.path: one for one in hashed})
    admitted = tuple(one for listed in files if (one := settled[listed.path]) is not None)
    outdated = bool(hashed) or known.keys() != {listed.path for listed in files}
    refreshed = outdated and remembered(lambda: write_evidence(root, admitted, at=at))
    return TreeAdmission(files=admitted, seconds=time.perf_counter() - begin, refreshed=refreshed)


def write_evidence(root: Path, admitted: Sequence[Admitted], *, at: FaultPoint = unharmed) -> None:
    """Write ``evidence.json`` of a directory."""
    now = time.time_ns()
    entries = {
        one.path: Entry(sha256=one.sha256, identity=one.identity, ctime_ns=one.ctime_ns, validated_unix_ns=now)
        for one in admitted
    }
    write_file_durably(root / EVIDENCE_NAME, canonical.encode(record.write(Evidence(files=entries))), at=at)


def remembered(write: Callable[[], None]) -> bool:
    """Write evidence if the medium takes it (evidence.8): an admission does not depend on its record.

    Returns:
        False when the medium is read-only or full; the next admission then reads the bytes again.
    """
    try:
        write()
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        return False
    return True


UNWRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT})
"""What a medium says that takes nothing more: it can still be read."""


def _read_evidence(path: Path) -> Mapping[str, Entry]:
    try:
        data = read_small(path, max_bytes=MAX_EVIDENCE_BYTES)
    except IntegrityError:
        return {}
    try:
        value = canonical.decode(data, path=str(path), max_bytes=MAX_EVIDENCE_BYTES, exact=False)
        return record.read(Evidence, value, path=str(path)).files
    except FormatError:
        return {}  # evidence.7: as good as absent, everything is hashed and it is written anew


def _by_stat(root: Path, listed: Listed, opened: Mapping[str, int], entry: Entry | None) -> Admitted | None:
    directory, _, name = listed.path.rpartition("/")
    label = f"{root}/{listed.path}"
    try:
        status = os.stat(name, dir_fd=opened[directory], follow_symlinks=False)
    except FileNotFoundError as error:
        raise IntegrityError("the file is missing", path=label, expected=listed.sha256, actual="nothing") from error
    require_private(status, label, "file")
    if status.st_size != listed.bytes:
        raise IntegrityError(
            "wrong size (rule evidence.4)",
            path=label,
            expected=f"{listed.bytes} bytes",
            actual=f"{status.st_size} bytes",
        )
    if entry is None or entry.sha256 != listed.sha256 or entry.identity != identity_of(status):
        return None
    return _admitted(listed, "unchanged", status)


def _stream(root: Path, listed: Listed, opened: Mapping[str, int]) -> PrivateFile:
    directory, _, name = listed.path.rpartition("/")
    return PrivateFile(size=listed.bytes, name=name, label=str(root / listed.path), directory=opened[directory])


def _admit(listed: Listed, stream: PrivateFile, actual: str, entry: Entry | None, verify: Verify) -> Admitted:
    if actual != listed.sha256:
        at = "wrong content (rule evidence.5)"
        raise IntegrityError(at, path=stream.label, expected=listed.sha256, actual=actual)
    reason: Literal["full", "stale", "absent"] = "full" if verify == "full" else "stale" if entry else "absent"
    return _admitted(listed, reason, stream.status)


def _admitted(
    listed: Listed, reason: Literal["unchanged", "stale", "absent", "full"], status: os.stat_result
) -> Admitted:
    return Admitted(
        path=listed.path,
        bytes=listed.bytes,
        sha256=listed.sha256,
        reason=reason,
        identity=identity_of(status),
        ctime_ns=status.st_ctime_ns,
    )


@contextmanager
def _directories(root: Path, files: Sequence[Listed]) -> Iterator[dict[str, int]]:
    """Open every directory on the way to the files, one component at a time, so that no link is followed."""
    opened: dict[str, int] = {}
    try:
        opened[""] = open_directory(root, None, str(root))
        for listed in files:
            parts = listed.path.split("/")[:-1]
            for depth in range(1, len(parts) + 1):
                name = "/".join(parts[:depth])
                if name not in opened:
                    parent = opened["/".join(parts[: depth - 1])]
                    opened[name] = open_directory(parts[depth - 1], parent, str(root / name))
        yield opened
    finally:
        for fd in opened.values():
            os.close(fd)
