"""The processors of this process, and work spread over them.

The one rule: results come in the order of the items, whoever worked on them.
"""

from __future__ import annotations

import os
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
    """Apply ``work`` to every item on all cores (hashing releases the GIL), in order of the items."""
    queue = list(items)
    count = min(threads or available_cores(), len(queue))
    if count <= 1:
        return [work(item) for item in queue]
    with ThreadPoolExecutor(count, thread_name_prefix="coldsnap-hash") as pool:
        return list(pool.map(work, queue))
