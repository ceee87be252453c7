"""The processors of this process, and work spread over them.

The one rule: results come in the order of the items, whoever worked on them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["available_cores", "in_threads"]

_T = TypeVar("_T")
_R = TypeVar("_R")


def available_cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0))


def in_threads(work: Callable[[_T], _R], items: Iterable[_T], *, threads: int | None = None) -> list[_R]:
    """Apply ``work`` to every item on all cores (hashing releases the GIL), in order of the items.

    The caller's thread is one of those that work: starting one costs as much as hashing a megabyte.

    Raises:
        Exception: What ``work`` raised for one of the items; no further one is begun.
    """
    queue = list(items)
    numbers = iter(range(len(queue)))  # the interpreter's lock makes each number go to one thread
    done: dict[int, _R] = {}
    failed = threading.Event()

    def take() -> None:
        try:
            for number in numbers:
                done[number] = work(queue[number])
                if failed.is_set():
                    return
        except BaseException:
            failed.set()
            raise

    others = min(threads or available_cores(), len(queue)) - 1
    if others < 1:
        take()
    else:
        with ThreadPoolExecutor(others, thread_name_prefix="coldsnap-hash") as pool:
            running = [pool.submit(take) for _ in range(others)]
            take()
        for one in running:
            one.result()
    return [done[number] for number in sorted(done)]
