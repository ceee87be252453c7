"""The store of packs: content-addressed, shared by captures, workers and processes of a host.

The one rule: a pack appears whole under the name of its content, or not at all; who writes, stages or deletes one
holds its lock (rules store.1 to store.4, ``docs/format/store.md``).
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path

from attrs import frozen

from coldsnap.artifact.admission import Admission, Request, decide, is_bound, record_path
from coldsnap.artifact.canonical import hex_of
from coldsnap.artifact.durable import (
    FaultPoint,
    StagedFile,
    locked,
    publish_file,
    remove_tree,
    staged_file,
    unharmed,
)
from coldsnap.artifact.evidence import UNWRITABLE, Verify, hash_file
from coldsnap.artifact.lanes import Lanes
from coldsnap.artifact.pack import Pack, PackEntry, Source, layout, write_pack
from coldsnap.artifact.payloads import PayloadObject
from coldsnap.artifact.private import open_directory, open_private
from coldsnap.artifact.validate import Transport, validate
from coldsnap.errors import ArtifactError, IntegrityError, PayloadMissingError

__all__ = ["PACKS", "Store", "StoredPack", "sizes_of"]

PACKS = Path("model-payloads", "sha256")
_SUFFIX = ".pack"
_PACK = re.compile(r"[0-9a-f]{64}\.pack")
_STAGING = re.compile(r"\.[0-9a-f]{64}\.staging")


@frozen(kw_only=True)
class StoredPack:
    """One pack that is there, by name; its bytes were not read.

    Attributes:
        sha256: Digest, from the name.
        bytes: Size.
        path: Where.
        used_ns: When it was last published or staged, by whoever found it there already too, ns.
        evidence: Whether a record lies beside it.
    """

    sha256: str
    bytes: int
    path: Path
    used_ns: int
    evidence: bool


class Store:
    """A store below a directory.

    Args:
        root: The directory; it and what is below are made private when they are first written to.
        at: Fault point.
        lanes: Who hashes and sums faster than Python's own (the native library); None: nobody.
    """

    def __init__(self, root: str | os.PathLike[str], *, at: FaultPoint = unharmed, lanes: Lanes | None = None) -> None:
        self.lanes = lanes
        self.root = Path(os.path.abspath(root))
        self.directory = self.root / PACKS
        self.at = at

    def path(self, sha256: str) -> Path:
        """Return where a pack is, or would be."""
        return self.directory / f"{hex_of(sha256)}{_SUFFIX}"

    def prepare(self) -> Path:
        """Make the directories of the store, private, and return the one of the packs.

        Raises:
            FormatError: One of them is a link, foreign, or open to others.
            ArtifactError: One cannot be made, for example since a file is in its place.
        """
        path = self.root
        for part in ("", *PACKS.parts):
            path = path / part
            try:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise ArtifactError(
                    f"the directory {path} of the store {self.root} cannot be created: {error.strerror}; make room for "
                    "it, or name another store"
                ) from error
            os.close(open_directory(path))
        return self.directory

    def packs(self) -> tuple[StoredPack, ...]:
        """List the packs, by digest; what has another name than a digest is somebody else's, and left alone."""
        found = []
        for path in self._named(_PACK):
            status = _status(path)
            if status is None or not stat.S_ISREG(status.st_mode):
                continue
            found.append(
                StoredPack(
                    sha256=f"sha256:{path.name.removesuffix(_SUFFIX)}",
                    bytes=status.st_size,
                    path=path,
                    used_ns=max(status.st_mtime_ns, self._used_ns(path)),
                    evidence=os.path.lexists(record_path(path)),
                )
            )
        return tuple(found)

    def _named(self, pattern: re.Pattern[str]) -> list[Path]:
        there = self.directory.iterdir() if self.directory.is_dir() else ()
        return sorted(path for path in there if pattern.fullmatch(path.name))

    def _lock_file(self, sha256: str) -> Path:
        return self.directory / f".{hex_of(sha256)}.lock"

    def _used_ns(self, pack: Path) -> int:
        status = _status(self._lock_file(pack.name.removesuffix(_SUFFIX)))
        return status.st_mtime_ns if status else 0

    @property
    def size_bytes(self) -> Mapping[str, int]:
        """Size by kind: packs, records, partials (being written, or stale), staging (downloads to resume)."""
        sizes = dict.fromkeys(("packs", "records", "partials", "staging"), 0)
        for path in self.directory.iterdir() if self.directory.is_dir() else ():
            size = sum(sizes_of(path))
            kind = "staging" if path.suffix == ".staging" else "partials" if path.name.startswith(".") else "records"
            sizes["packs" if path.suffix == _SUFFIX else kind] += size
        return sizes

    def write(
        self, sources: Sequence[Source], *, digests: Sequence[str] | None = None, threads: int | None = None
    ) -> Pack:
        """Write the pack of these extents, unless it is there already; the result is the same either way.

        Args:
            sources: The extents, in any order.
            digests: ``sha256:<hex>`` of each, when known.
            threads: Hashing threads; None: all cores.

        Raises:
            OSError: The medium is full or failed; nothing is left behind.
        """
        with staged_file(self.prepare(), "new.pack", at=self.at) as staged:
            self.at("new.pack:write")
            pack = write_pack(staged, sources, digests=digests, threads=threads, lanes=self.lanes)
            self.publish(staged, pack.sha256)
        return pack

    def find(self, index: Sequence[PackEntry]) -> StoredPack | None:
        """Find the pack with this index, by the records beside the packs, and count it as used; no pack is read.

        Args:
            index: Its extents, in any order.

        Returns:
            The pack, or None: it is not here, or no admission has verified it together with its index.
        """
        size = layout([(entry.sha256, entry.size) for entry in index])[2]
        for pack in self.packs():
            if pack.bytes != size or not pack.evidence:
                continue
            with self.lock(pack.sha256):
                request = Request(path=str(pack.path), expected_sha256=pack.sha256)
                if pack.path.exists() and is_bound(request, index):
                    self.mark_used(pack.sha256)
                    return pack
        return None

    def publish(self, staged: StagedFile, sha256: str) -> Path:
        """Give a staged file the name of its content; a pack that is there already is kept.

        Args:
            staged: In the directory of the packs, complete.
            sha256: Its digest, computed from the bytes on their way.
        """
        final = self.path(sha256)
        with self.lock(sha256):
            self.mark_used(sha256)
            if not final.exists():
                staged.publish(final)
        return final

    def mark_used(self, sha256: str) -> None:
        """Count a pack as used now; its lock must be held."""
        # Garbage collection keeps what was used lately. The pack's own mtime cannot say it: evidence is bound to it.
        os.utime(self._lock_file(sha256))

    def lock(self, sha256: str) -> AbstractContextManager[None]:
        """Hold the lock of one digest."""
        self.prepare()
        return locked(self._lock_file(sha256))

    def admit(
        self,
        payload: PayloadObject,
        verify: Verify = "evidence",
        *,
        index: Sequence[PackEntry] | None = None,
        transport: Transport | None = None,
    ) -> Admission:
        """Admit one worker's pack.

        Args:
            payload: From the descriptor.
            verify: ``evidence`` or ``full``.
            index: Its extents, from the native manifest; used in this process only.
            transport: Who validates; None: this process.

        Raises:
            PayloadMissingError: It is not here.
            IntegrityError: It is not the pack.
            FormatError: It is not private.
        """
        if not os.path.lexists(self.path(payload.sha256)):
            raise self._missing(payload)
        with ExitStack() as held:
            # Under the lock, so that of many processes that find no evidence one reads the file and the others its
            # record. Where no lock can be made nobody brings or deletes a pack either, at least not from here.
            try:
                held.enter_context(self.lock(payload.sha256))
            except OSError as error:
                if error.errno not in UNWRITABLE:
                    raise
            return self._admit(payload, verify, index, transport)

    def _admit(
        self, payload: PayloadObject, verify: Verify, index: Sequence[PackEntry] | None, transport: Transport | None
    ) -> Admission:
        path = self.path(payload.sha256)
        if not os.path.lexists(path):  # whoever held the lock before may have deleted it
            raise self._missing(payload)
        request = Request(
            path=str(path),
            expected_sha256=payload.sha256,
            expected_bytes=payload.bytes,
            worker=payload.worker,
            verify=verify,
        )
        if transport is not None and transport.effective != "python":
            return validate(request, transport)
        return decide(request, index=index, at=self.at, lanes=self.lanes)

    def _missing(self, payload: PayloadObject) -> PayloadMissingError:
        return PayloadMissingError(
            f"the pack {payload.sha256} of worker {payload.worker} is not in the store {self.root}",
            digest=payload.sha256,
        )

    def stage(self, payload: PayloadObject, fetch: Callable[[Path], Path]) -> Admission:
        """Bring one worker's pack here unless it is here already, and admit it.

        Args:
            payload: From the descriptor.
            fetch: Downloads into the given private directory, which may hold what an earlier attempt left, and returns
                the file; called with the lock held, in one process at a time.

        Raises:
            IntegrityError: What was fetched, or what is here, is not the pack.
        """
        final = self.path(payload.sha256)
        with self.lock(payload.sha256):
            self.mark_used(payload.sha256)
            staging = self.directory / f".{hex_of(payload.sha256)}.staging"
            if not os.path.lexists(final):
                staging.mkdir(mode=0o700, exist_ok=True)
                fetched = fetch(staging)
                self._require(fetched, payload)
                publish_file(fetched, final, at=self.at)
            # Also what a process left that was killed between these two lines.
            remove_tree(staging)
            return self._admit(payload, "evidence", None, None)  # before anybody can delete it

    def _require(self, fetched: Path, payload: PayloadObject) -> None:
        fetched.chmod(0o600)
        with open_private(fetched) as (fd, status):
            actual = hash_file(fd, status, str(fetched))
        if actual != payload.sha256 or status.st_size != payload.bytes:
            # Nothing to resume from: the next attempt must begin anew.
            fetched.unlink()
            raise IntegrityError(
                "the download is not the pack (rule store.3)",
                path=str(fetched),
                expected=f"{payload.sha256}, {payload.bytes} bytes",
                actual=f"{actual}, {status.st_size} bytes",
            )

    def delete(self, sha256: str, *, unless_used_since_ns: int | None = None) -> int:
        """Delete a pack and its record, whoever needs it.

        Args:
            sha256: Digest.
            unless_used_since_ns: Leave it alone when it was used after this time, ns.

        Returns:
            How many bytes were freed; 0 when it was not there, or was used.
        """
        path = self.path(sha256)
        if not os.path.lexists(path):
            return 0
        with self.lock(sha256):
            status = _status(path)
            if status is None:
                return 0
            if unless_used_since_ns is not None and max(status.st_mtime_ns, self._used_ns(path)) > unless_used_since_ns:
                return 0
            for name in (Path(record_path(path)), path, self._lock_file(sha256)):
                self.at(f"{name.name}:unlink")
                name.unlink(missing_ok=True)
        return status.st_size

    def drop_staging(self, before_ns: int, *, dry_run: bool = False) -> list[Path]:
        """Remove downloads that nobody has gone on with since a time.

        Args:
            before_ns: Time, ns.
            dry_run: Only tell.

        Returns:
            What was (or would be) removed.
        """
        stale = []
        for path in self._named(_STAGING):
            status = _status(path)
            if status is None or status.st_mtime_ns > before_ns:
                continue
            if not dry_run:
                with self.lock(path.name.removeprefix(".").removesuffix(".staging")):
                    status = _status(path)  # somebody may have gone on with it while the lock was waited for
                    if status is None or status.st_mtime_ns > before_ns:
                        continue
                    shutil.rmtree(path, ignore_errors=True)
            stale.append(path)
        return stale


def _status(path: Path) -> os.stat_result | None:
    """Return the stat of a name, or None: others bring and delete names while this process looks at them."""
    with suppress(FileNotFoundError):
        return path.lstat()
    return None


def sizes_of(path: Path) -> Iterator[int]:
    """Yield the size of a file, or of all files below a directory, bytes; what others delete meanwhile is gone."""
    for directory, _, names in os.walk(path):
        yield from (status.st_size for name in names if (status := _status(Path(directory, name))))
    status = _status(path)
    if status and not stat.S_ISDIR(status.st_mode):
        yield status.st_size
