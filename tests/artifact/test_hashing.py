"""Hashing where the page cache holds the bytes gives the digests of hashlib, and no fatal signal."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.artifact import hashing
from coldsnap.artifact.cores import in_threads
from coldsnap.artifact.hashing import WINDOW_BYTES, pieces_of, sha256_fd, sha256_spans

SIZE = WINDOW_BYTES * 2 + 12_345


@pytest.fixture(name="large", scope="module")
def _large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("hashing") / "large"
    data = os.urandom(1 << 16) * (SIZE // (1 << 16) + 1)
    path.write_bytes(data[:SIZE])
    return path, data[:SIZE]


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(0, SIZE)), min_size=1, max_size=4), st.sampled_from([1, 2])
)
def test_any_spans_have_the_digests_of_hashlib(large, spans, threads: int) -> None:
    path, data = large
    spans = [(offset, min(size, SIZE - offset)) for offset, size in spans]
    with path.open("rb") as stream:
        found = sha256_spans(stream.fileno(), SIZE, spans, threads=threads)

    assert [sha256(data[offset : offset + size]) for offset, size in spans] == found


@pytest.mark.parametrize("size", [0, 1, 4096, 1 << 20, (1 << 20) + 1])
def test_small_and_large_files_have_the_digests_of_hashlib(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    with (tmp_path / "file").open("rb") as stream:
        assert sha256(data) == sha256_fd(stream.fileno(), size)


def test_a_file_open_for_writing_is_read_without_a_mapping(large) -> None:
    path, data = large
    with path.open("r+b") as writer, path.open("rb") as stream:
        # The kernel gives no lease on a file that someone may write.
        assert not hashing._lease(stream.fileno())
        assert sha256(data) == sha256_fd(stream.fileno(), SIZE)
        assert sha256(data) == sha256_fd(writer.fileno(), SIZE)


def test_whoever_opens_the_file_for_writing_waits_for_the_window_and_ends_the_hashing(large) -> None:
    path, _ = large
    with path.open("rb") as stream, hashing.pieces_of(stream.fileno(), SIZE) as pieces:
        reading = pieces(0, SIZE)
        next(reading)
        with pytest.raises(BlockingIOError):
            os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        with pytest.raises(OSError, match="opened the file for writing"):
            next(reading)
    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))


def test_the_lease_is_given_back(large) -> None:
    path, _ = large
    with path.open("rb") as stream:
        sha256_fd(stream.fileno(), SIZE)
        assert fcntl.F_UNLCK == fcntl.fcntl(stream.fileno(), fcntl.F_GETLEASE)


def test_a_file_that_became_shorter_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(2 << 20))
    with path.open("rb") as stream, pytest.raises(OSError, match="shorter"):
        sha256_fd(stream.fileno(), 3 << 20)
    path.write_bytes(b"x")
    with path.open("rb") as stream, pytest.raises(OSError, match="shorter"):
        sha256_fd(stream.fileno(), 2)


def test_threads_keep_the_order_of_the_items() -> None:
    assert [number * 2 for number in range(50)] == in_threads(lambda number: number * 2, range(50), threads=8)
    assert [] == in_threads(str, [])


def test_the_caller_is_one_of_the_threads_that_work() -> None:
    meeting = threading.Barrier(3, timeout=60)

    def name(_: int) -> str:
        meeting.wait()
        return threading.current_thread().name

    found = in_threads(name, range(3), threads=3)

    assert threading.current_thread().name in found
    assert len(set(found)) == 3


def test_an_item_that_fails_is_the_last_one_of_each_thread() -> None:
    begun = []

    def work(number: int) -> None:
        begun.append(number)
        raise IndexError(f"item {number} failed")

    with pytest.raises(IndexError, match=r"item \d failed"):
        in_threads(work, range(1000), threads=2)

    assert len(begun) <= 2


def test_a_file_that_cannot_be_mapped_is_not_read_through_the_heap(tmp_path):
    """What was freed there keeps what it held, and would be in a process image."""
    path = tmp_path / "pack"
    path.write_bytes(os.urandom(2 << 20))
    raising = bytearray(16 << 20)  # once freed, glibc takes blocks of up to this size from the heap
    del raising

    with path.open("r+b"), path.open("rb") as reader, pieces_of(reader.fileno(), 2 << 20) as pieces:
        addresses = [ctypes.addressof(ctypes.c_char.from_buffer(piece)) for piece in pieces(0, 2 << 20)]

    heaps = [
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if "[heap]" in line
    ]
    assert len(addresses) == 8
    assert not [at for at in addresses for begin, end in heaps if int(begin, 16) <= at < int(end, 16)]
