"""A cap on the KV cache that vLLM chooses by itself.

vLLM 0.26 sizes the cache by torch's own accounting, which does not see what its sleep-mode allocator holds; the sum may
promise more than the device has, and the promise is found out only when everything is asleep and comes back.

The one rule: only a size that vLLM chose is made smaller, and never one that the user gave.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from coldsnap.engines.settings import setting

__all__ = ["guard", "is_on", "largest_bytes"]

Log = Callable[[str], None]


def is_on(environ: Mapping[str, str] | None = None) -> bool:
    """Tell whether the guard is wanted: as asked for by name, else with the override of vLLM's sleep backend.

    Args:
        environ: Defaults to the process's own environment.
    """
    asked = setting("COLDSNAP_KV_CAPACITY_GUARD", environ) or setting("COLDSNAP_VLLM_OVERRIDE_CUMEM", environ)
    return asked == "1"


def guard(worker_class: Any, *, log: Log, free_bytes: Callable[[], int]) -> None:
    """Have a worker class cap what it finds available.

    Args:
        worker_class: vLLM's ``Worker``.
        log: Takes a sentence when a size was made smaller.
        free_bytes: Returns how much memory the device has free.
    """
    original = worker_class.determine_available_memory

    @functools.wraps(original)
    def determine_available_memory(self: Any) -> int:
        available = int(original(self))
        if self.cache_config.kv_cache_memory_bytes:
            return available
        most = largest_bytes(self, free_bytes)
        if available <= most:
            return available
        log(f"the KV cache gets {most:,} bytes; vLLM chose {available:,}, more than the device has left")
        return most

    worker_class.determine_available_memory = determine_available_memory


def largest_bytes(worker: Any, free_bytes: Callable[[], int]) -> int:
    """Return what may be used, less what the worker holds already and what a step needs beyond that.

    Args:
        worker: vLLM's worker, after its memory was profiled.
        free_bytes: Returns how much memory the device has free; used where the worker does not say what it holds.
    """
    consumed = getattr(worker, "total_consumed", None)
    if consumed is None:
        consumed = int(worker.init_snapshot.free_memory) - free_bytes()
    return int(worker.requested_memory) - int(consumed) - int(worker.peak_activation_memory)
