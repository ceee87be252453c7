"""Validation as a service on a private Unix socket, and its client.

The one rule: the service decides nothing itself; it checks who asks, calls
:func:`coldsnap.artifact.admission.decide`, and answers one line (rules validation.8 to validation.10,
``docs/format/validation.md``).
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, Self

from attrs import field, frozen

from coldsnap.artifact import canonical, record
from coldsnap.artifact.admission import Admission, Request, check, decide
from coldsnap.artifact.canonical import Json
from coldsnap.artifact.evidence import Verify
from coldsnap.artifact.private import read_small
from coldsnap.errors import ArtifactError, FormatError, IntegrityError

__all__ = ["ValidationService", "ask", "failure", "read_token", "write_token"]

MAX_MESSAGE_BYTES = 1 << 20
MAX_TOKEN_BYTES = 4096
_PATIENCE_S = 30.0  # for the request line of a peer that has connected


@frozen(kw_only=True)
class Options:
    """What a request asks for."""

    path: str
    record: str
    expected_sha256: str
    expected_bytes: int = 0
    worker: str = ""
    verify: Verify = "evidence"


@frozen(kw_only=True)
class Call:
    """One request line."""

    format: Literal[1] = 1
    id: str = field(validator=record.matching(r"[0-9a-f]{16,64}", "16 to 64 hex digits"))
    token: str
    options: Options


@frozen(kw_only=True)
class Failure:
    """Why not."""

    reason: str
    message: str


@frozen(kw_only=True)
class Answer:
    """One answer line."""

    format: Literal[1] = 1
    id: str
    ok: bool
    admission: Admission | None = None
    error: Failure | None = None


def write_token(path: Path) -> str:
    """Create a private token file that must not exist yet, and return the token."""
    token = secrets.token_urlsafe(32)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="ascii") as stream:
        stream.write(token + "\n")
    return token


def read_token(path: Path) -> str:
    """Read a private token file.

    Raises:
        FormatError: It is not private, too large, or its token is too short or has white space (validation.9).
    """
    data = read_small(path, max_bytes=MAX_TOKEN_BYTES, rule="validation.9")
    token = data.decode("ascii", "replace").strip()
    if len(token) < 16 or token.split() != [token] or not token.isprintable():
        raise FormatError(
            "a token has at least 16 printable characters and no white space", path=str(path), rule="validation.9"
        )
    return token


def failure(error: Exception) -> Failure:
    """Name the reason of a refusal, as in ``docs/format/validation.md``."""
    text = str(error)
    reason = "unusable_path"
    if isinstance(error, PermissionError):
        reason = "unauthorized"
    elif isinstance(error, FormatError) and not error.rule.startswith("evidence."):
        reason = "invalid_request"
    elif isinstance(error, FormatError) and ".coldsnap-validation.json" in error.path:
        reason = "record_unreadable"
    elif isinstance(error, IntegrityError):
        reasons = {
            "validation.2": "size_mismatch",
            "validation.4": "digest_mismatch",
            "changed": "changed_during_validation",
        }
        reason = next(
            (name for word, name in reasons.items() if word in text),
            "digest_mismatch" if "rule pack" in text else reason,
        )
    return Failure(reason=reason, message=text)


class ValidationService:
    """A service for local clients of the same user.

    Use as a context manager, or call :meth:`serve_forever`.

    Args:
        socket_path: Where to listen; its directory should be private. A stale socket there is replaced.
        token_file: The private file whose token every request must carry.
        concurrency: How many validations run at once, 1 to 64.
    """

    def __init__(self, socket_path: Path, token_file: Path, *, concurrency: int = 2) -> None:
        if not 1 <= concurrency <= 64:
            raise ValueError(f"concurrency must be 1 to 64, not {concurrency}")
        self.socket_path = socket_path
        self._token = read_token(token_file)
        self._workers = ThreadPoolExecutor(concurrency, thread_name_prefix="coldsnap-validate")
        self._listener = _listen(socket_path)
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, name="coldsnap-validation-service", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, let running validations end, remove the socket."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._workers.shutdown()
        self.socket_path.unlink(missing_ok=True)

    def serve_forever(self) -> None:
        """Answer until :meth:`close`."""
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed.is_set():
                    return
                raise
            try:
                self._workers.submit(self._serve, connection)
            except RuntimeError:
                connection.close()  # the service was closed while this peer was being accepted

    def _serve(self, connection: socket.socket) -> None:
        # A peer that goes away or says nonsense costs its own connection and nothing else.
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_PATIENCE_S)
            answer = self._answer(connection)
            connection.sendall(canonical.encode(record.write(answer)) + b"\n")

    def _answer(self, connection: socket.socket) -> Answer:
        call_id = "0" * 16
        try:
            _require_same_user(connection)
            call = record.read(Call, _line(connection, "request", until=time.monotonic() + _PATIENCE_S), path="request")
            call_id = call.id
            if not hmac.compare_digest(call.token.encode(), self._token.encode()):
                raise PermissionError("the token is not the one of this service")
            return Answer(id=call_id, ok=True, admission=decide(_request(call.options)))
        except (ArtifactError, OSError) as error:
            return Answer(id=call_id, ok=False, error=failure(error))


def _request(options: Options) -> Request:
    try:
        request = Request(
            path=options.path,
            expected_sha256=options.expected_sha256,
            expected_bytes=options.expected_bytes,
            worker=options.worker,
            verify=options.verify,
        )
    except record.Broken as error:
        raise FormatError(str(error), path="request at $.options", rule=error.rule) from None
    if options.record != request.record:
        raise FormatError(
            f"the record must be {request.record}", path="request at $.options.record", rule="validation.7"
        )
    return request


def _listen(path: Path) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ArtifactError(f"{path} exists and is not a socket; choose another path for the service")
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(os.fspath(path)) == 0:
                raise ArtifactError(f"a service already listens on {path}")
        path.unlink()
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(os.fspath(path))
        # The umask of the process is left alone because all threads share it; until here the token and the uid protect.
        path.chmod(0o600)
        listener.listen(64)
    except BaseException:
        listener.close()
        raise
    return listener


def _require_same_user(connection: socket.socket) -> None:
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if uid != os.geteuid():
        raise PermissionError(f"this service answers uid {os.geteuid()}, not uid {uid} (rule validation.8)")


def _line(connection: socket.socket, what: str, *, until: float) -> Json:
    data = b"".join(_received(connection, until))
    if len(data) > MAX_MESSAGE_BYTES or not data.endswith(b"\n"):
        raise FormatError("a message is one line of at most 1 MiB", path=what, rule="validation.10")
    return canonical.decode(data[:-1], path=what, max_bytes=MAX_MESSAGE_BYTES)


def _received(connection: socket.socket, until: float) -> Iterator[bytes]:
    left = MAX_MESSAGE_BYTES + 1
    while left > 0:
        # The timeout of a socket is that of one call: a peer that sends a byte now and then would never be late.
        if (patience_s := until - time.monotonic()) <= 0:
            raise TimeoutError("the peer took too long")
        connection.settimeout(patience_s)
        if not (data := connection.recv(min(left, 1 << 16))):
            return
        left -= len(data)
        yield data


def ask(request: Request, *, socket_path: Path, token_file: Path, timeout_s: float) -> Admission:
    """Have a pack validated by a service.

    Args:
        request: What.
        socket_path: The service's socket.
        token_file: The private file with its token.
        timeout_s: Deadline, s.

    Raises:
        IntegrityError: The service refused the pack, or answered something else.
        FormatError: The token file or the answer breaks a rule.
        ArtifactError: There is no service, or it did not answer in time.
    """
    options = Options(
        path=request.path,
        record=request.record,
        expected_sha256=request.expected_sha256,
        expected_bytes=request.expected_bytes,
        worker=request.worker,
        verify=request.verify,
    )
    call = Call(id=secrets.token_hex(16), token=read_token(token_file), options=options)
    answer = record.read(Answer, _exchange(call, socket_path, timeout_s), path=str(socket_path))
    if answer.error is not None or answer.admission is None:
        reason, message = (answer.error.reason, answer.error.message) if answer.error else ("no admission", "")
        raise IntegrityError(
            f"the validation service refused ({reason}: {message})",
            path=request.path,
            expected=request.expected_sha256,
            actual=reason,
        )
    return check(admission=answer.admission, request=request)


def _exchange(call: Call, socket_path: Path, timeout_s: float) -> Json:
    try:
        until = time.monotonic() + timeout_s
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(os.fspath(socket_path))
            _require_same_user(connection)
            connection.sendall(canonical.encode(record.write(call)) + b"\n")
            connection.shutdown(socket.SHUT_WR)
            return _line(connection, str(socket_path), until=until)
    except TimeoutError as error:
        raise ArtifactError(f"the validation service at {socket_path} did not answer within {timeout_s:g} s") from error
    except OSError as error:
        raise ArtifactError(f"the validation service at {socket_path} cannot be used: {error}") from error
