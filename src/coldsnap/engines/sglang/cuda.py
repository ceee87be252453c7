"""The device under a scheduler: what torch and SGLang are asked to do to it.

The one rule: nothing is decided here. On a processor there is no such device, and :func:`of_process` says so.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["CudaDevice", "of_process"]


class CudaDevice:
    """torch's CUDA device of this process, for graphs and communicators."""

    def __init__(self) -> None:
        import torch  # noqa: PLC0415  only the engine's environment has it

        self._torch: Any = torch

    def synchronize(self) -> None:
        """Wait for the device."""
        self._torch.cuda.synchronize()

    def forget_pool(self) -> None:
        """Forget the memory pool that all graphs of the process share."""
        from sglang.srt.model_executor.runner_utils.pool import set_global_graph_memory_pool  # noqa: PLC0415

        set_global_graph_memory_pool(None)

    def collect(self) -> None:
        """Free what nobody refers to any more."""
        gc.collect()
        self._torch.cuda.empty_cache()

    def destroy(self, group: Any) -> None:
        """End a process group."""
        self._torch.distributed.destroy_process_group(group)

    def make(self, ranks: Sequence[int]) -> Any:
        """Make a process group on devices."""
        return self._torch.distributed.new_group(list(ranks), backend="nccl")

    def groups(self) -> Iterable[Any]:
        """Return SGLang's group coordinators that live, in the order in which they were made."""
        from sglang.srt.distributed import parallel_state  # noqa: PLC0415

        found = (reference() for reference in parallel_state._groups.values())  # noqa: SLF001  there is no other list
        return [group for group in found if group is not None]


def of_process() -> CudaDevice | None:
    """Return the device of this process, None on a processor."""
    import torch  # noqa: PLC0415  only the engine's environment has it

    return CudaDevice() if torch.cuda.is_available() else None
