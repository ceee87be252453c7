"""A CUDA driver without a device: states of processes, a log of calls, and faults on demand.

As a module it is what ``--driver fake_cuda:open_driver`` loads in a real helper process; its log goes to FAKE_CUDA_LOG.
"""

import os
import time

from coldsnap.drivers.cuda_driver import CudaFailure

NEXT = {"lock": "locked", "checkpoint": "checkpointed", "restore": "locked", "unlock": "running"}
BEFORE = {"lock": "running", "checkpoint": "locked", "restore": "checkpointed", "unlock": "locked"}


def uuid(number):
    """Name a device."""
    return f"GPU-{number:08x}-0000-0000-0000-000000000000"


class FakeDriver:
    """The calls of ``CudaDriver``.

    Attributes:
        states: State by pid.
        calls: ``(op, pid)`` in order.
        held: Bytes by pid that it has on each device until it is checkpointed.
        moves: The devices to move to, one list for each restore.
        faults: ``(op, pid)`` → what happens instead: an exception, seconds to sleep, or a state to end in.
    """

    def __init__(self, states, faults=None, free_bytes=(80 << 30,), log=None, held=None):
        self.states, self.faults, self.free_bytes, self.log = dict(states), dict(faults or {}), free_bytes, log
        self.held = dict(held or {})
        self.calls, self.moves = [], []

    def state(self, pid):
        while stands_still(pid):
            time.sleep(0.01)  # as the driver does: a thread of the process has to answer
        if pid not in self.states:
            raise CudaFailure("cuCheckpointProcessGetState: invalid argument (1)", status=1)
        return self.states[pid]

    def memory(self):
        gone = [sizes for pid, sizes in self.held.items() if self.states.get(pid) == "checkpointed"]
        freed = [sum(sizes[at] for sizes in gone) for at in range(len(self.free_bytes))]
        return [(free + more, 80 << 30) for free, more in zip(self.free_bytes, freed, strict=True)]

    def devices(self):
        return [uuid(number) for number in range(len(self.free_bytes))]

    def lock(self, pid, timeout_ms):
        assert timeout_ms > 0
        self._do("lock", pid)

    def checkpoint(self, pid):
        self._do("checkpoint", pid)

    def restore(self, pid, moves=()):
        self.moves.append(list(moves))
        self._do("restore", pid)

    def unlock(self, pid):
        self._do("unlock", pid)

    def _do(self, op, pid):
        self.calls.append((op, pid))
        if self.log:
            with open(self.log, "a") as log:
                log.write(f"{op} {pid}\n")
        fault = self.faults.pop((op, pid), None)
        if isinstance(fault, Exception):
            raise fault
        if isinstance(fault, (int, float)):
            time.sleep(fault)
        if self.states[pid] != BEFORE[op]:
            raise CudaFailure(f"cuCheckpointProcess: illegal state {self.states[pid]} (401)", status=401)
        self.states[pid] = fault if isinstance(fault, str) else NEXT[op]


def stands_still(pid):
    """Tell whether a process is stopped."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


def open_driver():
    """Every process named in FAKE_CUDA_PIDS has a context, and is in the state of FAKE_CUDA_STATE."""
    if reason := os.environ.get("FAKE_CUDA_ABSENT"):
        raise CudaFailure(reason)
    pids = map(int, os.environ["FAKE_CUDA_PIDS"].split())
    states = dict.fromkeys(pids, os.environ.get("FAKE_CUDA_STATE", "running"))
    return FakeDriver(
        states,
        log=os.environ["FAKE_CUDA_LOG"],
        free_bytes=(5 << 30, 6 << 30),
        held=dict.fromkeys(states, (1 << 30, 0)),
    )
