"""What the plugin puts into a process that may hold a vLLM worker.

The one rule: nothing of vLLM is imported here that the process would not import anyway.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from coldsnap.engines.ordered import ordered
from coldsnap.engines.rank import Operation
from coldsnap.engines.settings import setting
from coldsnap.engines.vllm.imports import after_import
from coldsnap.engines.vllm.load_format import MODEL_LOADER, register_load_format
from coldsnap.engines.vllm.loading import DEFAULT_LOADER, is_asked_for, loads
from coldsnap.engines.vllm.startup_plan import STARTUP_PLAN, startup_plan
from coldsnap.engines.vllm.worker import resident

__all__ = ["SLEEP_BACKEND", "hook_worker", "register_sleep_backend"]

GPU_WORKER = "vllm.v1.worker.gpu_worker"
SLEEP_BACKEND = "coldsnap_disk"


def hook_worker() -> Mapping[str, Operation]:
    """Wait for vLLM's worker and for the load of its model, and return what the rank answers for them."""
    register_sleep_backend()
    after_import(GPU_WORKER, _watch)
    after_import(STARTUP_PLAN, lambda module: startup_plan.watch(module, log=_log))
    if is_asked_for() or ordered.exports():
        after_import(DEFAULT_LOADER, loads.watch)
    after_import(MODEL_LOADER, register_load_format)
    about_models = {**loads.operations(), "digests": _digests}
    return {
        **resident.operations(),
        **ordered.operations(),
        **startup_plan.operations(),
        **{name: resident.when_mapped(operation) for name, operation in about_models.items()},
    }


def register_sleep_backend() -> None:
    """Make the sleep backend known to vLLM by name, and the default where the override is set."""
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory  # noqa: PLC0415

    SleepModeBackendFactory.register_backend(SLEEP_BACKEND, "coldsnap.engines.vllm.sleep", "DiskSleepBackend")
    if setting("COLDSNAP_VLLM_OVERRIDE_CUMEM") == "1":
        registry = SleepModeBackendFactory._registry  # noqa: SLF001  register_backend refuses a name that is taken
        registry["cumem"] = registry[SLEEP_BACKEND]


def _digests(request: Mapping[str, Any]) -> Mapping[str, Any]:
    if resident.model() is None:
        return {"skipped": True}
    from coldsnap.engines.weights.digests import digests_of  # noqa: PLC0415  torch is there once a model is

    return digests_of(resident.model)(request)


def _watch(module: ModuleType) -> None:
    resident.watch(module, settle=loads.settle, log=_log)


def _log(message: str) -> None:
    # One write for a whole line: the processes of an engine share their log.
    sys.stderr.write(f"[coldsnap] worker {os.getpid()}: {message}\n")
    sys.stderr.flush()
