"""The CUDA memory provider, on a stand-in for the driver that cuda-bindings finds under the driver's name."""

import os
import subprocess
import sys
from pathlib import Path

DEVICE_TESTS = Path(__file__).parents[1] / "gpu" / "hydration_device.py"


def on_the_shim(built, *command):
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(built / "tests" / "driver"),
        "COLDSNAP_TEST_LIBRARY": str(built / "libcoldsnap_io.so"),
    }
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=250, check=False
    )


def test_what_a_gpu_machine_runs_passes_on_the_stand_in(built):
    done = on_the_shim(built, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(DEVICE_TESTS))

    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_a_driver_that_has_no_memory_left_keeps_nothing(built):
    script = """
import ctypes, os
from coldsnap.errors import NativeError
from coldsnap.transfer.cuda_memory import CudaMemory
shim = ctypes.CDLL("libcuda.so.1")
memory = CudaMemory(0)
kept = memory.allocate(4096, tag="kept")
for call, code in (("cuMemCreate", 2), ("cuMemMap", 1), ("cuMemSetAccess", 1)):
    before = len(os.listdir("/proc/self/fd"))
    shim.shim_fail(call.encode(), ctypes.c_long(0), code)
    try:
        memory.allocate(4096, tag="lost")
        raise SystemExit(f"{call} did not fail")
    except NativeError as error:
        assert call in str(error), error
    shim.shim_fail(b"", ctypes.c_long(-1), 0)
    assert memory.regions() == (kept,), call
    assert len(os.listdir("/proc/self/fd")) == before, call
    memory.release([kept])
    shim.shim_fail(call.encode(), ctypes.c_long(0), code)
    try:
        memory.remap([kept])
        raise SystemExit(f"{call} did not fail")
    except NativeError:
        pass
    shim.shim_fail(b"", ctypes.c_long(-1), 0)
    memory.remap([kept])
    assert memory.is_mapped(kept)
    memory.copy_from_host(kept.address, memoryview(b"again"))
memory.close()
print("kept")
"""
    done = on_the_shim(built, "-c", script)

    assert done.stdout == "kept\n", done.stdout + done.stderr
