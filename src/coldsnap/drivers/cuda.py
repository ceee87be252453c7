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
from coldsnap.drivers.cuda_driver import Moves
from coldsnap.drivers.cuda_helper import REQUEST_BYTES
from coldsnap.drivers.tree_record import HeldDevice
from coldsnap.errors import DriverError, EngineError, StepTimeout

__all__ = ["CudaHelper"]

SOCKET_FD = 3
START_S = 60.0
QUESTION_S = 30.0
CLOSE_S = 60.0
NOTHING_BYTES = 16 << 20
"""Less than this is what other processes did in the meantime: a context alone takes hundreds of MiB."""

CONTEXT_BYTES = 1 << 29
"""What a context of the helper's own takes while it looks at free memory, and the restore will find free."""

MARGIN_S = 5.0
"""The helper notices its own deadline first and says which process was slow; this is for one that hangs, s."""


def _require_free(memory: Sequence[tuple[int, int]], needs_bytes: Sequence[int]) -> None:
    for ordinal, needed in enumerate(needs_bytes):
        free = memory[ordinal][0] if ordinal < len(memory) else 0
        if needed > free + (CONTEXT_BYTES if free else 0):
            raise DriverError(
                f"device {ordinal} has {free} bytes free, the captured processes need {needed}: end what else uses it, "
                "or choose another device",
                command="cuda restore",
            )


class CudaHelper:
    """A resident helper beside one tree.

    Attributes:
        pids: The processes of the last ``lock`` or ``restore``, children first.
        held: What the last ``checkpoint`` let go of, device by device.
        margin_s: How much longer than the deadline of a step its answer is waited for, s.
    """

    def __init__(self, spawner: Spawner, connection: socket.socket, pid: int) -> None:
        self._spawner, self._connection, self._pid = spawner, connection, pid
        self._ready, self._ahead = False, False
        self._measured: tuple[tuple[int, int], ...] | None = None
        self.pids: tuple[int, ...] = ()
        self.held: tuple[HeldDevice, ...] = ()
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
        """Move the device memory of every locked process to host memory, and see how much it was; see :meth:`lock`."""
        before = self.memory()
        seconds = self._step("checkpoint", timeout_s)
        freed = (max(0, after - free) for (free, _), (after, _) in zip(before, self.memory(), strict=True))
        pairs = zip(self.devices(), freed, strict=True)
        self.held = tuple(HeldDevice(uuid=uuid, needs_bytes=size) for uuid, size in pairs if size >= NOTHING_BYTES)
        return seconds

    def restore(
        self, pids: Sequence[int], *, timeout_s: float, needs_bytes: Sequence[int] = (), moves: Moves = ()
    ) -> float:
        """Move memory back to the devices; see :meth:`lock`.

        Args:
            pids: Children first.
            timeout_s: For all of them, s.
            needs_bytes: What the processes need of each device; checked before anything is moved.
            moves: UUID of a device of the capture → of the one to take instead; none, or one for every device.

        Raises:
            DriverError: A device has less free, or a process refused.
        """
        self.pids = tuple(pids)
        if any(needs_bytes):
            _require_free(self._known_memory(), needs_bytes)
        return self._step("restore", timeout_s, moves=moves)

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

    def probe(self, pids: Sequence[int]) -> tuple[str | None, ...]:
        """Return what :meth:`states` does, None for a process of which the driver knows nothing."""
        return tuple(self._ask({"op": "probe", "pids": list(pids)}, QUESTION_S)["states"])

    def devices(self) -> tuple[str, ...]:
        """Return the UUID of each device, in the order of :meth:`memory`."""
        return tuple(self._ask({"op": "devices"}, QUESTION_S)["devices"])

    def measure_ahead(self) -> None:
        """Let the helper see what is free as soon as it can, without waiting for it: a restore then knows already."""
        try:
            self._connection.send(json.dumps({"op": "memory"}).encode())
            self._ahead = True
        except OSError:
            self._ahead = False  # it has ended; the next question tells why

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

    def _known_memory(self) -> tuple[tuple[int, int], ...]:
        self._await_start()
        return self._measured or self.memory()

    def _step(self, op: str, timeout_s: float, *, moves: Moves = ()) -> float:
        began = time.monotonic()
        request = {"op": op, "pids": self.pids, "timeout_ms": int(timeout_s * 1000), "moves": list(moves)}
        try:
            self._ask(request, timeout_s + self.margin_s)
        except BaseException:
            self.close()  # its socket closed, it brings every process back
            raise
        return time.monotonic() - began

    def _await_start(self) -> None:
        if not self._ready:
            self._receive("start", START_S)
            self._ready = True
        if self._ahead:
            self._ahead = False
            self._measured = tuple((free, total) for free, total in self._receive("memory", QUESTION_S)["memory"])

    def _ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        self._await_start()
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
