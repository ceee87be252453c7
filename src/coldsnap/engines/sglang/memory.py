"""The memory saver's allocations, as memory whose addresses stay while its backing comes and goes.

SGLang's saver takes and gives whole tags, at SGLang's own boundary, in every rank at once. So this memory does not
move backing itself: it asks the boundary to, and knows what lies where.

The one rule: what SGLang's saver holds is told by the saver, never guessed from tensors; a tag is mapped until SGLang
has paused it, and asleep until SGLang has resumed it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from coldsnap.errors import ContractError
from coldsnap.transfer.memory import PreservedMemory, Region

__all__ = ["KV_CACHE", "WEIGHTS", "AtBoundary", "Move", "of_process"]

WEIGHTS = "weights"
KV_CACHE = "kv_cache"

Move = Callable[[Sequence[str]], None]
"""Has SGLang pause, or resume, tags."""


class AtBoundary:
    """Memory whose backing SGLang moves.

    Args:
        saver: Where the allocations are; what it is asked to move, it says is moved already.
        pause: Has SGLang take the backing of tags away.
        resume: Has SGLang bring it back.

    Attributes:
        device: CUDA ordinal of the addresses, None on a processor.
    """

    def __init__(self, saver: PreservedMemory, *, pause: Move, resume: Move) -> None:
        self._saver = saver
        self._pause = pause
        self._resume = resume
        self.device: int | None = saver.device

    def regions(self, tag: str | None = None) -> tuple[Region, ...]:
        """Return the allocations with a tag, or those of weights and KV cache, in order of allocation."""
        wanted = (WEIGHTS, KV_CACHE) if tag is None else (tag,)
        return tuple(region for region in self._saver.regions() if region.tag in wanted)

    def is_mapped(self, region: Region) -> bool:
        """Tell whether the region has backing."""
        return self._saver.is_mapped(region)

    def release(self, regions: Iterable[Region]) -> None:
        """Have the backing of everything with the regions' tags taken away."""
        self._move(self._pause, regions)

    def remap(self, regions: Iterable[Region]) -> None:
        """Have zeroed backing brought to everything with the regions' tags."""
        found = tuple(regions)
        self._move(self._resume, found)
        for region in found:
            # The driver promises nothing about new physical memory, and what was zero is in no file. Whoever brings a
            # KV cache back clears it himself.
            if region.tag == WEIGHTS:
                self._saver.zero(region.address, region.size_bytes)

    def _move(self, move: Move, regions: Iterable[Region]) -> None:
        if tags := sorted({region.tag for region in regions}, key=lambda tag: (tag != WEIGHTS, tag)):
            move(tags)

    def copy_from_host(self, address: int, data: memoryview) -> None:
        """Copy into a region."""
        self._saver.copy_from_host(address, data)

    def copy_to_host(self, address: int, into: memoryview) -> None:
        """Copy out of a region into a writable buffer."""
        self._saver.copy_to_host(address, into)

    def zero(self, address: int, length: int) -> None:
        """Fill a stretch of a region with zeros."""
        self._saver.zero(address, length)

    def synchronize(self) -> None:
        """Return when everything asked for has happened."""
        self._saver.synchronize()


def of_process(*, asleep: Callable[[], Iterable[str]]) -> PreservedMemory:
    """Return the memory saver's allocations in this process.

    Args:
        asleep: The tags that SGLang has paused.

    Raises:
        ContractError: The saver is none that tells where its allocations are.
    """
    import torch_memory_saver  # noqa: PLC0415  only the engine's environment has it

    saver: Any = torch_memory_saver.torch_memory_saver
    if hasattr(saver, "memory"):
        memory: PreservedMemory = saver.memory  # the stand-in on a processor
        return memory
    if getattr(saver, "_impl", None) is None or not hasattr(saver._impl, "_mem_pools"):  # noqa: SLF001
        raise ContractError("torch_memory_saver keeps no memory pools by tag: launch SGLang with --enable-memory-saver")
    from coldsnap.engines.sglang.saver import SaverMemory  # noqa: PLC0415  only on a GPU

    return SaverMemory(saver, asleep=asleep)
