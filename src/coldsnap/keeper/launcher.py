"""What a new process of the tree does between fork and exec.

The one rule: the program starts with stdin, stdout, stderr and the descriptors it was promised, and not one more;
default signals, a session of its own; and when it cannot start, its parent learns why in a sentence.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
from typing import NamedTuple, NoReturn

from coldsnap.keeper import kernel

START_TIMEOUT_S = 30.0
_FAILED = 127


class LaunchError(Exception):
    """The program did not start; ``str`` is the sentence."""


class Job(NamedTuple):
    """A program to start: its log is opened in ``log_fd``, a directory; ``fds`` maps its descriptors to ours."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    log_fd: int
    log_name: str
    fds: dict[int, int]
    deny_io_uring: bool


def launch(job: Job) -> int:
    """Start a program and wait until it runs.

    Returns:
        Its pid.

    Raises:
        LaunchError: It could not be started; no process remains.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become(job, writer)
    os.close(writer)
    try:
        # The end of the pipe is exec: the other side is close-on-exec.
        ready, _, _ = select.select([reader], [], [], START_TIMEOUT_S)
        failure = os.read(reader, 4096).decode("utf-8", "replace") if ready else "it hung before it could start"
    finally:
        os.close(reader)
    if failure:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        raise LaunchError(f"cannot start {job.argv[0]!r}: {failure}")
    return pid


def _become(job: Job, writer: int) -> NoReturn:
    report = writer
    try:
        report = _arrange(job, writer)
        try:
            os.chdir(job.cwd)
        except OSError as error:
            raise LaunchError(f"its working directory {job.cwd}: {error.strerror}") from None
        if job.deny_io_uring:
            kernel.deny_io_uring()
        _exec(job)
    except BaseException as error:  # noqa: BLE001 - this is a forked child: nothing may return into the parent's code
        with contextlib.suppress(OSError):
            os.write(report, str(error).encode("utf-8", "replace")[:4096])
    finally:
        os._exit(_FAILED)


def _arrange(job: Job, writer: int) -> int:
    """Set up session, signals and descriptors; return where the report pipe is now."""
    os.setsid()
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        # Python ignores SIGPIPE and SIGXFSZ, and what is ignored stays so across exec.
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # First everything out of the way of the numbers asked for, then to them.
    above = max(job.fds, default=2) + 1
    sources = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for number, fd in job.fds.items()}
    report = fcntl.fcntl(writer, fcntl.F_DUPFD_CLOEXEC, above)
    null = os.open("/dev/null", os.O_RDONLY)
    log = os.open(
        job.log_name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NOCTTY, 0o600, dir_fd=job.log_fd
    )
    for target, source in {0: null, 1: log, 2: log, **sources}.items():
        os.dup2(source, target)
    for fd in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, report, *job.fds}:
        with contextlib.suppress(OSError):  # the listing's own descriptor is gone
            os.close(fd)
    return report


def _exec(job: Job) -> NoReturn:
    try:
        os.execvpe(job.argv[0], job.argv, job.env)  # noqa: S606 - there is no shell, on purpose
    except OSError as error:
        search = "" if "/" in job.argv[0] else f" on PATH={job.env.get('PATH', os.defpath)}"
        if error.errno != errno.ENOENT:
            raise LaunchError(f"{error.strerror}{search}") from None
        if not search and os.path.exists(job.argv[0]):
            raise LaunchError("the interpreter in its first line (or its loader) does not exist") from None
        raise LaunchError(f"no such command{search}") from None
