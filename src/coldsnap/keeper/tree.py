"""The processes under a keeper: the engine's tree, the helpers, and what became of each.

The one rule: helpers (CRIU, the CUDA helper) are never part of the engine's tree, so that neither a signal nor a dump
takes them for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

KILL_TIMEOUT_S = 10.0
_REMEMBERED = 256


class Process(NamedTuple):
    """A line of ``/proc``."""

    pid: int
    ppid: int
    state: str
    comm: str


class Helper:
    """A helper and its end: ``exit`` is an exit code, or minus a signal, None while it runs."""

    def __init__(self, owner: int, name: str) -> None:
        self.owner = owner
        self.name = name
        self.exit: int | None = None
        self.until: float | None = None  # on the monotonic clock, once its owner is gone


def scan() -> dict[int, Process]:
    """Read every process of this pid namespace."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (process := read(int(name))) is not None:
            found[process.pid] = process
    return found


def read(pid: int) -> Process | None:
    """Read one process; None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            head, _, rest = stream.read().rpartition(b")")  # a name may hold spaces and parentheses (proc(5))
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, ppid = rest.split(None, 2)[:2]
    return Process(pid, int(ppid), state.decode(), head.partition(b"(")[2].decode("utf-8", "replace"))


def start_time(pid: int) -> int:
    """Return when a process started, clock ticks since boot: with the pid, its identity."""
    with open(f"/proc/{pid}/stat", "rb") as stream:
        return int(stream.read().rpartition(b")")[2].split()[19])


def below(processes: dict[int, Process], *roots: int) -> set[int]:
    """Return the pids of ``roots`` and all their descendants."""
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.ppid, []).append(process.pid)
    found: set[int] = set()
    todo = list(roots)
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo.extend(children.get(pid, ()))
    return found


class Tree:
    """Everything below this process.

    Attributes:
        private: This process is pid 1 of the tree's own pid namespace.
        root: The engine's root, None before there is one.
        exit: What became of it, as in :class:`Helper`.
        since_unix_ns: When it was started or adopted.
        helpers: By pid.
    """

    def __init__(self, *, private: bool) -> None:
        self.private = private
        self.root: int | None = None
        self.exit: int | None = None
        self.since_unix_ns: int | None = None
        self.helpers: dict[int, Helper] = {}
        self._ended: OrderedDict[int, int] = OrderedDict()

    @property
    def ended(self) -> Mapping[int, int]:
        """Return how the last processes that were reaped here have ended, by pid."""
        return self._ended

    @property
    def running(self) -> bool:
        """Whether there is a root, and alive."""
        return self.root is not None and self.exit is None

    def take(self, pid: int) -> None:
        """Make a child of this process the engine's root.

        Raises:
            LookupError: It is no living child; the sentence says what became of it.
        """
        process = read(pid)
        if process is None or process.state == "Z":
            end = self._ended.get(pid)
            raise LookupError(
                f"process {pid} is gone" if end is None else f"process {pid} has ended already: {describe(end)}"
            )
        if process.ppid != os.getpid() or pid in self.helpers:
            found = "a helper" if pid in self.helpers else f"a child of {process.ppid}"
            raise LookupError(f"process {pid} ({process.comm}) is {found}; expected a child of the keeper")
        self.root, self.exit, self.since_unix_ns = pid, None, time.time_ns()

    def add_helper(self, pid: int, owner: int, name: str) -> int:
        """Take a child of this process for a helper of a connection."""
        self.helpers[pid] = Helper(owner, name)
        return pid

    def living_helpers(self, prefix: str = "") -> list[int]:
        """Return the helpers that run, those whose name begins so."""
        return [pid for pid, one in self.helpers.items() if one.exit is None and one.name.startswith(prefix)]

    def leave_helpers(self, owner: int, until: float) -> None:
        """Let the helpers of a connection that is gone run no longer than ``until``."""
        for helper in self.helpers.values():
            if helper.owner == owner:
                helper.until = until

    def helper_deadlines(self) -> list[float]:
        """Return when helpers without an owner must be gone."""
        return [helper.until for helper in self.helpers.values() if helper.exit is None and helper.until is not None]

    def end_helpers(self, now: float) -> None:
        """Kill the helpers whose time is over."""
        late = [pid for pid, helper in self.helpers.items() if helper.exit is None and (helper.until or now + 1) <= now]
        self.signal(signal.SIGKILL, late)
        for pid in late:
            self.helpers[pid].until = None

    def members(self) -> list[Process]:
        """Return the engine's processes, its root first."""
        processes = scan()
        helpers = below(processes, *self.living_helpers())
        mine = set(processes) if self.private else below(processes, os.getpid())
        pids = mine - helpers - {os.getpid()}
        return [processes[pid] for pid in sorted(pids, key=lambda pid: (pid != self.root, pid)) if pid in processes]

    def signal(self, number: int, pids: list[int]) -> None:
        """Send a signal to each process that still exists."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def reap(self) -> None:
        """Take the status of every child that ended; orphans of the tree are ours."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                # The stop of a child whose tracer was just killed is told to its parent as well; it has not ended.
                if os.WIFEXITED(status) or os.WIFSIGNALED(status):
                    self._note(pid, os.waitstatus_to_exitcode(status))

    def _note(self, pid: int, end: int) -> None:
        if pid in self.helpers:
            self.helpers[pid].exit = end
        elif pid == self.root:
            self.exit = end
        self._ended[pid] = end
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def kill(self) -> bool:
        """Kill the tree and the helpers, and reap them.

        Returns:
            Whether all are gone; a process that hangs inside a driver may not be.
        """
        end = time.monotonic() + KILL_TIMEOUT_S
        while True:
            self._kill_once()
            self.reap()
            if not self._others():
                return True
            if time.monotonic() > end:
                return False
            time.sleep(0.002)

    def _others(self) -> set[int]:
        processes = scan()
        return (set(processes) if self.private else below(processes, os.getpid())) - {os.getpid()}

    def _kill_once(self) -> None:
        if not self.private:
            self.signal(signal.SIGKILL, sorted(self._others()))
        elif os.getpid() == 1:
            # All of a pid namespace but its pid 1, at once: no fork can slip through (kill(2)).
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)


def describe(end: int) -> str:
    """Say an exit code or a negative signal in words."""
    if end >= 0:
        return f"exit status {end}"
    try:
        return f"signal {-end} ({signal.Signals(-end).name})"
    except ValueError:
        return f"signal {-end}"
