"""The models of a scheduler, as SGLang loads them, and the hooks on what happens to their memory.

The one rule: a model is taken when its load has ended, and the memory of the process with the first of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from coldsnap.engines.sglang.boundary import Boundary
from coldsnap.engines.sglang.hooking import Hook
from coldsnap.engines.sglang.memory import of_process
from coldsnap.engines.sglang.scheduler import Scheduler
from coldsnap.engines.sglang.worker import Resident, nowhere
from coldsnap.engines.weights.hooks import Hooks

__all__ = ["Arrivals"]

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"


class Arrivals:
    """The models of a scheduler, as they come.

    Args:
        resident: Who takes them.
        boundary: Where their memory changes hands.
        scheduler: Whose they are.
    """

    def __init__(self, resident: Resident, boundary: Boundary, scheduler: Scheduler) -> None:
        self._resident = resident
        self._boundary = boundary
        self._scheduler = scheduler

    def hooks(self) -> tuple[Hook, ...]:
        """Return what is hooked."""
        return (
            Hook(target=f"{_RUNNER}.load_model", wrapper=self._loaded),
            Hook(
                target=f"{_UPDATER}.release_memory_occupation",
                wrapper=self._boundary.release,
                parameters=("recv_req",),
            ),
            Hook(
                target=f"{_UPDATER}.resume_memory_occupation", wrapper=self._boundary.resume, parameters=("recv_req",)
            ),
        )

    def digests(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer with the digest of each parameter and buffer, of all models by role."""
        if not self._resident.models:
            return {"skipped": True}
        from torch.nn import ModuleDict  # noqa: PLC0415

        from coldsnap.engines.weights.digests import digests_of  # noqa: PLC0415  torch is there once a model is

        if self._resident.memory is not None:
            self._resident.require_mapped()
        return digests_of(lambda: ModuleDict(self._resident.models))(request)

    def _loaded(self, original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(runner, *args, **kwargs)
        path = str(runner.model_config.model_path)
        role = self._resident.add_model(runner.model, draft=bool(runner.is_draft_worker), path=path)
        self._scheduler.runners[role] = runner
        if runner.memory_saver_adapter.enabled and self._resident.memory is None:
            self._settle_in()
        _log(f"has the {role} model{'' if self._resident.memory else ', in memory that cannot be released'}")
        return result

    def _settle_in(self) -> None:
        import torch.distributed as dist  # noqa: PLC0415

        saver = of_process(asleep=lambda: self._boundary.asleep)
        self._resident.settle_in(
            saver,
            rank=dist.get_rank(),
            pause=self._boundary.pause,
            resume=self._boundary.resume_tags,
            hooks=Hooks(before_release=self._before_release),
            vacant=getattr(saver, "vacant", nowhere),  # only a device's allocator has any
        )

    def _before_release(self) -> None:
        self._resident.require_mapped()
        self._scheduler.require_replaceable()
        self._scheduler.settle()


def _log(message: str) -> None:
    # One write for a whole line: the processes of an engine share their log.
    sys.stderr.write(f"[coldsnap] worker {os.getpid()}: {message}\n")
    sys.stderr.flush()
