"""The throw-away process of a live probe: it holds some bytes, is frozen and thawed, and is asked for them again.

Run as a module it is the process; :class:`Canary` is the side that asks. They talk through files in one directory,
which no dump has to describe. The one rule: the process ends when its directory goes or its time is over, so that no
probe leaves anything behind, however it ended.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from coldsnap.errors import ColdSnapError
from coldsnap.host.child import command

SIZE_BYTES = 1 << 20
LIFETIME_S = 300.0
POLL_S = 0.005


class CanaryError(ColdSnapError):
    """The process died, did not answer in time, or answered that something failed."""


class Canary:
    """A throw-away process and its directory.

    Args:
        directory: An empty directory of its own.
        deadline: ``time.monotonic()`` by which everything asked must be answered.
    """

    def __init__(self, directory: Path, deadline: float) -> None:
        self.directory = directory
        self.deadline = deadline
        self.asked = 0
        directory.mkdir()
        self._process = subprocess.Popen(
            command("coldsnap.host.canary", str(directory)),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            close_fds=True,
        )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ask(self, *words: str) -> str:
        """Have the process do something and return what it says.

        Raises:
            CanaryError: It died, did not answer in time, or failed.
        """
        self.asked += 1
        (self.directory / f"ask-{self.asked}").write_text(" ".join(words) + "\n")
        answer = self.directory / f"answer-{self.asked}"
        while time.monotonic() < self.deadline:
            text = answer.read_text() if answer.exists() else ""
            if text.endswith("\n"):
                verdict, _, rest = text.strip().partition(" ")
                if verdict != "ok":
                    raise CanaryError(f"{words[0]}: {rest}")
                return rest
            if not self.alive():
                raise CanaryError(f"{words[0]}: the process died")
            time.sleep(POLL_S)
        raise CanaryError(f"{words[0]}: no answer in time")

    def alive(self) -> bool:
        """Say whether the process, first or thawed, runs; one that is only a zombie does not."""
        return self._process.poll() is None or self._thawed()

    def _thawed(self) -> bool:
        try:
            line = Path(f"/proc/{self.pid}/cmdline").read_bytes()
        except OSError:
            return False
        # A pid that was reused has another command line; a zombie has none.
        return os.fsencode(self.directory) in line.split(b"\0")

    def gone(self) -> bool:
        """Wait until nothing has this pid any more, which a restore needs; say whether that happened in time.

        A dumped process whose parent is pid 1 stays a zombie until pid 1 reaps it, up to seconds on some machines.
        """
        while time.monotonic() < self.deadline:
            self._process.poll()
            if not Path(f"/proc/{self.pid}").exists():
                return True
            time.sleep(POLL_S)
        return False

    def rewind(self, answered: int) -> None:
        """Forget all requests after the first ``answered``, before an image of that moment is restored."""
        for number in range(answered + 1, self.asked + 1):
            (self.directory / f"ask-{number}").unlink(missing_ok=True)
            (self.directory / f"answer-{number}").unlink(missing_ok=True)
        self.asked = answered

    def kill(self) -> None:
        """Kill the process, first or thawed."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        elif self._thawed():
            os.kill(self.pid, signal.SIGKILL)


class _Workload:
    """What the process holds: bytes in main memory, and on request in GPU memory."""

    def __init__(self) -> None:
        self.host = bytearray(pattern(1))
        self.gpu: Any = None

    def do(self, word: str, *arguments: str) -> str:
        """Carry out one request; everything but the first two is about the GPU."""
        if word == "digest":
            return hashlib.sha256(self.host).hexdigest()
        if word == "pid":
            return str(os.getpid())
        if self.gpu is None:
            from coldsnap.host.cuda_memory import CudaMemory  # noqa: PLC0415  fresh until the first request about a GPU

            self.gpu = CudaMemory()
        action: Callable[..., str] = getattr(self.gpu, word.replace("-", "_"))
        return action(*arguments)


def pattern(seed: int, size_bytes: int = SIZE_BYTES) -> bytes:
    """Return bytes that look random and are the same each time."""
    return hashlib.shake_128(seed.to_bytes(8, "little")).digest(size_bytes)


def serve(directory: Path) -> None:
    """Answer requests until the directory is gone or the time is over."""
    # A second thread makes the dump one of a threaded process, as engines are.
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    workload, end, number = _Workload(), time.monotonic() + LIFETIME_S, 1
    while directory.exists() and time.monotonic() < end:
        request = directory / f"ask-{number}"
        text = request.read_text() if request.exists() else ""
        if not text.endswith("\n"):
            time.sleep(POLL_S)
            continue
        try:
            answer = f"ok {workload.do(*text.split())}"
        except Exception as error:  # noqa: BLE001  whatever happens in here is the probe's answer
            answer = f"failed {type(error).__name__}: {error}".replace("\n", " ")
        (directory / f"answer-{number}").write_text(answer + "\n")
        number += 1


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
