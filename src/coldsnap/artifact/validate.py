"""Which process validates a pack: this one, a command, or a service.

The one rule: the admission is the same whichever is chosen; only who reads the bytes differs.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from attrs import field, frozen

from coldsnap.artifact import canonical, record, service
from coldsnap.artifact.admission import Admission, Request, check, decide
from coldsnap.errors import ArtifactError, IntegrityError, PolicyError

__all__ = ["Transport", "validate"]

Name: TypeAlias = Literal["auto", "python", "cli", "rpc"]
DEFAULT_TIMEOUT_S = 1800.0
MAX_TIMEOUT_S = 86400.0


def _optional_path(value: str | os.PathLike[str] | None) -> Path | None:
    return None if value is None else Path(value)


def _words(value: Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)  # a text is one word: nothing splits it


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan  # which is in no range


@frozen(kw_only=True)
class Transport:
    """Who validates, and how to reach them.

    Attributes:
        name: ``auto``: a configured socket, else a configured command, else this process.
        rpc_socket: The service's socket, absolute.
        rpc_token_file: The private file with its token, absolute.
        command: The command and its first arguments; the executable is a clean absolute path. No shell is involved.
        timeout_s: Deadline of a command or a service, s; at most 86400.
    """

    name: Name = "auto"
    rpc_socket: Path | None = field(default=None, converter=_optional_path)
    rpc_token_file: Path | None = field(default=None, converter=_optional_path)
    command: tuple[str, ...] = field(default=(), converter=_words)
    timeout_s: float = field(default=DEFAULT_TIMEOUT_S, converter=_seconds)

    def __attrs_post_init__(self) -> None:
        """Report everything that is wrong, at once.

        Raises:
            PolicyError: With a problem for each field.
        """
        problems = []
        if self.name not in get_args(Name):
            problems.append(("$.name", f"must be {', '.join(get_args(Name))}, found {self.name!r}"))
        if not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            problems.append(("$.timeout_s", f"must be above 0 and at most {MAX_TIMEOUT_S:g}, found {self.timeout_s:g}"))
        if self.command and not _is_clean_absolute(self.command[0]):
            problems.append(("$.command", f"must begin with a clean absolute executable, found {self.command[0]!r}"))
        if (self.rpc_socket is None) != (self.rpc_token_file is None):
            problems.append(("$.rpc_socket", "needs rpc_token_file, and the other way round"))
        if self.name == "rpc" and self.rpc_socket is None:
            problems.append(("$.rpc_socket", "is needed by rpc"))
        if self.name == "cli" and not self.command:
            problems.append(("$.command", "is needed by cli"))
        if problems:
            raise PolicyError(problems, what="validation transport")

    @property
    def effective(self) -> Literal["python", "cli", "rpc"]:
        """What ``auto`` comes to."""
        if self.name != "auto":
            return self.name
        return "rpc" if self.rpc_socket else "cli" if self.command else "python"


def _is_clean_absolute(path: str) -> bool:
    return path.startswith("/") and not set(path.split("/")[1:]) & {"", ".", ".."}


def validate(request: Request, transport: Transport = Transport()) -> Admission:
    """Validate a pack through a transport.

    Args:
        request: What.
        transport: By whom.

    Raises:
        ArtifactError: As :func:`coldsnap.artifact.admission.decide`; or the command or service cannot be used.
    """
    match transport.effective:
        case "python":
            return decide(request)
        case "cli":
            return _run(request, transport)
        case "rpc":
            return _ask(request, transport)


def _ask(request: Request, transport: Transport) -> Admission:
    socket_path, token_file = transport.rpc_socket, transport.rpc_token_file
    if socket_path is None or token_file is None:
        raise PolicyError([("$.rpc_socket", "is needed by rpc")], what="validation transport")
    return service.ask(request, socket_path=socket_path, token_file=token_file, timeout_s=transport.timeout_s)


def _run(request: Request, transport: Transport) -> Admission:
    options = {
        "--path": request.path,
        "--record": request.record,
        "--expected-sha256": request.expected_sha256,
        "--expected-bytes": str(request.expected_bytes),
        "--worker": request.worker,
        "--verify": request.verify,
    }
    arguments = [part for option in options.items() for part in option]
    name = transport.command[0]
    try:
        ended = _ended([*transport.command, *arguments], transport.timeout_s)
    except subprocess.TimeoutExpired as error:
        raise ArtifactError(f"{name} did not answer within {transport.timeout_s:g} s") from error
    except OSError as error:
        raise ArtifactError(f"{name} cannot be run: {error.strerror}") from error
    if ended.returncode:
        said = (ended.stdout.strip() or ended.stderr.strip()).decode("utf-8", "replace")[-2000:]
        raise IntegrityError(
            f"{name} refused with status {ended.returncode}: {said}",
            path=request.path,
            expected=request.expected_sha256,
            actual="external_validation_failed",
        )
    value = canonical.decode(ended.stdout.strip(), path=name, max_bytes=service.MAX_MESSAGE_BYTES)
    return check(record.read(Admission, value, path=name), request)


def _ended(argv: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[bytes]:
    """Run a command in a session of its own, so that all it has started ends with it when it is late."""
    with subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(argv, process.returncode, stdout, stderr)
