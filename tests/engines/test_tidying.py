"""What a rank gives back before its image is taken: what nothing uses, and it says how much."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

import coldsnap
from coldsnap.engines.control import Ranks
from coldsnap.engines.rank import Busy, Rank
from coldsnap.engines.tidying import anonymous_bytes, tidied, tidy
from coldsnap.errors import EngineError

MIB = 1 << 20


@pytest.fixture
def rank(rank_dir):
    started = []

    def start(**operations):
        rank = Rank("api", str(rank_dir / "directive.json"), engine="test", versions={}, operations=operations)
        rank.start()
        started.append(rank)

    yield start
    for rank in started:
        rank.close()


IN_ITS_OWN_HEAP = """
import ctypes
from coldsnap.engines.tidying import anonymous_bytes, tidy

MIB, BLOCK_BYTES = 1 << 20, 64 << 10  # glibc takes such blocks from its heap, larger ones go with free()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
blocks = [libc.malloc(BLOCK_BYTES) for _ in range(64 * MIB // BLOCK_BYTES)]
for block in blocks:
    ctypes.memset(block, 1, BLOCK_BYTES)
for block in blocks[:-1]:
    libc.free(block)
held = anonymous_bytes()
reply = tidy({})
print(reply["trims"], reply["freed"]["heap"] // MIB, (held - anonymous_bytes()) // MIB)
"""


def test_freed_blocks_below_a_living_one_leave_the_process():
    # A process that has run other tests has holes in its heap, and the living block may come to lie in one of them.
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(coldsnap.__file__).parents[1])}
    command = [sys.executable, "-c", IN_ITS_OWN_HEAP]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    trims, freed, less = done.stdout.split()
    assert trims == "True"
    assert int(freed) > 48
    assert int(less) > 48


def test_objects_that_only_hold_each_other_are_let_go():
    class Holder:
        def __init__(self):
            self.memory, self.other = bytearray(b"1") * (32 * MIB), self

    gc.disable()
    try:
        Holder()
        assert tidy({})["freed"]["garbage"] > 24 * MIB
    finally:
        gc.enable()


def test_a_rank_answers_with_what_it_freed_and_what_it_has_left(rank, rank_dir):
    rank()
    reply = Ranks(rank_dir).tidy()[f"api.{os.getpid()}"]

    assert set(reply["freed"]) == {"garbage", "heap"}
    assert all(size >= 0 for size in reply["freed"].values())
    assert reply["anonymous_bytes"] > 0


def test_a_rank_that_cannot_tidy_is_an_error_of_the_engine(rank, rank_dir):
    def refuse(_request):
        raise Busy("not now")

    rank(tidy=refuse)
    with pytest.raises(EngineError, match=r"tidy was not done by every rank: api\.\d+: not now"):
        Ranks(rank_dir).tidy()


def test_a_receipt_says_what_each_rank_freed_and_where_the_heap_was_kept():
    trimmed = {"freed": {"garbage": 3, "heap": 4}, "trims": True}
    kept = {"freed": {"garbage": 5, "heap": 0}, "trims": False}

    assert tidied({"api.601": trimmed, "worker.603": kept}) == {
        "api.601 freed_bytes": 7,
        "worker.603 freed_bytes": 5,
        "worker.603 heap": "kept: its C library has no malloc_trim",
    }


def test_a_kernel_that_does_not_add_up_the_mappings_is_refused(tmp_path):
    (tmp_path / "rollup").write_text("Rss: 12 kB\n")

    with pytest.raises(OSError, match="has no line 'Anonymous:', which Linux 4.14 and newer write"):
        anonymous_bytes(str(tmp_path / "rollup"))
