"""What a keeper can be asked, and the one operation it may have in flight.

The one rule: an operation belongs to the connection that began it; when that connection goes, the operation is
undone. The keeper does not know what an operation means, only how to undo it.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from coldsnap.keeper import engine_log, launcher, layout, namespaces, request, undo
from coldsnap.keeper.birth import Birth
from coldsnap.keeper.journal import Journal
from coldsnap.keeper.request import Refused
from coldsnap.keeper.roster import Roster
from coldsnap.keeper.tree import Tree, describe, read
from coldsnap.keeper.undoing import Undoing

HELPER_GRACE_S = 20.0
_LONGEST_WAIT_S = 86400.0
_FIRST_FD, _LAST_FD = 3, 256
_SIGNALS = 65

Later: TypeAlias = "tuple[Callable[[], Mapping[str, Any] | None], float, Mapping[str, Any]]"
Answer: TypeAlias = "Mapping[str, Any] | Later"


class _InFlight:
    def __init__(self, name: str, owner: int, entries: list[undo.Undo]) -> None:
        self.name = name
        self.owner: int | None = owner
        self.entries = entries
        self.undoing: str | None = None  # why
        self.continued = False
        self.patience = 0.0

    @property
    def kills(self) -> bool:
        return any(entry["kind"] == "kill" for entry in self.entries)


class Operations:
    """The keeper's state and what can be asked of it.

    Attributes:
        tree: The processes.
        finish: What the guard is told at the end; None while the keeper serves.
    """

    def __init__(self, birth: Birth, tree: Tree, tree_fd: int) -> None:
        self.birth = birth
        self.tree = tree
        self.finish: dict[str, Any] | None = None
        self._tree_fd = tree_fd
        self._journal = Journal(birth.dir_fd)
        self._undoing = Undoing(birth, tree, tree_fd)
        self._roster = Roster(tree_fd)
        self._flight: _InFlight | None = None
        self._interrupted: dict[str, Any] | None = None
        self._stop_at: float | None = None
        self._log_at = 0.0  # when to look at the engine's log again, on the monotonic clock

    def perform(self, caller: int, message: Mapping[str, Any], fds: list[int]) -> Answer:
        """Do what a message asks.

        Returns:
            The answer, or how to know when there is one.

        Raises:
            Refused: The request is not understood, or not possible now.
            OSError: The kernel refused.
        """
        op, given = request.checked(message)
        if self._stop_at is not None and op not in {"hello", "status", "tree", "stop"}:
            raise Refused("state", "this keeper is stopping its engine")
        answer: Answer = getattr(self, f"_{op}")(caller, fds, **given)
        return answer

    def caller_gone(self, caller: int) -> None:
        """Undo what a connection left in flight, and give its helpers time to notice that it is gone."""
        self.tree.leave_helpers(caller, time.monotonic() + HELPER_GRACE_S)
        if self._flight is not None and self._flight.owner == caller:
            self._undo_soon("the caller ended")

    def next_moment(self) -> float | None:
        """Return when :meth:`advance` must be called at the latest, on the monotonic clock."""
        moments = self.tree.helper_deadlines()
        if self.tree.running and self._log_at < math.inf:
            moments.append(self._log_at)
        if self._stop_at is not None:
            moments.append(self._stop_at)
        if self._flight is not None and self._flight.undoing is not None:
            moments.append(self._flight.patience)
        return min(moments, default=None)

    def advance(self, now: float, *, connected: bool) -> None:
        """Take the next step of a stop or an undo, and end when there is nothing left to keep."""
        self.tree.end_helpers(now)
        self._look_at_log(now)
        if self._stop_at is not None and (now >= self._stop_at or not self.tree.running):
            self._finish("stopped")
        flight = self._flight
        if self.finish is None and flight is not None and flight.undoing is not None:
            self._continue_early(flight)
            if self._may_undo(flight, now):
                self._undo_now(flight, flight.undoing)
        if self.finish is None and self._flight is None:
            if self.tree.exit is not None:
                self._finish("exited")
            elif self.tree.root is None and not connected:
                self._finish("stopped")

    def _look_at_log(self, now: float) -> None:
        if not self.tree.running or now < self._log_at:
            return
        self._log_at = now + engine_log.LOOK_S
        if self._flight is not None:  # CRIU notes the sizes of open files
            return
        try:
            engine_log.shorten(self._tree_fd)
        except OSError as error:  # a filesystem without holes
            sys.stderr.write(f"the engine's log cannot be shortened, and grows: {error}\n")
            self._log_at = math.inf

    def _continue_early(self, flight: _InFlight) -> None:
        # A process must run while its CUDA state is brought back: a thread of its own does that (cuCheckpointProcess*).
        # What CRIU is at work on is CRIU's until it ends.
        if flight.continued or undo.CONTINUE not in flight.entries or self.tree.living_helpers("criu"):
            return
        flight.continued = True
        self._undoing.run(undo.CONTINUE)

    def _may_undo(self, flight: _InFlight, now: float) -> bool:
        return flight.kills or now >= flight.patience or not self.tree.living_helpers()

    def _finish(self, state: str) -> None:
        end = self.tree.exit
        self.tree.kill()
        undo.let_go(self.birth.root_fd, self.birth.dir_fd, self.birth.run_dir)
        cause = "the engine was stopped" if end is None else f"the engine ended by itself with {describe(end)}"
        self.finish = {"final": state, "cause": cause, "exit": self.tree.exit}

    # Operation in flight

    def _begin(self, caller: int, _received: list[int], operation: str, undo: list[Any]) -> Answer:
        if self._flight is not None:
            ending = " and is being undone" if self._flight.undoing else ""
            raise Refused("state", f"cannot begin {operation}: {self._flight.name} is in flight{ending}")
        entries = [_entry(value) for value in undo]
        self._journal.begin(operation, entries)
        self._flight = _InFlight(operation, caller, entries)
        return {}

    def _undo(self, caller: int, _received: list[int], entry: dict[str, Any]) -> Answer:
        flight = self._mine(caller)
        checked = _entry(entry)
        self._journal.undo(checked)
        flight.entries.append(checked)
        return {}

    def _end(self, caller: int, _received: list[int]) -> Answer:
        self._mine(caller)
        self._journal.end()
        self._flight = None
        return {}

    def _abort(self, caller: int, _received: list[int]) -> Answer:
        flight = self._mine(caller)
        self._undo_soon("it was aborted")

        def done() -> Mapping[str, Any] | None:
            return (
                None if self._flight is flight or self._interrupted is None else {"undone": self._interrupted["undone"]}
            )

        return done, time.monotonic() + _LONGEST_WAIT_S, {}

    def _mine(self, caller: int) -> _InFlight:
        flight = self._flight
        if flight is None or flight.owner != caller or flight.undoing:
            what = "there is none" if flight is None else f"{flight.name} is another caller's, or being undone"
            raise Refused("state", f"this caller has no operation in flight: {what}")
        return flight

    def _undo_soon(self, why: str) -> None:
        flight = self._flight
        if flight is not None and flight.undoing is None:
            flight.undoing = why
            # CRIU and the CUDA helper notice the closed socket and roll back by themselves; killed in the middle,
            # they would leave parasite code, or locked devices, in the tree.
            flight.patience = time.monotonic() + HELPER_GRACE_S

    def _undo_now(self, flight: _InFlight, why: str) -> None:
        self.tree.signal(signal.SIGKILL, self.tree.living_helpers())
        did = self._undoing.run_all(flight.entries)
        try:
            self._journal.undone(why, did)
        except OSError as error:  # there is no room to say so; to remove a second time what is gone does no harm
            did.append(f"the journal could not be written: {error.strerror}")
        self._flight = None
        self._interrupted = {"operation": flight.name, "why": why, "undone": did, "unix_ns": time.time_ns()}
        if flight.kills:
            self._finish("stopped")

    # Processes: the arguments of each are those of its message

    def _spawn_engine(
        self,
        _caller: int,
        _received: list[int],
        argv: list[Any],
        env: dict[str, Any],
        cwd: str,
        pid_floor: int,
        deny_io_uring: bool,
    ) -> Answer:
        if self.tree.running:
            raise Refused("state", f"there is an engine already, process {self.tree.root}")
        request.require_texts(argv, env, cwd)
        if self.birth.private:
            namespaces.set_pid_floor(pid_floor)
        job = launcher.Job(argv, env, cwd, self._tree_fd, layout.ENGINE_LOG, {}, deny_io_uring)
        pid = _launch(job)
        self.tree.root, self.tree.exit, self.tree.since_unix_ns = pid, None, time.time_ns()
        return {"pid": pid}

    def _spawn_helper(  # noqa: PLR0917 - the message's arguments
        self, caller: int, received: list[int], argv: list[Any], env: dict[str, Any], name: str, fds: list[Any]
    ) -> Answer:
        request.require_texts(argv, env, "/")
        if not name.replace("-", "").replace("_", "").isalnum():
            raise Refused("format", f"a helper's name is made of letters, digits, - and _, found {name!r}")
        numbers = [fd for fd in fds if type(fd) is int and _FIRST_FD <= fd < _LAST_FD]
        if len(set(numbers)) != len(fds) or len(fds) != len(received):
            raise Refused(
                "format", f"fds lists a different number from 3 to 255 for each descriptor sent, found {fds!r}"
            )
        job = launcher.Job(
            argv,
            env,
            "/",
            self.birth.work_fd,
            f"{name}.log",
            dict(zip(numbers, received, strict=True)),
            deny_io_uring=False,
        )
        return {"pid": self.tree.add_helper(_launch(job), caller, name)}

    def _wait_helper(self, _caller: int, _received: list[int], pid: int, timeout_s: float) -> Answer:
        helper = self.tree.helpers.get(pid)
        if helper is None:
            raise Refused("state", f"process {pid} is no helper of this keeper")

        def done() -> Mapping[str, Any] | None:
            return None if helper.exit is None else {"exit": helper.exit}

        return done, time.monotonic() + min(max(timeout_s, 0.0), _LONGEST_WAIT_S), {"exit": None}

    def _adopt(self, _caller: int, _received: list[int], pid: int) -> Answer:
        if self.tree.running:
            raise Refused("state", f"there is an engine already, process {self.tree.root}")
        self.tree.reap()
        try:
            self.tree.take(pid)
        except LookupError as error:
            raise Refused("launch", f"cannot adopt: {error.args[0]}") from None
        if self.birth.private:  # a template that is started has children yet to come, and may be captured once more
            namespaces.set_pid_floor(pid)
        return {}

    def _tree(self, _caller: int, _received: list[int]) -> Answer:
        return {"processes": [list(process) for process in self.tree.members()]}

    def _signal(self, _caller: int, _received: list[int], signal: int, whom: str) -> Answer:
        if whom not in {"root", "tree"} or not 0 < signal < _SIGNALS:
            raise Refused("format", f"signal goes to root or tree, found {whom!r}, signal {signal}")
        root = self.tree.root
        if root is None or not self.tree.running:
            raise Refused("state", f"cannot send signal {signal}: there is no running engine")
        self.tree.signal(signal, [root] if whom == "root" else [process.pid for process in self.tree.members()])
        return {}

    def _stop(self, caller: int, _received: list[int], grace_s: float) -> Answer:
        flight = self._flight
        if flight is not None and flight.owner == caller and not flight.undoing:
            self._journal.end()
            self._flight = None
        elif flight is not None:
            self._undo_now(flight, "the engine was stopped by another caller")
        now = time.monotonic()
        root = self.tree.root
        if root is not None and self.tree.running and not self._is_stopped():
            self.tree.signal(signal.SIGTERM, [root])
            now += max(grace_s, 0.0)
        # A frozen root cannot act on SIGTERM: nothing is gained by waiting for it.
        self._stop_at = min(now, self._stop_at or now)
        return (
            (lambda: None if self.finish is None else {"exit": self.finish["exit"]}),
            now + _LONGEST_WAIT_S,
            {"exit": None},
        )

    # State

    def _is_stopped(self) -> bool:
        process = None if self.tree.root is None else read(self.tree.root)
        return process is not None and process.state in {"T", "t"}

    @property
    def _state(self) -> str:
        if self.tree.root is None:
            return "empty"
        if self.tree.exit is not None:
            return "exited"
        return "stopped" if self._is_stopped() else "running"

    def _hello(self, _caller: int, _received: list[int]) -> Answer:
        return {
            "format": layout.FORMAT,
            "guard_pid": self.birth.guard_pid,
            "keeper_pid": self.birth.keeper_pid,
            "namespace": "private" if self.birth.private else "host",
            "tree_dir": self.birth.tree_dir,
            "tmp_dir": self.birth.tmp_dir,
            "labels": self.birth.labels,
            "state": self._state,
        }

    def _status(self, _caller: int, _received: list[int]) -> Answer:
        flight = self._flight
        return {
            "state": self._state,
            "root_pid": self.tree.root,
            "exit": self.tree.exit,
            "since_unix_ns": self.tree.since_unix_ns,
            "operation": None if flight is None else flight.name,
            "interrupted": self._interrupted,
            "lost": self._lost(),
        }

    def _lost(self) -> list[list[Any]]:
        # The ranks of an engine that is on its way out die one after the other, and that is no news.
        if not self.tree.running or self._stop_at is not None:
            return []
        return [list(rank) for rank in self._roster.lost(self.tree.ended)]


def _entry(value: object) -> undo.Undo:
    try:
        return undo.parse(value)
    except ValueError as error:
        raise Refused("format", str(error)) from None


def _launch(job: launcher.Job) -> int:
    try:
        return launcher.launch(job)
    except launcher.LaunchError as error:
        raise Refused("launch", str(error)) from None
