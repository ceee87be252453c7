"""Reading ahead: a file comes into the page cache while something else runs.

The one rule: it is only advice. It never fails what it helps, never reads more than its budget, and ends when told to;
the hydrate that follows asks the page cache what it got and reads the rest around it.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterable
from typing import Self

from attrs import frozen

from coldsnap.errors import NativeError
from coldsnap.transfer.hydrate import opened

__all__ = ["Prefetch", "PrefetchReceipt", "prefetch"]

BLOCK_BYTES = 4 << 20
THREADS = 4


@frozen(kw_only=True)
class PrefetchReceipt:
    """How far a read-ahead came.

    Attributes:
        path: The file.
        budget_bytes: What it was allowed to read.
        bytes: What it read.
        seconds: How long it took, s.
        outcome: complete, budget (the budget ended it), cancelled or failed.
        reason: The failure, in words; empty otherwise.
    """

    path: str
    budget_bytes: int
    bytes: int
    seconds: float
    outcome: str
    reason: str = ""


class Prefetch:
    """A read-ahead in progress; a context manager that cancels on the way out.

    Attributes:
        path: The file.
    """

    def __init__(
        self, path: str | os.PathLike[str], spans: Iterable[tuple[int, int]], budget_bytes: int, threads: int
    ) -> None:
        self.path = os.fspath(path)
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._began = time.monotonic()
        self._ended = self._began
        self._read = 0
        self._reason = ""
        self._blocks, self._curtailed = _blocks(spans, budget_bytes)
        self._next = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"coldsnap-prefetch-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    @property
    def bytes(self) -> int:
        """Bytes read so far."""
        return self._read

    def cancel(self) -> PrefetchReceipt:
        """Stop after the blocks being read, and say how far it came."""
        self._cancelled.set()
        return self.wait()

    def wait(self, timeout_s: float | None = None) -> PrefetchReceipt:
        """Wait for the end.

        Args:
            timeout_s: Give up waiting, not reading, after so long, s.

        Raises:
            TimeoutError: It is still reading.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise TimeoutError(f"reading {self.path} ahead takes longer than {timeout_s} s")
        return self._receipt()

    def _receipt(self) -> PrefetchReceipt:
        complete = self._next >= len(self._blocks) and not self._reason
        outcome = (
            "failed" if self._reason else "cancelled" if not complete else "budget" if self._curtailed else "complete"
        )
        return PrefetchReceipt(
            path=self.path,
            budget_bytes=self._budget_bytes,
            bytes=self._read,
            seconds=self._ended - self._began,
            outcome=outcome,
            reason=self._reason,
        )

    def _run(self) -> None:
        try:
            with opened(self.path) as fd, mmap.mmap(-1, BLOCK_BYTES) as buffer, memoryview(buffer) as view:
                while (block := self._take()) is not None:
                    self._bring(fd, view, *block)
        except (OSError, NativeError) as error:
            self._reason = self._reason or str(error)
            self._cancelled.set()
        finally:
            self._ended = max(self._ended, time.monotonic())

    def _take(self) -> tuple[int, int] | None:
        with self._lock:
            if self._cancelled.is_set() or self._next >= len(self._blocks):
                return None
            self._next += 1
            return self._blocks[self._next - 1]

    def _bring(self, fd: int, view: memoryview, offset: int, length: int) -> None:
        # Reading, not POSIX_FADV_WILLNEED: that advice is silently cut to the readahead limit of the device.
        while length:
            done = os.preadv(fd, [view[:length]], offset)
            if not done:
                return
            offset, length = offset + done, length - done
            with self._lock:
                self._read += done


def prefetch(
    path: str | os.PathLike[str],
    *,
    spans: Iterable[tuple[int, int]] | None = None,
    budget_bytes: int | None = None,
    threads: int = THREADS,
) -> Prefetch:
    """Begin to read a file into the page cache.

    Args:
        path: The file; links are followed.
        spans: ``(offset, length)`` of what is wanted, most urgent first; ``None``: all of it.
        budget_bytes: Read no more than so many bytes; ``None``: as much as the spans hold.
        threads: Threads that read.

    Returns:
        The read-ahead, running.

    Raises:
        NativeError: The file cannot be opened.
    """
    with opened(path) as fd:
        size = os.fstat(fd).st_size
    wanted = [(0, size)] if spans is None else [(offset, min(length, size - offset)) for offset, length in spans]
    total = sum(max(0, length) for _, length in wanted)
    return Prefetch(path, wanted, total if budget_bytes is None else budget_bytes, threads)


def _blocks(spans: Iterable[tuple[int, int]], budget_bytes: int) -> tuple[list[tuple[int, int]], bool]:
    """Cut spans into blocks within the budget; also tell whether it ended them."""
    blocks: list[tuple[int, int]] = []
    left = budget_bytes
    for offset, length in spans:
        at, end = offset, offset + length
        while at < end:
            if not left:
                return blocks, True
            size = min(BLOCK_BYTES, end - at, left)
            blocks.append((at, size))
            at, left = at + size, left - size
    return blocks, False
