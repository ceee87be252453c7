"""The library under test, built from csrc with its shims, and memory that looks like a device's."""

import ctypes
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from coldsnap.transfer.memory import HostMemory
from coldsnap.transfer.native import NativeLibrary

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


@pytest.fixture(scope="session")
def built():
    return build()


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


@pytest.fixture(scope="session")
def library(built):
    library = NativeLibrary.load(built / "libcoldsnap_io.so")
    library.load_cuda(built / "tests" / "libcuda_shim.so")
    library.load_cufile(built / "tests" / "libcufile_shim.so")
    return library


@pytest.fixture
def shim(library, built):
    shim = Shim(built / "tests" / "libcuda_shim.so")
    shim.heal()
    yield shim
    shim.heal()


@pytest.fixture
def cufile(library, built):
    cufile = ctypes.CDLL(str(built / "tests" / "libcufile_shim.so"))
    yield cufile
    cufile.shim_module(2)
    cufile.shim_register_error(0)
    cufile.shim_garble(0)
    cufile.shim_fail_read(ctypes.c_long(-1))


@pytest.fixture
def host():
    memory = HostMemory()
    yield memory
    memory.close()


@pytest.fixture
def device():
    memory = ShimMemory()
    yield memory
    memory.close()
