"""Reading ahead fills the page cache within its budget, and stops when told to."""

import os
import threading

import pytest
from layouts import content

from coldsnap.errors import NativeError
from coldsnap.transfer.prefetch import BLOCK_BYTES, prefetch

SIZE = 24 << 20


@pytest.fixture
def cold(tmp_path):
    path = tmp_path / "pack"
    path.write_bytes(content(1 << 20) * 24)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    return path


def resident(library, path):
    fd = os.open(path, os.O_RDONLY)
    try:
        return sum(library.resident_pages(fd, 0, SIZE, 1 << 20)) * 4096
    finally:
        os.close(fd)


def test_a_file_is_brought_into_the_page_cache(library, cold):
    assert resident(library, cold) == 0

    receipt = prefetch(cold).wait(60)

    assert (receipt.outcome, receipt.bytes, receipt.budget_bytes) == ("complete", SIZE, SIZE)
    assert resident(library, cold) == SIZE


def test_the_budget_is_kept(library, cold):
    receipt = prefetch(cold, budget_bytes=5 << 20).wait(60)

    assert (receipt.outcome, receipt.bytes) == ("budget", 5 << 20)
    assert resident(library, cold) < SIZE


def test_spans_come_in_the_order_given(cold):
    with prefetch(cold, spans=[(20 << 20, 1 << 20), (0, 100)], budget_bytes=1 << 20, threads=1) as running:
        receipt = running.wait(60)

    assert (receipt.bytes, receipt.outcome) == (1 << 20, "budget")


def test_it_ends_when_cancelled_and_leaves_no_thread(cold):
    before = threading.active_count()
    running = prefetch(cold, spans=[(0, SIZE)] * 200, threads=2)

    receipt = running.cancel()

    assert receipt.outcome in ("cancelled", "complete")
    assert receipt.bytes <= 200 * SIZE
    assert receipt.bytes % BLOCK_BYTES == 0
    assert threading.active_count() == before


def test_leaving_the_context_cancels(cold):
    with prefetch(cold, spans=[(0, SIZE)] * 200, threads=1) as running:
        pass

    assert running.bytes < 200 * SIZE
    assert running.wait(1).outcome == "cancelled"


def test_a_file_that_shrinks_is_no_failure(cold):
    os.truncate(cold, 3 << 20)

    receipt = prefetch(cold, spans=[(0, 3 << 20), (0, 100)]).wait(60)

    assert receipt.outcome == "complete"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(NativeError, match="absent cannot be opened"):
        prefetch(tmp_path / "absent")


def test_a_file_that_vanishes_meanwhile_is_a_receipt_not_a_crash(cold):
    from coldsnap.transfer.prefetch import Prefetch

    os.unlink(cold)
    receipt = Prefetch(cold, [(0, SIZE)], SIZE, 2).wait(60)

    assert receipt.outcome == "failed"
    assert "cannot be opened" in receipt.reason
