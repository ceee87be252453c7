"""The library under test, built from csrc with its shims, and memory that looks like a device's."""

import ctypes
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

from coldsnap.transfer.memory import HostMemory

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "testing"


def build() -> Path:
    """Build csrc and its tests; a second call finds everything up to date."""
    BUILD.mkdir(parents=True, exist_ok=True)
    cmake = shutil.which("cmake") or Path(sys.executable).with_name("cmake")
    with open(BUILD / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (
            [cmake, "-S", ROOT / "csrc", "-B", BUILD, "-DCOLDSNAP_TESTING=ON"],
            [cmake, "--build", BUILD, "--parallel", str(os.cpu_count())],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
    return BUILD


class Shim:
    """The stand-in for the CUDA driver, seen from its other side."""

    NAMES = ("streams", "events", "registrations", "allocations", "contexts", "copies", "copied_bytes", "pageable")

    def __init__(self, path: Path):
        self.library = ctypes.CDLL(str(path))

    def fail(self, name: str, after: int = 0, code: int = 700):
        self.library.shim_fail(name.encode(), ctypes.c_long(after), code)

    def heal(self):
        self.library.shim_fail(b"", ctypes.c_long(-1), 0)
        self.library.shim_delay_us(ctypes.c_long(0))

    def delay(self, microseconds: int):
        self.library.shim_delay_us(ctypes.c_long(microseconds))

    def forget_registrations(self):
        self.library.shim_forget_registrations()

    def counts(self) -> dict[str, int]:
        values = (ctypes.c_long * len(self.NAMES))()
        self.library.shim_counts(values)
        return dict(zip(self.NAMES, values, strict=True))

    def held(self) -> dict[str, int]:
        """What must not grow."""
        return {name: count for name, count in self.counts().items() if not name.startswith("cop")}


class ShimMemory(HostMemory):
    """Host memory that passes for that of CUDA device 0."""

    device = 0
