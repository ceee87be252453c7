"""The caller's side of a keeper.

The one rule: every wait has an end, and every failure says what became of the engine. The connection is what an
operation in flight hangs on: when it closes, for whatever reason, the keeper undoes the operation.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from attrs import frozen

from coldsnap.errors import AdmissionError, ColdSnapError, EngineError, StepError, StepTimeout
from coldsnap.keeper import layout, wire
from coldsnap.keeper.directive import DIRECTIVE_VARIABLE
from coldsnap.keeper.operations import HELPER_GRACE_S
from coldsnap.keeper.rundir import post_mortem
from coldsnap.keeper.tree import KILL_TIMEOUT_S, describe
from coldsnap.keeper.undo import Undo

__all__ = ["Exit", "Interrupted", "Keeper", "Process", "Status"]

_ANSWER_S = 40.0  # a launch may take 30 s, all else is immediate
_MARGIN_S = 5.0


@frozen(kw_only=True)
class Process:
    """One process of the tree, in the tree's pid namespace; ``state`` is the letter of ``/proc/<pid>/stat``."""

    pid: int
    ppid: int
    state: str
    comm: str


@frozen(kw_only=True)
class Exit:
    """How a process ended: one of the two is None."""

    code: int | None = None
    signal: int | None = None

    @classmethod
    def of(cls, end: int | None) -> Exit | None:
        """Read an exit code, or minus a signal."""
        if end is None:
            return None
        return cls(code=end) if end >= 0 else cls(signal=-end)

    def __str__(self) -> str:
        return describe(self.code if self.code is not None else -(self.signal or 0))


@frozen(kw_only=True)
class Interrupted:
    """An operation that was undone: why, and what was done, one sentence each."""

    operation: str
    why: str
    undone: tuple[str, ...]


@frozen(kw_only=True)
class Status:
    """What a keeper says of its engine.

    Attributes:
        state: ``empty`` before there is an engine, ``stopped`` when it is frozen.
        root_pid: In the tree's pid namespace.
        exit: How it ended.
        since_unix_ns: When it was started or restored.
        operation: What is in flight.
        interrupted: What was undone last.
    """

    state: Literal["empty", "running", "stopped", "exited"]
    root_pid: int | None
    exit: Exit | None
    since_unix_ns: int | None
    operation: str | None
    interrupted: Interrupted | None


class Keeper:
    """A connection to the keeper of one engine.

    Attributes:
        run_dir: The run directory.
        private: Whether the tree has namespaces of its own.
        tree_dir: Where the tree sees :attr:`rank_dir`.
        tmp_dir: TMPDIR of the tree.
        labels: As given at the start.
        guard_pid: In the namespace of the one who started it.
        keeper_pid: As above.
        shm_fd: The tree's ``/dev/shm``; like the next two a directory descriptor that lives as long as this object.
        proc_fd: The tree's ``/proc``.
        root_fd: The tree's ``/``.
    """

    def __init__(self, run_dir: Path, connection: socket.socket, hello: Mapping[str, Any], fds: Sequence[int]) -> None:
        self.run_dir = run_dir
        self.shm_fd, self.proc_fd, self.root_fd, self._life_fd = fds
        self.private: bool = hello["namespace"] == "private"
        self.tree_dir: str = hello["tree_dir"]
        self.tmp_dir: str = hello["tmp_dir"]
        self.guard_pid: int = hello["guard_pid"]
        self.keeper_pid: int = hello["keeper_pid"]
        self.labels: Mapping[str, str] = _labels(run_dir)
        self._connection = connection
        self._lock = threading.RLock()
        self._operation: str | None = None
        self._closed = False

    # Coming and going

    @classmethod
    def start(
        cls,
        run_dir: str | os.PathLike[str],
        *,
        namespace: Literal["private", "host"] = "private",
        labels: Mapping[str, str] | None = None,
        python: str = sys.executable,
        timeout_s: float = 10.0,
    ) -> Self:
        """Start a keeper.

        Until it has an engine it lives no longer than its last connection, and leaves nothing.

        Args:
            run_dir: Is made; a dead keeper's is cleaned and used again.
            namespace: ``private`` (needs CAP_SYS_ADMIN) or ``host``.
            labels: Kept in ``keeper.json``.
            python: The interpreter.
            timeout_s: For all of it.

        Raises:
            AdmissionError: The directory belongs to a living engine or is not a run directory, or the kernel permits no
                namespaces here.
            StepTimeout: It did not answer.
            StepError: It could not start.
        """
        path = Path(os.path.abspath(run_dir))
        ours, theirs = wire.pair()
        ours.settimeout(timeout_s)
        complaints = os.memfd_create("coldsnap-complaints")
        try:
            with theirs:
                wire.send(ours, {"run_dir": str(path), "private": namespace == "private", "labels": dict(labels or {})})
                _spawn_guard(python, theirs, complaints, timeout_s)
            return cls(path, ours, *_first_answer(ours, path, complaints, timeout_s))
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(complaints)

    @classmethod
    def connect(cls, run_dir: str | os.PathLike[str], *, timeout_s: float = 5.0) -> Self:
        """Connect to a living keeper.

        Raises:
            EngineError: None lives there; with what became of the engine.
            StepTimeout: It lives, but does not answer.
        """
        path = Path(os.path.abspath(run_dir))
        end = time.monotonic() + timeout_s
        while True:
            connection = _dial(path)
            if connection is not None:
                break
            found = post_mortem(path)
            if not found.alive:
                raise EngineError(found.story, log_tail=found.log_tail)
            if time.monotonic() > end:
                raise StepTimeout(f"the keeper at {path} lives but takes no connection", seconds=timeout_s)
            time.sleep(0.01)  # it is just starting, or just ending
        try:
            connection.settimeout(timeout_s)
            wire.send(connection, {"op": "hello"})
            return cls(path, connection, *_first_answer(connection, path, None, timeout_s))
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """Close the connection: an operation in flight is undone; a serving engine serves on."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._connection.close()
                for fd in (self.shm_fd, self.proc_fd, self.root_fd, self._life_fd):
                    os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is not None and self._operation is not None:
                with contextlib.suppress(ColdSnapError):  # the error in flight is the one to tell of
                    self.abort()
        finally:
            self.close()

    def __repr__(self) -> str:
        return f"Keeper({str(self.run_dir)!r}, {'private' if self.private else 'host'}, keeper {self.keeper_pid})"

    # Places

    @property
    def rank_dir(self) -> Path:
        """The directory shared with the ranks."""
        return self.run_dir / layout.RANK

    @property
    def work_dir(self) -> Path:
        """The directory of the helpers' logs."""
        return self.run_dir / layout.WORK

    @property
    def log_path(self) -> Path:
        """What the tree writes on stdout and stderr."""
        return self.rank_dir / layout.ENGINE_LOG

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of the engine's log."""
        return layout.tail(os.fspath(self.log_path), lines)

    # Operations

    def begin(self, operation: str, undo: Sequence[Undo] = ()) -> None:
        """Begin an operation; from now on it is undone unless it ends.

        Args:
            operation: Its name, for people.
            undo: How to undo it, last first.

        Raises:
            StepError: Another one is in flight; named.
        """
        self._call("begin", operation=operation, undo=[dict(entry) for entry in undo])
        self._operation = operation

    def undo(self, entry: Undo) -> None:
        """Add what else is to be undone, first of all; it is on disk when this returns."""
        self._call("undo", entry=dict(entry))

    def end(self) -> None:
        """The operation is done: forget how to undo it."""
        self._call("end")
        self._operation = None

    def abort(self) -> tuple[str, ...]:
        """Undo the operation now.

        Helpers of the operation get 20 s to roll back, from when their sockets close: close them first.

        Returns:
            What was done.
        """
        self._operation = None
        return tuple(self._call("abort", deadline_s=HELPER_GRACE_S + _ANSWER_S)["undone"])

    @contextlib.contextmanager
    def operation(self, name: str, undo: Sequence[Undo] = ()) -> Iterator[None]:
        """Begin an operation, end it after the block, abort it when the block raises."""
        self.begin(name, undo)
        try:
            yield
        except BaseException:
            with contextlib.suppress(ColdSnapError):  # when even that fails, the keeper is dead and its guard undoes
                self.abort()
            raise
        self.end()

    # Processes

    def spawn_engine(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str, pid_floor: int = 600, deny_io_uring: bool = True
    ) -> int:
        """Start the engine.

        Args:
            argv: Its command.
            env: Its whole environment; TMPDIR and the path of the directive are added.
            cwd: Its working directory, as seen inside.
            pid_floor: Its pids are above; in private namespaces only.
            deny_io_uring: Let io_uring fail with ENOSYS in the tree.

        Returns:
            Its pid, in the tree's namespace.

        Raises:
            EngineError: It could not be started; the sentence says why.
        """
        ours = {DIRECTIVE_VARIABLE: f"{self.tree_dir}/{layout.DIRECTIVE}", "TMPDIR": self.tmp_dir}
        answer = self._call(
            "spawn_engine",
            argv=list(argv),
            env={**env, **ours},
            cwd=cwd,
            pid_floor=pid_floor,
            deny_io_uring=deny_io_uring,
        )
        return int(answer["pid"])

    def spawn_helper(
        self, argv: Sequence[str], *, env: Mapping[str, str], name: str, fds: Mapping[int, int] | None = None
    ) -> int:
        """Start a helper beside the engine, in its namespaces, without its seccomp filter.

        Args:
            argv: Its command.
            env: Its whole environment.
            name: Of its log, ``work/<name>.log``, which holds its stdout and stderr.
            fds: Descriptor number in the helper, 3 to 255 → descriptor here.

        Returns:
            Its pid, in the tree's namespace.

        Raises:
            EngineError: It could not be started; the sentence says why.
        """
        pairs = dict(fds or {})
        answer = self._call(
            "spawn_helper", list(pairs.values()), argv=list(argv), env=dict(env), name=name, fds=list(pairs)
        )
        return int(answer["pid"])

    def wait_helper(self, pid: int, *, timeout_s: float) -> int:
        """Wait until a helper has ended.

        Returns:
            Its exit code, or minus the signal that ended it.

        Raises:
            StepTimeout: It still runs.
        """
        # On a connection of its own, so that others can use this one meanwhile.
        with type(self).connect(self.run_dir) as other:
            answer = other._call("wait_helper", deadline_s=timeout_s + _MARGIN_S, pid=pid, timeout_s=timeout_s)
            noqa: SLF001
        end = answer["exit"]
        if end is None:
            raise StepTimeout(f"the helper with pid {pid} still runs after {timeout_s:g} s", seconds=timeout_s)
        return int(end)

    def adopt(self, pid: int) -> None:
        """Take a restored root, which is a child of the keeper already, for the engine's.

        Raises:
            EngineError: It is gone, or is not the keeper's child.
        """
        self._call("adopt", pid=pid)

    def tree(self) -> tuple[Process, ...]:
        """Return the engine's processes, the root first; helpers are not among them."""
        return tuple(
            Process(pid=pid, ppid=ppid, state=state, comm=comm)
            for pid, ppid, state, comm in self._call("tree")["processes"]
        )

    def signal(self, number: int, *, whom: str = "root") -> None:
        """Signal the ``root`` or the whole ``tree``."""
        self._call("signal", signal=int(number), whom=whom)

    def status(self) -> Status:
        """Ask how the engine is."""
        answer = self._call("status")
        last = answer["interrupted"]
        return Status(
            state=answer["state"],
            root_pid=answer["root_pid"],
            exit=Exit.of(answer["exit"]),
            since_unix_ns=answer["since_unix_ns"],
            operation=answer["operation"],
            interrupted=last
            and Interrupted(operation=last["operation"], why=last["why"], undone=tuple(last["undone"])),
        )

    def stop(self, grace_s: float = 10.0) -> Exit | None:
        """Stop the engine and its keeper: SIGTERM to the root, after a grace SIGKILL to all that is left.

        Returns:
            How the root ended, None when there was none. The run directory is gone by then.

        Raises:
            StepTimeout: Something cannot be killed.
        """
        self._operation = None
        patience = grace_s + KILL_TIMEOUT_S + HELPER_GRACE_S
        answer = self._call("stop", grace_s=grace_s, deadline_s=patience)
        if not self.wait(KILL_TIMEOUT_S):
            raise StepTimeout(
                f"the engine at {self.run_dir} does not end; a process hangs in the kernel", seconds=patience
            )
        self.close()
        return Exit.of(answer["exit"])

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until engine, keeper and guard have ended.

        Returns:
            Whether they have, within ``timeout_s``.
        """
        poll = select.poll()
        poll.register(self._life_fd, 0)  # POLLHUP is always reported: the guard, its only writer, is gone
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    # Messages

    def _call(
        self, op: str, passed: Sequence[int] = (), *, deadline_s: float = _ANSWER_S, **arguments: Any
    ) -> dict[str, Any]:
        with self._lock:
            if self._closed:
                raise StepError(f"cannot {op}: this connection to {self.run_dir} is closed")
            try:
                self._connection.settimeout(deadline_s)
                wire.send(self._connection, {"op": op, **arguments}, passed)
                received = wire.receive(self._connection)
            except TimeoutError:
                self._connection.shutdown(socket.SHUT_RDWR)  # a late answer would be taken for the next one's
                raise StepTimeout(f"the keeper at {self.run_dir} did not answer {op}", seconds=deadline_s) from None
            except wire.WireError as error:
                raise StepError(f"cannot {op}: {error}") from None
            except OSError:
                received = None
        if received is None:
            raise self._lost(op)
        answer, extra = received
        for fd in extra:
            os.close(fd)
        if not answer["ok"]:
            raise self._refused(op, answer)
        return answer

    def _lost(self, op: str) -> ColdSnapError:
        self.wait(KILL_TIMEOUT_S)  # for the guard to write the outcome
        found = post_mortem(self.run_dir)
        return EngineError(f"{op} was not answered: {found.story}", log_tail=found.log_tail)

    def _refused(self, op: str, answer: Mapping[str, Any]) -> ColdSnapError:
        if answer["kind"] == "launch":
            return EngineError(answer["error"], log_tail=self.log_tail() if op == "adopt" else "")
        return _error(answer)


def _labels(run_dir: Path) -> Mapping[str, str]:
    dir_fd = layout.open_directory(os.fspath(run_dir))
    try:
        return dict((layout.read_json(dir_fd, layout.KEEPER_FILE) or {}).get("labels", {}))
    finally:
        os.close(dir_fd)


def _spawn_guard(python: str, theirs: socket.socket, complaints: int, timeout_s: float) -> None:
    main = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__main__.py")
    try:
        child = subprocess.Popen(
            [python, "-I", "-S", main, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=complaints,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    except OSError as error:
        raise StepError(f"cannot run the interpreter {python} for the keeper: {error.strerror}") from error
    try:
        child.wait(timeout_s)  # the guard is its child, and goes on
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        raise StepTimeout(f"the interpreter {python} did not start the keeper", seconds=timeout_s) from None


def _first_answer(
    connection: socket.socket, run_dir: Path, complaints: int | None, timeout_s: float
) -> tuple[dict[str, Any], list[int]]:
    try:
        received = wire.receive(connection)
    except TimeoutError:
        raise StepTimeout(f"the keeper at {run_dir} did not say hello", seconds=timeout_s) from None
    except OSError:
        received = None
    if received is None:
        text = "" if complaints is None else os.pread(complaints, 4096, 0).decode("utf-8", "replace").strip()
        raise StepError(f"the keeper at {run_dir} ended before it answered" + (f":\n{text}" if text else ""))
    answer, fds = received
    if not answer["ok"]:
        raise _error(answer)
    return answer, fds


def _error(answer: Mapping[str, Any]) -> ColdSnapError:
    sentence = str(answer["error"])
    return AdmissionError(sentence) if answer["kind"] in {"busy", "privilege", "peer"} else StepError(sentence)


def _dial(run_dir: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        dir_fd = layout.open_directory(os.fspath(run_dir))
    except OSError:
        connection.close()
        return None
    try:
        connection.connect(f"/proc/self/fd/{dir_fd}/{layout.KEEPER_SOCKET}")
    except OSError:
        connection.close()
        return None
    finally:
        os.close(dir_fd)
    return connection
