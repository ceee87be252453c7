"""One ``criu swrk`` process: its start, the conversation with it, and its end.

The one rule: however a conversation ends, the process has ended before this module returns, and the tree it worked on
runs on. CRIU that finds nobody at the other end of its socket undoes its work at the next notification; one that is
killed lets go of its tracees, whose parasite leaves when its own socket closes.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from attrs import field, frozen

from coldsnap.drivers.base import Spawner, end_process
from coldsnap.drivers.messages import enum_value, message
from coldsnap.errors import DriverError, StepTimeout

__all__ = ["IMAGES_FD", "PAGES_FD", "SHARED_FD", "WORK_FD", "LocalSpawner", "Session", "local_spawner"]

SOCKET_FD, IMAGES_FD, WORK_FD, SHARED_FD, PAGES_FD = 3, 4, 5, 6, 7
POLL_S = 0.25
GRACE_S = 5.0
"""How long CRIU may take to undo what it did, once nobody listens to it any more, s."""


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
def local_spawner() -> Iterator[LocalSpawner]:
    """Provide a spawner for one question."""
    spawner = LocalSpawner()
    try:
        yield spawner
    finally:
        spawner.close()


class Session:
    """One ``criu swrk`` process and the caller's end of its socket."""

    def __init__(self, spawner: Spawner, path: str, command: str, deadline_s: float, fds: Mapping[int, int]) -> None:
        self._spawner, self._command, self._timeout_s = spawner, command, deadline_s
        self._deadline = time.monotonic() + deadline_s
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._their_link = f"socket:[{os.fstat(theirs.fileno()).st_ino}]"
        # No configuration file may add an option behind our back. The directories travel as descriptors: a path may
        # mean something else in the tree's mount namespace (its /dev/shm is private), and the numbers in
        # images_dir_fd and work_dir_fd are looked up in the sender's /proc entry, which that namespace does not have.
        # A directory without plugins: an installed CUDA plugin would checkpoint what the CUDA helper has checkpointed.
        work = f"/proc/self/fd/{WORK_FD}"
        directories = ("--work-dir", work, "--libdir", work) if WORK_FD in fds else ()
        argv = (path, "--no-default-config", *directories, "swrk", str(SOCKET_FD))
        try:
            self.pid = spawner.spawn_helper(
                argv,
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
                name=f"criu-{command}",
                fds={SOCKET_FD: theirs.fileno(), **fds},
            )
        except BaseException:
            self.socket.close()
            raise
        finally:
            theirs.close()

    def _send(self, request: Any) -> None:
        """Send one request, or the answer to a notification."""
        self.socket.send(request.SerializeToString())

    def _receive(self) -> Any:
        """Wait for CRIU's next message until the deadline."""
        while not select.select([self.socket], [], [], max(0.0, min(POLL_S, self._deadline - time.monotonic())))[0]:
            if time.monotonic() >= self._deadline:
                raise StepTimeout(
                    f"criu {self._command} did not end within {self._timeout_s:g} s and was stopped",
                    seconds=self._timeout_s,
                )
            if not self._alive():
                break  # a process that it had forked may still hold the socket open
        self.socket.setblocking(False)
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            data = b""
        finally:
            self.socket.setblocking(True)
        if not data:
            raise ConnectionError("its process ended without an answer")
        answer = message("criu_resp")()
        answer.ParseFromString(data)
        return answer

    def _alive(self) -> bool:
        try:
            fd = os.open(f"{self.pid}/stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._spawner.proc_fd)
            with os.fdopen(fd, encoding="utf-8", errors="replace") as file:
                return file.read().rpartition(")")[2].split()[0] not in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return False

    def converse(self, request: Any, notify: Mapping[str, Callable[[int], None]]) -> tuple[Any, BaseException | None]:
        """Send a request, serve notifications, return the answer.

        Args:
            request: A ``criu_req``.
            notify: What to call for a notification, with the pid it brings.

        Returns:
            The ``criu_resp``, and what a callback raised: CRIU has undone its work by then.

        Raises:
            StepTimeout: The deadline passed.
            ConnectionError: CRIU ended without an answer.
        """
        raised: BaseException | None = None
        kind = enum_value("criu_req_type", "NOTIFY")
        self._send(request)
        while (answer := self._receive()).type == kind:
            try:
                if (callback := notify.get(answer.notify.script)) is not None:
                    callback(answer.notify.pid)
            except BaseException as error:  # noqa: BLE001  (raised again once CRIU has undone its work)
                raised = error
            reply = message("criu_req")()
            reply.type, reply.notify_success = kind, raised is None
            self._send(reply)
        return answer, raised

    def end(self) -> None:
        """Let CRIU end: by itself when it can, by force otherwise."""
        # With nobody at the other end the next notification fails, and CRIU undoes everything in good order.
        self.socket.close()
        try:
            status = self._spawner.wait_helper(self.pid, timeout_s=GRACE_S)
        except TimeoutError:
            # A killed tracer lets go of its tracees, and its parasite in them leaves when its socket closes.
            end_process(self._spawner.proc_fd, self.pid)
            status = self._spawner.wait_helper(self.pid, timeout_s=GRACE_S)
        if status < 0:
            self._end_orphans()

    def _end_orphans(self) -> None:
        """Kill what a killed CRIU had forked: known by the socket that each inherited, and no process of a tree has."""
        proc_fd = self._spawner.proc_fd
        for pid in filter(str.isdigit, os.listdir(proc_fd)):
            try:
                link = os.readlink(f"{pid}/fd/{SOCKET_FD}", dir_fd=proc_fd)
            except OSError:
                continue  # gone, or without such a descriptor
            if link == self._their_link:
                end_process(proc_fd, int(pid))
