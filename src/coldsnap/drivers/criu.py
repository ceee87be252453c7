"""CRIU, spoken to over ``criu swrk``: one process for each request, protobuf messages on a SEQPACKET socket pair.

The one rule: the answer decides. CRIU writes ``Error`` lines about things that do not matter (a resource limit it may
not raise) and none about some that do, so a log is quoted, never searched.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen

from coldsnap.drivers.base import Spawner, end_process
from coldsnap.drivers.messages import enum_value, message
from coldsnap.errors import DriverError, StepTimeout

__all__ = ["Criu", "Features", "LocalSpawner", "log_tail"]

GHOST_LIMIT_BYTES = 128 << 20
"""Unlinked files up to this size travel in the image; NCCL's proxy shared memory is 65 MiB."""

FREEZE_TIMEOUT_S = 10
LOG_LEVEL = 4
LOG_TAIL_LINES = 20
LOG_READ_BYTES = 64 << 10
CHECK_TIMEOUT_S = 20.0
GRACE_S = 5.0
"""How long CRIU may take to undo what it did, once nobody listens to it any more, s."""

SOCKET_FD, IMAGES_FD, WORK_FD = 3, 4, 5

Notify = Callable[[int], None]


@frozen(kw_only=True)
class Features:
    """What CRIU says it can do on this kernel."""

    mem_track: bool
    lazy_pages: bool
    pidfd_store: bool


@frozen
class LocalSpawner:
    """Starts helpers as children of this process: enough to ask CRIU for its version or a check."""

    proc_fd: int = field(factory=lambda: os.open("/proc", os.O_DIRECTORY | os.O_RDONLY), init=False)

    def spawn_helper(self, argv: Sequence[str], *, env: Mapping[str, str], name: str, fds: Mapping[int, int]) -> int:
        """Start a helper; see :class:`Spawner`."""
        # First to numbers nobody asks for: a plain dup2 could overwrite a descriptor that is still to be moved.
        copies = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for number, fd in fds.items()}
        null: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_OPEN, n, "/dev/null", os.O_RDWR, 0) for n in range(3)]
        moves: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_DUP2, copy, number) for number, copy in copies.items()]
        try:
            return os.posix_spawn(argv[0], list(argv), dict(env), file_actions=[*null, *moves])
        except OSError as error:
            raise DriverError(f"the helper {name} cannot be started: {error}", command=argv[0]) from error
        finally:
            for copy in copies.values():
                os.close(copy)

    def wait_helper(self, pid: int, *, timeout_s: float) -> int:
        """Wait for a helper; see :class:`Spawner`."""
        pidfd = os.pidfd_open(pid)
        try:
            if not select.select([pidfd], [], [], timeout_s)[0]:
                raise TimeoutError(f"the process {pid} still runs after {timeout_s} s")
        finally:
            os.close(pidfd)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def close(self) -> None:
        """Close the descriptor of ``/proc``."""
        os.close(self.proc_fd)


@contextmanager
def _local() -> Iterator[LocalSpawner]:
    spawner = LocalSpawner()
    try:
        yield spawner
    finally:
        spawner.close()


def log_tail(directory_fd: int, name: str) -> str:
    """Return the last lines of a log of CRIU, without the one line that means nothing.

    Args:
        directory_fd: The directory it lies in.
        name: Its name.
    """
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory_fd)
    except OSError:
        return ""
    with os.fdopen(fd, "rb") as log:
        log.seek(max(0, os.fstat(fd).st_size - LOG_READ_BYTES))
        lines = log.read().decode("utf-8", "replace").splitlines()
    # Without CAP_SYS_RESOURCE CRIU complains that it cannot raise its own file limit, and goes on.
    return "\n".join([line for line in lines if "Can't setup RLIMIT_NOFILE" not in line][-LOG_TAIL_LINES:])


class _Session:
    """One ``criu swrk`` process and the caller's end of its socket."""

    def __init__(self, spawner: Spawner, path: str, command: str, deadline_s: float, fds: Mapping[int, int]) -> None:
        self._spawner, self._command, self._timeout_s = spawner, command, deadline_s
        self._deadline = time.monotonic() + deadline_s
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # No configuration file may add an option behind our back. The directories travel as descriptors: a path may
        # mean something else in the tree's mount namespace (its /dev/shm is private), and the numbers in
        # images_dir_fd and work_dir_fd are looked up in the sender's /proc entry, which that namespace does not have.
        directory = ("--work-dir", f"/proc/self/fd/{WORK_FD}") if WORK_FD in fds else ()
        argv = (path, "--no-default-config", *directory, "swrk", str(SOCKET_FD))
        try:
            self.pid = spawner.spawn_helper(
                argv,
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
                name=f"criu-{command}",
                fds={3: theirs.fileno(), **fds},
            )
        except BaseException:
            self.socket.close()
            raise
        finally:
            theirs.close()

    def send(self, request: Any) -> None:
        """Send one request, or the answer to a notification."""
        self.socket.send(request.SerializeToString())

    def receive(self) -> Any:
        """Wait for CRIU's next message until the deadline."""
        left_s = self._deadline - time.monotonic()
        self.socket.settimeout(max(left_s, 0.001))
        try:
            data = self.socket.recv(1 << 16)
        except TimeoutError as error:
            raise StepTimeout(
                f"criu {self._command} did not end within {self._timeout_s:.0f} s; it was stopped and the tree continued",
                seconds=self._timeout_s,
            ) from error
        if not data:
            raise ConnectionError("its process ended without an answer")
        answer = message("criu_resp")()
        answer.ParseFromString(data)
        return answer

    def end(self) -> None:
        """Let CRIU end: by itself when it can, by force otherwise."""
        # With nobody at the other end the next notification fails, and CRIU undoes everything in good order.
        self.socket.close()
        try:
            self._spawner.wait_helper(self.pid, timeout_s=GRACE_S)
        except TimeoutError:
            # A killed tracer lets go of its tracees, and its parasite in them leaves when its socket closes.
            end_process(self._spawner.proc_fd, self.pid)
            self._spawner.wait_helper(self.pid, timeout_s=GRACE_S)


class Criu:
    """One CRIU executable.

    Args:
        path: The executable.
        spawner: Starts it beside the tree; without one it runs in the caller's namespaces, which is enough for
            ``version``, ``check`` and ``features``.
    """

    def __init__(self, path: str | Path, spawner: Spawner | None = None) -> None:
        self.path = str(path)
        self._spawner = spawner

    def version(self) -> tuple[int, int, int]:
        """Return major, minor and sublevel."""
        found = self._ask("VERSION").version
        return found.major_number, found.minor_number, found.sublevel

    def check(self) -> None:
        """Have CRIU check kernel and privileges.

        Raises:
            DriverError: They do not suffice.
        """
        self._ask("CHECK")

    def features(self) -> Features:
        """Ask which optional features CRIU has on this kernel."""
        request = message("criu_req")()
        for name in ("mem_track", "lazy_pages", "pidfd_store"):
            setattr(request.features, name, True)
        found = self._ask("FEATURE_CHECK", request).features
        return Features(mem_track=found.mem_track, lazy_pages=found.lazy_pages, pidfd_store=found.pidfd_store)

    def dump(
        self,
        pid: int,
        *,
        images_fd: int,
        work_fd: int,
        leave: Literal["stopped", "running"],
        timeout_s: float,
        notify: Mapping[str, Notify] | None = None,
    ) -> None:
        """Write the image of a process tree.

        Args:
            pid: The root, in the tree's pid namespace.
            images_fd: Directory for the image files.
            work_fd: Directory for ``dump.log`` and ``stats-dump``.
            leave: What becomes of the tree after a dump that succeeded. After one that failed it runs on.
            timeout_s: Deadline, s.
            notify: By notification: ``pre-dump``, ``post-dump`` (the tree is frozen) and others. One that raises
                undoes the dump; its exception is raised here.

        Raises:
            DriverError: CRIU refused; the tree runs on.
            StepTimeout: The deadline passed; the tree runs on.
        """
        options = {"pid": pid, "log_file": "dump.log", "timeout": max(1, min(FREEZE_TIMEOUT_S, int(timeout_s)))}
        options |= {"leave_running": leave == "running", "leave_stopped": leave == "stopped"}
        # A connection that nobody accepted yet would make the dump fail: its client sees a reset instead.
        options |= {"tcp_skip_in_flight": True, "ghost_limit": GHOST_LIMIT_BYTES}
        fds = {IMAGES_FD: images_fd, WORK_FD: work_fd}
        self._work("DUMP", options, fds, work_fd, timeout_s, notify or {})

    def restore(
        self,
        *,
        images_fd: int,
        work_fd: int,
        timeout_s: float,
        notify: Mapping[str, Callable[[int], None]] | None = None,
    ) -> int:
        """Bring a process tree back.

        Args:
            images_fd: Directory of the image files.
            work_fd: Directory for ``restore.log`` and ``stats-restore``.
            timeout_s: Deadline, s.
            notify: By notification; ``setup-namespaces`` and ``post-restore`` bring the root's pid.

        Returns:
            The root's pid. It is a child of the spawner.

        Raises:
            DriverError: CRIU refused, and killed what it had restored.
            StepTimeout: The deadline passed.
        """
        # The root becomes a child of CRIU's parent, the keeper: nobody else could reap it or see it end.
        options = {"log_file": "restore.log", "rst_sibling": True}
        fds = {IMAGES_FD: images_fd, WORK_FD: work_fd}
        answer = self._work("RESTORE", options, fds, work_fd, timeout_s, notify or {})
        return int(answer.restore.pid)

    def _work(
        self,
        command: str,
        options: Mapping[str, Any],
        fds: Mapping[int, int],
        work_fd: int,
        timeout_s: float,
        notify: Mapping[str, Notify],
    ) -> Any:
        request = message("criu_req")()
        request.opts.images_dir_fd = -1
        request.opts.images_dir = f"/proc/self/fd/{IMAGES_FD}"
        request.opts.log_level = LOG_LEVEL
        request.opts.notify_scripts = True
        request.opts.manage_cgroups_mode = enum_value("criu_cg_mode", "IGNORE")
        request.opts.network_lock = enum_value("criu_network_lock_method", "SKIP")
        for name in ("file_locks", "link_remap", "tcp_established"):
            setattr(request.opts, name, True)
        for name, value in options.items():
            setattr(request.opts, name, value)
        return self._ask(command, request, fds=fds, work_fd=work_fd, timeout_s=timeout_s, notify=notify)

    def _ask(
        self,
        command: str,
        request: Any = None,
        *,
        fds: Mapping[int, int] | None = None,
        work_fd: int | None = None,
        timeout_s: float = CHECK_TIMEOUT_S,
        notify: Mapping[str, Notify] | None = None,
    ) -> Any:
        request = request if request is not None else message("criu_req")()
        request.type = enum_value("criu_req_type", command)
        verb = command.lower().replace("_", "-")
        with _local() if self._spawner is None else nullcontext(self._spawner) as spawner:
            session = _Session(spawner, self.path, verb, timeout_s, fds or {})
            raised: BaseException | None = None
            try:
                session.send(request)
                answer, raised = _converse(session, notify or {})
                reason = "" if answer.success else answer.cr_errmsg.strip() or os.strerror(answer.cr_errno or errno.EIO)
            except (ConnectionError, BrokenPipeError) as error:
                reason = str(error)
            finally:
                session.end()
        if raised is not None:
            raise raised
        if reason:
            tail = "" if work_fd is None else log_tail(work_fd, f"{verb}.log")
            raise DriverError(f"criu {verb} failed: {reason}", command=f"{self.path} {verb}", log_tail=tail)
        return answer


def _converse(session: _Session, notify: Mapping[str, Notify]) -> tuple[Any, BaseException | None]:
    """Answer notifications until CRIU answers; a callback that raises makes CRIU undo, then its error comes back."""
    raised: BaseException | None = None
    kind = enum_value("criu_req_type", "NOTIFY")
    while (answer := session.receive()).type == kind:
        reply = message("criu_req")()
        reply.type = kind
        try:
            if (callback := notify.get(answer.notify.script)) is not None:
                callback(answer.notify.pid)
        except BaseException as error:  # noqa: BLE001  (raised again once CRIU has undone its work)
            raised = error
        reply.notify_success = raised is None
        session.send(reply)
    return answer, raised
