"""What a process keeps of what it has freed: nothing of a block of 64 KiB while large blocks are returned."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import coldsnap

SCRIPT = """
import contextlib, ctypes, sys, threading
from coldsnap.transfer.heap import large_blocks_returned, trim_heap
c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes, c.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
SIZE, KEY = 1 << 20, 0x5A
needle = lambda: bytes([KEY ^ 0xFF] * 2 + [KEY] * 60)
c.free(c.malloc(16 << 20))  # from here on glibc puts a block of 1 MiB into an arena

def stale():
    address = c.malloc(SIZE)
    ctypes.memset(address, KEY, SIZE)
    ctypes.memset(address + SIZE // 2, KEY ^ 0xFF, 2)
    c.free(address)

with large_blocks_returned() if sys.argv[1] == "returned" else contextlib.nullcontext("glibc's own") as taken:
    thread = threading.Thread(target=stale)
    thread.start()
    thread.join()
trim_heap()
found = 0
with open("/proc/self/mem", "rb", buffering=0) as memory:
    for line in open("/proc/self/maps"):
        places, mode, *_ = line.split()
        begin, end = (int(part, 16) for part in places.split("-"))
        if mode.startswith("rw") and "[" not in line:
            memory.seek(begin)
            with contextlib.suppress(OSError):
                found += memory.read(end - begin).count(needle()) and 1
print(taken, bool(found))
"""


def after(how, **environment):
    package = str(Path(coldsnap.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": package, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_a_thread_leaves_what_it_has_freed_in_its_arena():
    assert after("kept") == "glibc's own True", "the search would find what is there"


def test_nothing_of_a_freed_block_stays_while_large_blocks_are_returned():
    assert after("returned") == "True False"


@pytest.mark.parametrize(
    "said",
    [
        {"MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "67108864"},
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=67108864"},
    ],
)
def test_what_the_environment_says_about_malloc_stands(said):
    assert after("returned", **said) == "False True"
