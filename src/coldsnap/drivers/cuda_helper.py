"""The CUDA helper: a resident process that locks, checkpoints, restores and unlocks CUDA in other processes.

    python -m coldsnap.drivers.cuda_helper SOCKET_FD [--driver MODULE:FACTORY]

It runs beside the tree, in its namespaces, so that pids mean the same; it initialises CUDA once, because that takes
0.3 to 0.7 s. It speaks JSON over a SEQPACKET socket, one request, one answer: ``{"op", "pids", "timeout_ms"}`` →
``{"ok", …}``.

The one rule: when its socket closes, every process it touched runs again. What it did is undone in reverse, by each
process's state, not by what it remembers having asked; a workload is never left locked by a dead caller. Only the
standard library and the driver are imported here: this is a process, and it starts often.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from coldsnap.drivers.cuda_driver import CHECKPOINTED, LOCKED, RUNNING, CudaDriver, CudaFailure, Moves

__all__ = ["main", "serve"]

REQUEST_BYTES = 64 << 10

Step = Callable[[CudaDriver, int, int, Moves], None]

# The state a process must be in, the call, and the state it must be in afterwards.
STEPS: Mapping[str, tuple[str, Step, str]] = {
    "lock": (RUNNING, lambda driver, pid, timeout_ms, _: driver.lock(pid, timeout_ms), LOCKED),
    "checkpoint": (LOCKED, lambda driver, pid, *_: driver.checkpoint(pid), CHECKPOINTED),
    "restore": (CHECKPOINTED, lambda driver, pid, _, moves: driver.restore(pid, moves), LOCKED),
    "unlock": (LOCKED, lambda driver, pid, *_: driver.unlock(pid), RUNNING),
}


class _Server:
    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._touched: list[int] = []
        self._moves: Moves = ()

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do what one request asks."""
        op, pids = request["op"], request.get("pids", [])
        if op in STEPS:
            self._moves = [(old, new) for old, new in request.get("moves", ())]
            seconds = self._step(op, pids, time.monotonic() + request["timeout_ms"] / 1000)
            return {"ok": True, "seconds": seconds}
        if op == "state":
            return {"ok": True, "states": [self._driver.state(pid) for pid in pids]}
        if op == "memory":
            return {"ok": True, "memory": [list(pair) for pair in self._driver.memory()]}
        if op == "devices":
            return {"ok": True, "devices": list(self._driver.devices())}
        if op == "probe":
            return {"ok": True, "states": [self._probe(pid) for pid in pids]}
        if op == "release":  # the processes are the caller's again, or dead: nothing is left to undo
            self._touched.clear()
            return {"ok": True}
        raise CudaFailure(f"the helper knows no operation {op!r}")

    def _step(self, op: str, pids: Sequence[int], deadline: float) -> list[float]:
        before, call, after = STEPS[op]
        for pid in pids:  # all before any: a step that cannot be done everywhere is not begun anywhere
            self._require(op, pid, before)
        seconds = []
        for pid in pids:
            left_ms = int((deadline - time.monotonic()) * 1000)
            if left_ms <= 0:
                raise CudaFailure(f"the deadline passed before the {op} of process {pid}")
            if pid not in self._touched:
                self._touched.append(pid)
            began = time.monotonic()
            call(self._driver, pid, left_ms, self._moves)
            self._require(op, pid, after, done=True)
            seconds.append(time.monotonic() - began)
        return seconds

    def _probe(self, pid: int) -> str | None:
        """Return a process's state; None for one of which the driver knows nothing."""
        try:
            return self._driver.state(pid)
        except CudaFailure:
            return None

    def _require(self, op: str, pid: int, expected: str, *, done: bool = False) -> None:
        found = self._driver.state(pid)
        if found != expected:
            when = "after" if done else "before"
            raise CudaFailure(f"process {pid} is {found} {when} the {op}, expected {expected}")

    def roll_back(self) -> list[str]:
        """Let every process run again, the last one touched first; say what could not be done."""
        problems = []
        for pid in reversed(self._touched):
            try:
                self._release(pid)
            except (CudaFailure, ProcessLookupError) as error:
                if os.path.exists(f"/proc/{pid}"):  # a process that is dead needs nothing
                    problems.append(f"process {pid}: {error}")
        self._touched.clear()
        return problems

    def _release(self, pid: int) -> None:
        # A thread of the process itself does what the driver is asked for, telling the state included: on an H200 the
        # question alone hung for a process that a dump had left stopped.
        os.kill(pid, signal.SIGCONT)
        if (state := self._driver.state(pid)) == CHECKPOINTED:
            self._driver.restore(pid, self._moves)
            state = self._driver.state(pid)
        if state == LOCKED:
            self._driver.unlock(pid)
            state = self._driver.state(pid)
        if state != RUNNING:
            raise CudaFailure(f"it is {state}, and the driver has no way back")


def serve(connection: socket.socket, driver: CudaDriver) -> list[str]:
    """Answer requests until the other end closes, then undo what is not undone.

    Args:
        connection: A SEQPACKET socket.
        driver: The driver.

    Returns:
        What could not be undone, one sentence each.
    """
    server = _Server(driver)
    with suppress(ConnectionError):
        for request in _requests(connection):
            try:
                answer = server.answer(json.loads(request))
            except CudaFailure as error:
                answer = {"ok": False, "error": str(error), "status": error.status}
            connection.send(json.dumps(answer).encode())
    return server.roll_back()


def _requests(connection: socket.socket) -> Iterator[bytes]:
    while request := connection.recv(REQUEST_BYTES):
        yield request


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one caller; the exit status is 1 when something could not be undone."""
    parser = argparse.ArgumentParser(prog="python -m coldsnap.drivers.cuda_helper")
    parser.add_argument("socket_fd", type=int)
    parser.add_argument("--driver", default="coldsnap.drivers.cuda_driver:open_driver", metavar="MODULE:FACTORY")
    options = parser.parse_args(arguments)
    module, _, factory = options.driver.partition(":")
    with socket.socket(fileno=options.socket_fd) as connection:
        try:
            driver: CudaDriver = getattr(importlib.import_module(module), factory)()
        except (CudaFailure, ImportError) as error:
            connection.send(json.dumps({"ok": False, "error": str(error), "status": 0}).encode())
            return 1
        connection.send(json.dumps({"ok": True, "pid": os.getpid()}).encode())
        problems = serve(connection, driver)
    for problem in problems:
        print(problem)  # noqa: T201  (this process's stdout is its log)
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
