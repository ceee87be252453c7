"""CUDA state of a tree: the caller's end of the resident helper.

The one rule: all or nothing. Every process is locked before any is checkpointed, every one restored before any is
unlocked; when one refuses, the helper brings those already done back, last first.

Each process that holds the NVIDIA driver open takes part, also one without a context: an API server that merely
imported a library holds descriptors that CRIU cannot dump.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from coldsnap.drivers.base import Spawner, end_process
from coldsnap.drivers.cuda_helper import REQUEST_BYTES
from coldsnap.errors import DriverError, EngineError, StepTimeout

__all__ = ["CudaHelper"]

SOCKET_FD = 3
START_S = 60.0
QUESTION_S = 30.0
CLOSE_S = 60.0
MARGIN_S = 5.0
"""The helper notices its own deadline first and says which process was slow; this is for one that hangs, s."""


class CudaHelper:
    """A resident helper beside one tree.

    Attributes:
        pids: The processes of the last ``lock`` or ``restore``, children first.
        margin_s: How much longer than the deadline of a step its answer is waited for, s.
    """

    def __init__(self, spawner: Spawner, connection: socket.socket, pid: int) -> None:
        self._spawner, self._connection, self._pid = spawner, connection, pid
        self._ready = False
        self.pids: tuple[int, ...] = ()
        self.margin_s = MARGIN_S

    @classmethod
    def start(
        cls,
        spawner: Spawner,
        *,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        driver: str | None = None,
    ) -> Self:
        """Start the helper without waiting for it: it initialises CUDA while other things go on.

        Args:
            spawner: The tree's keeper.
            python: An interpreter with coldsnap and cuda-bindings.
            environment: What it needs beside PATH, for example ``LD_LIBRARY_PATH`` or ``PYTHONPATH``.
            driver: ``module:factory`` of another driver than NVIDIA's.

        Raises:
            EngineError: It could not be started.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        chosen = () if driver is None else ("--driver", driver)
        environment = {"PATH": "/usr/bin:/bin", **(environment or {})}
        argv = (python, "-m", "coldsnap.drivers.cuda_helper", str(SOCKET_FD), *chosen)
        try:
            pid = spawner.spawn_helper(argv, env=environment, name="cuda-helper", fds={SOCKET_FD: theirs.fileno()})
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(spawner, ours, pid)

    def lock(self, pids: Sequence[int], *, timeout_s: float) -> float:
        """Lock CUDA in every process.

        Args:
            pids: Children first, in the tree's pid namespace.
            timeout_s: For all of them, s.

        Returns:
            Seconds.

        Raises:
            DriverError: One refused; none is left locked.
            StepTimeout: The deadline passed; the helper is closed and brings all back.
        """
        self.pids = tuple(pids)
        return self._step("lock", timeout_s)

    def checkpoint(self, *, timeout_s: float) -> float:
        """Move the device memory of every locked process to host memory; see :meth:`lock`."""
        return self._step("checkpoint", timeout_s)

    def restore(self, pids: Sequence[int], *, timeout_s: float, needs_bytes: Sequence[int] = ()) -> float:
        """Move memory back to the devices; see :meth:`lock`.

        Args:
            pids: Children first.
            timeout_s: For all of them, s.
            needs_bytes: What the processes need of each device; checked before anything is moved.

        Raises:
            DriverError: A device has less free, or a process refused.
        """
        self.pids = tuple(pids)
        for ordinal, needed in enumerate(needs_bytes):
            self._require_free(ordinal, needed)
        return self._step("restore", timeout_s)

    def unlock(self, *, timeout_s: float) -> float:
        """Let every restored process call CUDA again; see :meth:`lock`. Nothing is left to undo then."""
        seconds = self._step("unlock", timeout_s)
        self.release()
        return seconds

    def release(self) -> None:
        """Forget what could be undone: the processes run, or are dead."""
        self._ask({"op": "release"}, QUESTION_S)

    def states(self, pids: Sequence[int]) -> tuple[str, ...]:
        """Return running, locked, checkpointed or failed for each process."""
        return tuple(self._ask({"op": "state", "pids": list(pids)}, QUESTION_S)["states"])

    def memory(self) -> tuple[tuple[int, int], ...]:
        """Return free and total bytes of each device."""
        return tuple((free, total) for free, total in self._ask({"op": "memory"}, QUESTION_S)["memory"])

    def close(self) -> None:
        """End the helper; it brings back what is still locked or checkpointed first."""
        self._connection.close()
        try:
            self._spawner.wait_helper(self._pid, timeout_s=CLOSE_S)
        except EngineError:
            return  # the keeper has ended, and the namespace with the helper in it
        except TimeoutError:
            end_process(self._spawner.proc_fd, self._pid)
            self._spawner.wait_helper(self._pid, timeout_s=MARGIN_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_free(self, ordinal: int, needed: int) -> None:
        memory = self.memory()
        free = memory[ordinal][0] if ordinal < len(memory) else 0
        if free < needed:
            raise DriverError(
                f"device {ordinal} has {free} bytes free, the captured processes need {needed}: end what else uses it, "
                "or choose another device",
                command="cuda restore",
            )

    def _step(self, op: str, timeout_s: float) -> float:
        began = time.monotonic()
        try:
            self._ask({"op": op, "pids": self.pids, "timeout_ms": int(timeout_s * 1000)}, timeout_s + self.margin_s)
        except BaseException:
            self.close()  # its socket closed, it brings every process back
            raise
        return time.monotonic() - began

    def _ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        if not self._ready:
            self._receive("start", START_S)
            self._ready = True
        try:
            self._connection.send(json.dumps(request).encode())
        except OSError as error:
            raise DriverError(f"the CUDA helper has ended: {error}", command=f"cuda {request['op']}") from error
        return self._receive(request["op"], timeout_s)

    def _receive(self, op: str, timeout_s: float) -> dict[str, Any]:
        self._connection.settimeout(timeout_s)
        try:
            data = self._connection.recv(REQUEST_BYTES)
        except TimeoutError as error:
            raise StepTimeout(f"the CUDA {op} did not end within {timeout_s:.0f} s", seconds=timeout_s) from error
        except OSError as error:
            raise DriverError(f"the CUDA helper has ended: {error}", command=f"cuda {op}") from error
        if not data:
            raise DriverError("the CUDA helper has ended without an answer; its log says why", command=f"cuda {op}")
        answer: dict[str, Any] = json.loads(data)
        if not answer["ok"]:
            raise DriverError(f"CUDA {op} failed: {answer['error']}", command=f"cuda {op}", status=answer["status"])
        return answer
