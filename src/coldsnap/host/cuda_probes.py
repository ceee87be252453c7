"""Every live probe of the CUDA driver, in one child process.

Run as a module it prints a JSON list of results. The one rule: each probe has its own throw-away process, so that a
driver that fails one of them fails only that one.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from coldsnap.errors import ColdSnapError
from coldsnap.host.canary import Canary, CanaryError, pattern
from coldsnap.host.cuda import Cuda, CudaCallError
from coldsnap.host.facts import FeatureResult
from coldsnap.host.freeze import FreezeError, dump, restore
from coldsnap.host.record import to_plain

LOCK_TIMEOUT_MS = 10_000
CLASSIC, AGAIN, MAPPED = (hashlib.sha256(pattern(seed)).hexdigest() for seed in (2, 3, 4))
NO_CRIU = "no CRIU that can dump was given"


class ProbeError(ColdSnapError):
    """A probe found that the driver does not do what it should; ``.phase`` says where."""

    phase: str


class Probes:
    """The probes, each a method that returns or raises.

    Args:
        directory: Where the throw-away processes live.
        criu: A CRIU executable; without one the probes that need a dump are not run.
        deadline: ``time.monotonic()`` by which all must be done.
    """

    def __init__(self, directory: Path, criu: str | None, deadline: float) -> None:
        self.directory = directory
        self.criu = criu
        self.deadline = deadline
        self.cuda = Cuda()
        self.count = 0

    def canary(self) -> Canary:
        """Start another throw-away process."""
        self.count += 1
        return Canary(self.directory / f"cuda-{self.count}", self.deadline)

    def results(self) -> list[FeatureResult]:
        """Run all; one result for each feature, in order."""
        return [
            self._one("cuda-checkpoint-api", self.walk),
            self._one("cuda-checkpoint-roundtrip", self.round_trip),
            self._one("cuda-classic-ipc", self.classic_ipc),
            self._one("cuda-vmm-exact-address", self.exact_address),
            self._one("cuda-initialized-state", self.initialized_state, dumps=True),
            self._one("cuda-fresh-state", self.fresh_state, dumps=True),
        ]

    def _one(self, name: str, probe: Callable[[], None], *, dumps: bool = False) -> FeatureResult:
        if dumps and self.criu is None:
            return FeatureResult(name=name, status="unqualified", reason=NO_CRIU)
        try:
            probe()
        except (CanaryError, CudaCallError, FreezeError, ProbeError) as error:
            phase = getattr(error, "phase", "") or str(error).split(":")[0]
            return FeatureResult(name=name, status="failed", reason=str(error), failure_phase=phase)
        return FeatureResult(name=name, status="passed")

    def walk(self) -> None:
        """Walk a process through every state: running, locked, checkpointed, locked, running."""
        with self.canary() as canary:
            self._expect(canary.ask("classic"), CLASSIC, "write")
            self._state(canary, "RUNNING")
            thread = int(self.cuda.call("cuCheckpointProcessGetRestoreThreadId", canary.pid))
            if not Path(f"/proc/{canary.pid}/task/{thread}").exists():
                raise ProbeError(f"restore thread {thread} is no thread of the process", phase="restore-thread")
            self._freeze(canary)
            self._thaw(canary)

    def round_trip(self) -> None:
        """The contents of GPU memory are the same after a checkpoint."""
        with self.canary() as canary:
            self._expect(canary.ask("classic"), CLASSIC, "write")
            self._freeze(canary)
            self._thaw(canary)
            self._expect(canary.ask("classic"), CLASSIC, "compare")

    def classic_ipc(self) -> None:
        """One process reads another's memory through a classic IPC handle."""
        with self.canary() as owner, self.canary() as reader:
            handle = owner.ask("ipc-export")
            self._expect(reader.ask("ipc-import", handle), CLASSIC, "compare")

    def exact_address(self) -> None:
        """An address range that was given back can be reserved and mapped again at the same place."""
        with self.canary() as canary:
            digest, first, second = canary.ask("vmm").split()
            self._expect(second, first, "reserve")
            self._expect(digest, MAPPED, "compare")

    def initialized_state(self) -> None:
        """A process with a context survives a checkpoint, a CRIU dump, its death and a CRIU restore, and works on."""
        with self.canary() as canary:
            self._expect(canary.ask("classic"), CLASSIC, "write")
            self._freeze(canary)
            self._criu_round_trip(canary)
            self._thaw(canary)
            self._expect(canary.ask("classic"), CLASSIC, "compare")
            self._expect(canary.ask("again"), AGAIN, "allocate")

    def fresh_state(self) -> None:
        """A process that was dumped before it ever used CUDA can use it after the restore."""
        with self.canary() as canary:
            canary.ask("digest")
            self._criu_round_trip(canary)
            self._expect(canary.ask("classic"), CLASSIC, "initialize")

    def _criu_round_trip(self, canary: Canary) -> None:
        if self.criu is None:
            raise ProbeError(NO_CRIU, phase="dump")
        images = canary.directory.with_name(f"{canary.directory.name}-images")
        dump(self.criu, canary, images)
        restore(self.criu, canary, images)

    def _freeze(self, canary: Canary) -> None:
        arguments = self.cuda.api.CUcheckpointLockArgs()
        arguments.timeoutMs = LOCK_TIMEOUT_MS
        self.cuda.call("cuCheckpointProcessLock", canary.pid, arguments)
        self._state(canary, "LOCKED")
        self.cuda.call("cuCheckpointProcessCheckpoint", canary.pid, None)
        self._state(canary, "CHECKPOINTED")

    def _thaw(self, canary: Canary) -> None:
        self.cuda.call("cuCheckpointProcessRestore", canary.pid, None)
        self._state(canary, "LOCKED")
        self.cuda.call("cuCheckpointProcessUnlock", canary.pid, None)
        self._state(canary, "RUNNING")

    def _state(self, canary: Canary, expected: str) -> None:
        state = self.cuda.call("cuCheckpointProcessGetState", canary.pid)
        wanted = getattr(self.cuda.api.CUprocessState, f"CU_PROCESS_STATE_{expected}")
        if int(state) != int(wanted):
            raise ProbeError(f"the process is in state {state!r}, expected {expected}", phase=expected.lower())

    @staticmethod
    def _expect(actual: str, expected: str, phase: str) -> None:
        if actual != expected:
            raise ProbeError(f"expected {expected}, found {actual}", phase=phase)


def main(directory: str, timeout_s: str, criu: str) -> None:
    """Print the results as JSON; ``criu`` may be empty."""
    probes = Probes(Path(directory), criu or None, time.monotonic() + float(timeout_s))
    json.dump(to_plain(probes.results()), sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
