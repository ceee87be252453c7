"""The caller's side of a keeper.

The one rule: the connection is what an operation in flight hangs on: when it closes, for whatever reason, the keeper
undoes the operation.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from coldsnap.errors import ColdSnapError, StepTimeout
from coldsnap.keeper import layout
from coldsnap.keeper.connection import ANSWER_S, Connection, Interpreter, connect
from coldsnap.keeper.directive import DIRECTIVE_VARIABLE
from coldsnap.keeper.operations import HELPER_GRACE_S
from coldsnap.keeper.rundir import require_room
from coldsnap.keeper.status import Exit, Interrupted, Process, Status, read_status
from coldsnap.keeper.tree import KILL_TIMEOUT_S
from coldsnap.keeper.undo import Undo
from coldsnap.keeper.undoing import HYDRATE_TIMEOUT_S

__all__ = ["Exit", "Interpreter", "Interrupted", "Keeper", "Process", "Status"]

_MARGIN_S = 5.0


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

    def __init__(self, connection: Connection) -> None:
        hello = connection.hello
        self.run_dir = connection.run_dir
        self.shm_fd, self.proc_fd, self.root_fd = connection.fds
        self.private: bool = hello["namespace"] == "private"
        self.tree_dir: str = hello["tree_dir"]
        self.tmp_dir: str = hello["tmp_dir"]
        self.guard_pid: int = hello["guard_pid"]
        self.keeper_pid: int = hello["keeper_pid"]
        self.labels: Mapping[str, str] = hello["labels"]
        self._connection = connection
        self._operation: str | None = None

    # Coming and going

    @classmethod
    def start(
        cls,
        run_dir: str | os.PathLike[str],
        *,
        namespace: Literal["private", "host"] = "private",
        labels: Mapping[str, str] | None = None,
        python: str = sys.executable,
        interpreter: Interpreter | None = None,
        timeout_s: float = 10.0,
    ) -> Self:
        """Start a keeper.

        Until it has an engine it lives no longer than its last connection, and leaves nothing.

        Args:
            run_dir: Is made; a dead keeper's is cleaned and used again.
            namespace: ``private`` (needs CAP_SYS_ADMIN) or ``host``.
            labels: Kept in ``keeper.json``.
            python: The interpreter.
            interpreter: One that has been started already; it is used up, whatever comes of it.
            timeout_s: For all of it.

        Raises:
            AdmissionError: The directory belongs to a living engine or is not a run directory, there is no room for
                one, or the kernel permits no namespaces here.
            StepTimeout: It did not answer.
            StepError: It could not start.
        """
        require_room(run_dir)
        interpreter = interpreter or Interpreter(python)
        private = namespace == "private"
        where = Path(os.path.abspath(run_dir))
        return cls(interpreter.keep(where, private=private, labels=labels or {}, timeout_s=timeout_s))

    @classmethod
    def connect(cls, run_dir: str | os.PathLike[str], *, timeout_s: float = 5.0) -> Self:
        """Connect to a living keeper.

        Raises:
            EngineError: None lives there; with what became of the engine.
            StepTimeout: It lives, but does not answer.
        """
        return cls(connect(Path(os.path.realpath(run_dir)), timeout_s=timeout_s))

    def close(self) -> None:
        """Close the connection: an operation in flight is undone; a serving engine serves on."""
        self._connection.close()

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

    @property
    def in_flight(self) -> bool:
        """Whether an operation of this connection is."""
        return self._operation is not None

    def begin(self, operation: str, undo: Sequence[Undo] = ()) -> None:
        """Begin an operation; from now on it is undone unless it ends.

        Args:
            operation: Its name, for people.
            undo: How to undo it, last first.

        Raises:
            StepError: Another one is in flight; named.
        """
        self._connection.ask("begin", {"operation": operation, "undo": [dict(entry) for entry in undo]})
        self._operation = operation

    def undo(self, entry: Undo) -> None:
        """Add what else is to be undone, first of all; it is on disk when this returns."""
        self._connection.ask("undo", {"entry": dict(entry)})

    def end(self) -> None:
        """The operation is done: forget how to undo it."""
        self._connection.ask("end")
        self._operation = None

    def abort(self) -> tuple[str, ...]:
        """Undo the operation now.

        Helpers of the operation get 20 s to roll back, from when their sockets close: close them first. Weights that
        were given away take as long as reading them takes.

        Returns:
            What was done.
        """
        self._operation = None
        return tuple(self._connection.ask("abort", deadline_s=HELPER_GRACE_S + HYDRATE_TIMEOUT_S + ANSWER_S)["undone"])

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
        arguments = {
            "argv": list(argv),
            "env": {**env, **ours},
            "cwd": cwd,
            "pid_floor": pid_floor,
            "deny_io_uring": deny_io_uring,
        }
        return int(self._connection.ask("spawn_engine", arguments)["pid"])

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
        arguments = {"argv": list(argv), "env": dict(env), "name": name, "fds": list(pairs)}
        return int(self._connection.ask("spawn_helper", arguments, fds=list(pairs.values()))["pid"])

    def wait_helper(self, pid: int, *, timeout_s: float) -> int:
        """Wait until a helper has ended.

        Returns:
            Its exit code, or minus the signal that ended it.

        Raises:
            StepTimeout: It still runs.
        """
        # On a connection of its own, so that others can use this one meanwhile.
        other = connect(self.run_dir, timeout_s=_MARGIN_S)
        try:
            answer = other.ask("wait_helper", {"pid": pid, "timeout_s": timeout_s}, deadline_s=timeout_s + _MARGIN_S)
        finally:
            other.close()
        end = answer["exit"]
        if end is None:
            raise StepTimeout(f"the helper with pid {pid} still runs after {timeout_s:g} s", seconds=timeout_s)
        return int(end)

    def adopt(self, pid: int) -> None:
        """Take a restored root, which is a child of the keeper already, for the engine's.

        Raises:
            EngineError: It is gone, or is not the keeper's child.
        """
        self._connection.ask("adopt", {"pid": pid})

    def tree(self) -> tuple[Process, ...]:
        """Return the engine's processes, the root first; helpers are not among them."""
        lines = self._connection.ask("tree")["processes"]
        return tuple(Process(pid=pid, ppid=ppid, state=state, comm=comm) for pid, ppid, state, comm in lines)

    def signal(self, number: int, *, whom: str = "root") -> None:
        """Signal the ``root`` or the whole ``tree``."""
        self._connection.ask("signal", {"signal": int(number), "whom": whom})

    def status(self) -> Status:
        """Ask how the engine is."""
        return read_status(self._connection.ask("status"))

    def stop(self, grace_s: float = 10.0) -> Exit | None:
        """Stop the engine and its keeper: SIGTERM to the root, after a grace SIGKILL to all that is left.

        Returns:
            How the root ended, None when there was none. The run directory is gone by then.

        Raises:
            StepTimeout: Something cannot be killed.
        """
        self._operation = None
        patience = grace_s + KILL_TIMEOUT_S + HELPER_GRACE_S
        answer = self._connection.ask("stop", {"grace_s": grace_s}, deadline_s=patience)
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
        return self._connection.wait_end(timeout_s)
