"""What a scheduler is and runs on: its identity, its graphs, its communicators.

The one rule: on a processor there are no graphs and no communicators, and every step about them does nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from coldsnap.engines.sglang import cuda
from coldsnap.engines.sglang.graphs import Graphs
from coldsnap.engines.sglang.nccl import Communicators
from coldsnap.engines.sglang.worker import Resident

__all__ = ["Scheduler"]


class Scheduler:
    """The scheduler of this process.

    Args:
        resident: Knows the worker's name.

    Attributes:
        runners: SGLang's model runners, by the role of their model.
    """

    def __init__(self, resident: Resident) -> None:
        self._resident = resident
        self.runners: dict[str, Any] = {}

    @functools.cached_property
    def _both(self) -> tuple[Graphs, Communicators] | None:
        import torch.distributed as dist  # noqa: PLC0415  only the engine's environment has it

        device = cuda.of_process()
        if device is None:
            return None
        graphs = Graphs(runners=lambda: self.runners, workers=dist.get_world_size, device=device)
        return graphs, Communicators(groups=device.groups, transport=device)

    def identity(self) -> Mapping[str, Any]:
        """Describe the scheduler."""
        from coldsnap.engines.sglang.identity import identity_of  # noqa: PLC0415  torch is there once a model is

        return identity_of(self.runners["target"], worker=self._resident.name, rank=self._resident.rank)

    def identify(self, _request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer with what the scheduler is, and the digest of that."""
        if "target" not in self.runners:
            return {"skipped": True}
        from coldsnap.engines.sglang.identity import digest_of  # noqa: PLC0415

        identity = self.identity()
        return {"identity": identity, "identity_sha256": digest_of(identity)}

    def settle(self) -> None:
        """Wait for the device, and free what nobody needs, while everything still has its backing."""
        if device := cuda.of_process():
            device.synchronize()
            device.collect()

    def require_replaceable(self) -> None:
        """Demand that what would be destroyed can be made again."""
        if self._both:
            self._both[0].require_replaceable()

    def discard_graphs(self) -> None:
        """Destroy the graphs."""
        if self._both:
            self._both[0].discard()

    def capture_graphs(self) -> None:
        """Capture them again."""
        if self._both:
            self._both[0].capture()

    def end_communicators(self) -> None:
        """End the communicators."""
        if self._both:
            self._both[1].prepare()

    def begin_communicators(self) -> None:
        """Begin them again."""
        if self._both:
            self._both[1].restore()
