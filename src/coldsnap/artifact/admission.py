"""Admission of a pack: the one function that decides whether a file is the pack it is named after.

The one rule: whatever asks, in whatever process, gets its answer from :func:`decide`, so that rules and record
cannot drift apart (rules validation.1 to validation.7, ``docs/format/validation.md``).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from attrs import field, frozen

from coldsnap.artifact import canonical, record
from coldsnap.artifact.durable import FaultPoint, unharmed, write_file_durably
from coldsnap.artifact.evidence import Identity, Verify, hash_file, identity_of, remembered
from coldsnap.artifact.lanes import Lanes
from coldsnap.artifact.pack import PackEntry, verify_extents
from coldsnap.artifact.private import open_private, read_small
from coldsnap.errors import FormatError, IntegrityError

__all__ = ["Admission", "Request", "Validation", "check", "decide", "is_bound", "record_path", "vouch"]

PROVIDER = "sha256-cache-v1"
MAX_RECORD_BYTES = 1 << 20
RECORD_SUFFIX = ".coldsnap-validation.json"


@frozen(kw_only=True)
class Request:
    """What is to be validated.

    Attributes:
        path: The pack, absolute.
        expected_sha256: Its digest.
        expected_bytes: Its size; 0: whatever it is.
        worker: Who will read it; only repeated in the admission.
        verify: ``evidence`` trusts the record, ``full`` reads the file whatever the record says.
    """

    path: str = field(validator=record.matching(r"/[^\x00]+", "an absolute path"))
    expected_sha256: str = field(validator=record.sha256)
    expected_bytes: int = field(default=0, validator=record.at_least(0))
    worker: str = ""
    verify: Verify = "evidence"

    @property
    def record(self) -> str:
        """Where the record is: beside the pack."""
        return record_path(self.path)


@frozen(kw_only=True)
class _Expected:
    bytes: int = field(validator=record.at_least(0))
    sha256: str = field(validator=record.sha256)


@frozen(kw_only=True)
class _Diagnostic:
    ctime_ns: int
    uid: int
    gid: int
    mode: int


@frozen(kw_only=True)
class ValidationRecord:
    """The file beside a pack; it is the same whoever writes it."""

    format: Literal[1] = 1
    kind: Literal["coldsnap-payload-validation"] = "coldsnap-payload-validation"
    provider: Literal["sha256-cache-v1"] = "sha256-cache-v1"
    blob: str
    expected: _Expected
    content_identity: Identity
    diagnostic_identity: _Diagnostic
    content_evidence: Literal["full-sha256"] = "full-sha256"
    index_sha256: str | None = field(default=None, validator=record.optional(record.sha256))


@frozen(kw_only=True)
class Validation:
    """How an admission came about."""

    record: str
    provider: Literal["sha256-cache-v1"] = "sha256-cache-v1"
    content_evidence: Literal["cached-full-sha256", "full-sha256-this-operation"]
    reason: Literal["cached_validation", "revalidated_existing"]
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    uid: int
    gid: int
    mode: int
    bytes_hashed: int


@frozen(kw_only=True)
class Admission:
    """The answer: the file at ``path`` is the pack."""

    format: Literal[1] = 1
    kind: Literal["coldsnap-payload-validation-result"] = "coldsnap-payload-validation-result"
    decision: Literal["accept"] = "accept"
    worker: str
    path: str
    bytes: int
    sha256: str
    validation: Validation


def record_path(path: str | os.PathLike[str]) -> str:
    """Return where the record of a pack is."""
    return os.fspath(path) + RECORD_SUFFIX


def decide(
    request: Request,
    *,
    index: Sequence[PackEntry] | None = None,
    threads: int | None = None,
    at: FaultPoint = unharmed,
    lanes: Lanes | None = None,
) -> Admission:
    """Admit a pack.

    Args:
        request: Which file, and what it must be.
        index: Its extents, from a manifest. The first verification binds them to the identity; from then on a full
            one uses them, on all cores.
        threads: For a verification by extents; None: all cores.
        at: Fault point.
        lanes: For a verification by extents: who hashes several at once on each core; None: nobody.

    Returns:
        The admission.

    Raises:
        FormatError: The file or its record is a link, foreign or open to others.
        IntegrityError: It is missing, of another size or content, or changed meanwhile.
    """
    verify = partial(verify_extents, path=request.path, threads=threads, lanes=lanes)
    with open_private(request.path) as (fd, status):
        _require_size(request, status)
        known = _read_record(request)
        held = known is not None and known.content_identity == identity_of(status)
        if request.verify == "evidence" and held:
            return _admission(request, status, cached=True)
        index_sha256 = None if index is None else _index_digest(index)
        if index is not None and known is not None and known.index_sha256 == index_sha256:
            _verify_by_index(request, fd, status, index, verify)
        else:
            _verify_whole(request, fd, status, index, verify)
    made = _record(request, status, index_sha256 or (known.index_sha256 if known else None))
    if made != known:
        data = canonical.encode(record.write(made))
        remembered(lambda: write_file_durably(Path(request.record), data, at=at))
    return _admission(request, status, cached=False)


def vouch(request: Request, verified: Identity, *, index: Sequence[PackEntry], at: FaultPoint = unharmed) -> Admission:
    """Admit a pack that this process read back, extent by extent, before it got its name; it is not read again.

    Args:
        request: Which file, and what it must be.
        verified: Identity of the file that was read.
        index: Its extents.
        at: Fault point.

    Raises:
        FormatError: The file is a link, foreign or open to others.
        IntegrityError: It is missing, or not the file that was read (validation.5).
    """
    with open_private(request.path) as (_, status):
        _require_size(request, status)
        if identity_of(status) != verified:
            raise IntegrityError(
                "the file changed after it was verified (rule validation.5)",
                path=request.path,
                expected=str(verified),
                actual=str(identity_of(status)),
            )
    data = canonical.encode(record.write(_record(request, status, _index_digest(index))))
    remembered(lambda: write_file_durably(Path(request.record), data, at=at))
    return _admission(request, status, cached=False)


def is_bound(request: Request, index: Sequence[PackEntry]) -> bool:
    """Tell whether a record that holds binds this index to the pack (pack.5); no byte of the pack is read.

    Raises:
        FormatError: The file or its record is a link, foreign or open to others.
        IntegrityError: It is missing.
    """
    with open_private(request.path) as (_, status):
        known = _read_record(request)
    held = known is not None and known.content_identity == identity_of(status)
    return known is not None and held and known.index_sha256 == _index_digest(index)


_ByIndex: TypeAlias = Callable[[int, int, Sequence[PackEntry]], None]


def _require_size(request: Request, status: os.stat_result) -> None:
    if request.expected_bytes not in {0, status.st_size}:
        raise IntegrityError(
            "wrong size (rule validation.2)",
            path=request.path,
            expected=f"{request.expected_bytes} bytes",
            actual=f"{status.st_size} bytes",
        )


def _verify_whole(
    request: Request,
    fd: int,
    status: os.stat_result,
    index: Sequence[PackEntry] | None,
    verify: _ByIndex,
) -> None:
    actual = hash_file(fd, status, request.path)
    if actual != request.expected_sha256:
        raise IntegrityError(
            "wrong content (rule validation.4)", path=request.path, expected=request.expected_sha256, actual=actual
        )
    if index is not None:
        _verify_by_index(request, fd, status, index, verify)


def _verify_by_index(
    request: Request,
    fd: int,
    before: os.stat_result,
    index: Sequence[PackEntry],
    verify: _ByIndex,
) -> None:
    verify(fd, before.st_size, index)
    if identity_of(os.fstat(fd)) != identity_of(before):
        raise IntegrityError(
            "the file changed while it was verified (rule validation.5)",
            path=request.path,
            expected="a file at rest",
            actual="a change",
        )


def _index_digest(index: Sequence[PackEntry]) -> str:
    ordered = sorted(index, key=lambda entry: entry.offset)
    return canonical.digest([[entry.offset, entry.size, entry.sha256] for entry in ordered])


def _read_record(request: Request) -> ValidationRecord | None:
    try:
        data = read_small(Path(request.record), max_bytes=MAX_RECORD_BYTES)
        value = canonical.decode(data, path=request.record, max_bytes=MAX_RECORD_BYTES)
        known = record.read(ValidationRecord, value, path=request.record)
    except IntegrityError:
        return None
    except FormatError as error:
        if error.rule.startswith("evidence."):
            raise
        return None
    named = known.blob == os.path.basename(request.path) and known.expected.sha256 == request.expected_sha256
    return known if named and known.expected.bytes == known.content_identity.size else None


def _record(request: Request, status: os.stat_result, index_sha256: str | None) -> ValidationRecord:
    return ValidationRecord(
        blob=os.path.basename(request.path),
        expected=_Expected(bytes=status.st_size, sha256=request.expected_sha256),
        content_identity=identity_of(status),
        diagnostic_identity=_Diagnostic(
            ctime_ns=status.st_ctime_ns, uid=status.st_uid, gid=status.st_gid, mode=stat.S_IMODE(status.st_mode)
        ),
        index_sha256=index_sha256,
    )


def _admission(request: Request, status: os.stat_result, *, cached: bool) -> Admission:
    return Admission(
        worker=request.worker,
        path=request.path,
        bytes=status.st_size,
        sha256=request.expected_sha256,
        validation=Validation(
            record=request.record,
            content_evidence="cached-full-sha256" if cached else "full-sha256-this-operation",
            reason="cached_validation" if cached else "revalidated_existing",
            device=status.st_dev,
            inode=status.st_ino,
            size=status.st_size,
            mtime_ns=status.st_mtime_ns,
            ctime_ns=status.st_ctime_ns,
            uid=status.st_uid,
            gid=status.st_gid,
            mode=stat.S_IMODE(status.st_mode),
            bytes_hashed=0 if cached else status.st_size,
        ),
    )


def check(admission: Admission, request: Request) -> Admission:
    """Check that an admission from elsewhere answers the request (validation.7).

    Raises:
        IntegrityError: It answers another one.
    """
    answered = (admission.path, admission.sha256, admission.worker, admission.validation.record)
    asked = (request.path, request.expected_sha256, request.worker, request.record)
    sizes = {admission.bytes, admission.validation.size, request.expected_bytes or admission.bytes}
    if answered != asked or len(sizes) != 1:
        raise IntegrityError(
            "the admission answers another request (rule validation.7)",
            path=request.path,
            expected=str(asked),
            actual=str(answered),
        )
    return admission
