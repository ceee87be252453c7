"""A caller's connection to a keeper: start one, find one, ask it something.

The one rule: every wait has an end, and a connection that broke says what became of the engine.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coldsnap.errors import AdmissionError, ColdSnapError, EngineError, StepError, StepTimeout
from coldsnap.keeper import layout, wire
from coldsnap.keeper.rundir import post_mortem
from coldsnap.keeper.tree import KILL_TIMEOUT_S

__all__ = ["ANSWER_S", "Connection", "Interpreter", "connect"]

ANSWER_S = 40.0  # a launch may take 30 s, all else is immediate
_ADMISSION = frozenset({"busy", "privilege", "peer"})


class _Channel(socket.socket):
    def __del__(self) -> None:
        # A handle that is merely forgotten is no mistake: the engine serves on, and Python has nothing to warn of.
        self.close()


class Connection:
    """A connection that has been greeted.

    Attributes:
        run_dir: The run directory.
        hello: What the keeper said.
        fds: Descriptors of the tree's ``/dev/shm``, ``/proc`` and ``/``, closed with the connection.
    """

    def __init__(self, run_dir: Path, channel: socket.socket, hello: Mapping[str, Any], fds: Sequence[int]) -> None:
        self.run_dir = run_dir
        self.hello = hello
        *self.fds, self._life_fd = fds
        self._channel = channel
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Close it; what it had in flight is undone."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._channel.close()
                for fd in (*self.fds, self._life_fd):
                    os.close(fd)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the constructor may have failed
            self.close()

    def ask(
        self,
        op: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        fds: Sequence[int] = (),
        deadline_s: float = ANSWER_S,
    ) -> dict[str, Any]:
        """Ask the keeper for something.

        Args:
            op: What; see docs/architecture.md, "Keeper protocol".
            arguments: Its arguments.
            fds: Descriptors that go with it.
            deadline_s: For the answer.

        Raises:
            StepTimeout: No answer in time; the connection is of no more use.
            EngineError: The keeper is gone, or a program could not be started.
            AdmissionError: It is not for this caller.
            StepError: It cannot be done now.
        """
        with self._lock:
            if self._closed:
                raise StepError(f"cannot {op}: this connection to {self.run_dir} is closed")
            try:
                self._channel.settimeout(deadline_s)
                wire.send(self._channel, {"op": op, **(arguments or {})}, fds)
                received = wire.receive(self._channel)
            except TimeoutError:
                self._channel.shutdown(socket.SHUT_RDWR)  # a late answer would be taken for the next one's
                raise StepTimeout(f"the keeper at {self.run_dir} did not answer {op}", seconds=deadline_s) from None
            except wire.WireError as error:
                raise StepError(f"cannot {op}: {error}") from None
            except ConnectionError:
                received = None
            except OSError as error:
                raise StepError(f"cannot ask the keeper at {self.run_dir}: {error}") from error
        if received is None:
            raise self._lost(op)
        answer, extra = received
        for fd in extra:
            os.close(fd)
        if not answer["ok"]:
            raise _error(answer)
        return answer

    def _lost(self, op: str) -> ColdSnapError:
        ended = self.wait_end(KILL_TIMEOUT_S)  # for the guard to write the outcome
        found = post_mortem(self.run_dir, patience_s=1.0 if ended else 0.0)
        if found.alive:
            return StepError(f"{op} was not answered: the keeper at {self.run_dir} closed this connection")
        return EngineError(f"{op} was not answered: {found.story}", log_tail=found.log_tail)

    def wait_end(self, timeout_s: float | None) -> bool:
        """Wait until keeper and guard have ended; return whether they have."""
        if self._closed:
            if post_mortem(self.run_dir).alive:
                raise StepError(f"cannot wait: this connection to {self.run_dir} is closed")
            return True
        poll = select.poll()
        poll.register(self._life_fd, 0)  # POLLHUP is always reported: both of its writers are gone
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


class Interpreter:
    """An interpreter that has been started and waits to be told what to keep.

    Until it is told it is a child of this process that holds nothing and does nothing, and ends when this is closed or
    its caller dies. To start it takes longer than to make a keeper of it, so that a restore starts it while it admits.
    """

    def __init__(self, python: str) -> None:
        one, theirs = wire.pair()
        self._ours = _Channel(fileno=one.detach())
        self._python = python
        self._complaints = os.memfd_create("coldsnap-complaints")
        try:
            with theirs:
                self._child = _spawn_guard(python, theirs, self._complaints)
        except BaseException:
            self._ours.close()
            os.close(self._complaints)
            raise
        self._open = True

    def keep(self, run_dir: Path, *, private: bool, labels: Mapping[str, str], timeout_s: float) -> Connection:
        """Let it become guard and keeper; whatever comes of that, this object is of no more use.

        Raises:
            AdmissionError, StepTimeout, StepError: As :meth:`coldsnap.keeper.client.Keeper.start`.
        """
        try:
            self._ours.settimeout(timeout_s)
            with contextlib.suppress(ConnectionError):  # it could not run: what it wrote is told below
                wire.send(self._ours, {"run_dir": str(run_dir), "private": private, "labels": dict(labels)})
            self._await_guard(timeout_s)
            connection = _greet(run_dir, self._ours, self._complaints, timeout_s)
        except BaseException:
            self.close()
            raise
        self._release()
        return connection

    def _await_guard(self, timeout_s: float) -> None:
        if not _ended(self._child.pid, timeout_s):  # the guard is its child, and goes on
            raise StepTimeout(f"the interpreter {self._python} did not start the keeper", seconds=timeout_s)

    def close(self) -> None:
        """End it, unless it became a keeper."""
        if self._open:
            self._ours.close()
            self._child.kill()
            self._release()

    def _release(self) -> None:
        self._open = False
        self._child.wait()
        os.close(self._complaints)


def connect(run_dir: Path, *, timeout_s: float) -> Connection:
    """Connect to a living keeper; see :meth:`coldsnap.keeper.client.Keeper.connect`."""
    end = time.monotonic() + timeout_s
    while (channel := _dial(run_dir, timeout_s)) is None:
        found = post_mortem(run_dir)
        if not found.alive:
            raise EngineError(found.story, log_tail=found.log_tail)
        if time.monotonic() > end:
            raise StepTimeout(f"the keeper at {run_dir} lives but takes no connection", seconds=timeout_s)
        time.sleep(0.01)  # it is just starting, or just ending
    try:
        wire.send(channel, {"op": "hello"})
        return _greet(run_dir, channel, None, timeout_s)
    except ConnectionError as error:
        channel.close()
        raise StepError(f"the keeper at {run_dir} closed the connection: {error}") from error
    except BaseException:
        channel.close()
        raise


def _spawn_guard(python: str, theirs: socket.socket, complaints: int) -> subprocess.Popen[bytes]:
    main = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__main__.py")
    try:
        return subprocess.Popen(
            [python, "-I", "-S", main, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=complaints,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    except OSError as error:
        raise StepError(f"cannot run the interpreter {python} for the keeper: {error.strerror}") from error


def _ended(pid: int, timeout_s: float) -> bool:
    """Wait for a child to end; ``Popen.wait`` with a deadline sleeps up to 50 ms between two looks."""
    pidfd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))
    finally:
        os.close(pidfd)


def _greet(run_dir: Path, channel: socket.socket, complaints: int | None, timeout_s: float) -> Connection:
    try:
        received = wire.receive(channel)
    except TimeoutError:
        raise StepTimeout(f"the keeper at {run_dir} did not say hello", seconds=timeout_s) from None
    except OSError:
        received = None
    if received is None:
        text = "" if complaints is None else os.pread(complaints, 4096, 0).decode("utf-8", "replace").strip()
        raise StepError(f"the keeper at {run_dir} ended before it answered" + (f":\n{text}" if text else ""))
    hello, fds = received
    if not hello["ok"]:
        raise _error(hello)
    return Connection(run_dir, channel, hello, fds)


def _error(answer: Mapping[str, Any]) -> ColdSnapError:
    sentence, kind = str(answer["error"]), answer["kind"]
    if kind == "launch":
        return EngineError(sentence)
    return AdmissionError(sentence) if kind in _ADMISSION else StepError(sentence)


def _require_own(run_dir: Path, status: os.stat_result) -> None:
    """Demand a directory in which only its owner, root or this user, could have put the socket."""
    uid = os.geteuid()
    if (uid and status.st_uid != uid) or status.st_mode & 0o022:
        mode = f"uid {status.st_uid}, mode {status.st_mode & 0o7777:o}"
        raise AdmissionError(f"{run_dir} must belong to uid {uid} and be writable by nobody else, found {mode}")


def _dial(run_dir: Path, timeout_s: float) -> socket.socket | None:
    try:
        dir_fd = layout.open_directory(os.fspath(run_dir))
    except OSError:
        return None
    try:
        _require_own(run_dir, os.fstat(dir_fd))
    except AdmissionError:
        os.close(dir_fd)
        raise
    channel = _Channel(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.settimeout(timeout_s)  # connect(2) would wait without end for a place in a full backlog
    try:
        channel.connect(f"/proc/self/fd/{dir_fd}/{layout.KEEPER_SOCKET}")
    except OSError:
        channel.close()
        return None
    finally:
        os.close(dir_fd)
    return channel
