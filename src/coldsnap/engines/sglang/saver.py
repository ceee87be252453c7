"""``torch_memory_saver`` on a GPU: where its allocations are, and their contents.

The saver reserves an address range for each segment that torch's allocator asks the driver for inside a region, in a
memory pool for each tag, and takes or gives the physical memory of a whole tag.

The one rule: this class moves no backing; SGLang does, by its saver. It copies, clears and tells.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

from coldsnap.errors import NativeError
from coldsnap.transfer.memory import Region

__all__ = ["SaverMemory"]


class SaverMemory:
    """The allocations of the memory saver on the device of this process.

    Args:
        saver: ``torch_memory_saver.torch_memory_saver``.
        asleep: The tags that SGLang has paused.
        torch: The module; imported when not given.

    Attributes:
        device: CUDA ordinal.
    """

    def __init__(self, saver: Any, *, asleep: Callable[[], Iterable[str]], torch: Any = None) -> None:
        self._saver = saver
        self._asleep = asleep
        self._torch = torch or importlib.import_module("torch")  # only the engine's environment has it
        self.device: int | None = int(self._torch.cuda.current_device())
        self._known: dict[str, tuple[Region, ...]] = {}

    def regions(self, tag: str | None = None) -> tuple[Region, ...]:
        """Return the segments with a tag, or all, in the order of their addresses."""
        found = {key[0] for key in self._pools()}
        return tuple(region for one in sorted(found) if tag in (None, one) for region in self._of(one))

    def _pools(self) -> dict[Any, Any]:
        pools: dict[Any, Any] = self._saver._impl._mem_pools  # noqa: SLF001  it has no list of its own
        return pools

    def _of(self, tag: str) -> tuple[Region, ...]:
        # While a tag sleeps its segments are what they were: torch is not asked for memory that has no backing.
        if tag not in self._asleep() or tag not in self._known:
            self._known[tag] = tuple(self._segments(tag))
        return self._known[tag]

    def _segments(self, tag: str) -> list[Region]:
        # A pool's own snapshot would be of its pool alone; torch 2.11 has it, earlier ones the list of all segments.
        ids = {tuple(pool.id) for key, pool in self._pools().items() if key[0] == tag}
        segments = [one for one in self._torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) in ids]
        return [
            Region(address=one["address"], size_bytes=one["total_size"], mapped_bytes=one["total_size"], tag=tag)
            for one in sorted(segments, key=lambda one: int(one["address"]))
            if one["device"] == self.device
        ]

    def vacant(self, tag: str) -> tuple[tuple[int, int], ...]:
        """Return where in the segments with a tag torch's allocator has nothing: address and size."""
        bases = {region.address for region in self.regions(tag)}
        segments = [one for one in self._torch.cuda.memory_snapshot() if one["address"] in bases]
        return tuple(
            (block["address"], block["size"])
            for segment in segments
            for block in segment["blocks"]
            if block["state"] == "inactive"
        )

    def is_mapped(self, region: Region) -> bool:
        """Tell whether SGLang has left the region its backing."""
        return region.tag not in self._asleep()

    def release(self, regions: Iterable[Region]) -> None:
        """Refuse: SGLang takes the backing of whole tags.

        Raises:
            NativeError: Always.
        """
        raise NativeError(f"SGLang alone takes memory away, {len(tuple(regions))} regions at once")

    def remap(self, regions: Iterable[Region]) -> None:
        """Refuse, for the same reason.

        Raises:
            NativeError: Always.
        """
        raise NativeError(f"SGLang alone brings memory back, {len(tuple(regions))} regions at once")

    def copy_from_host(self, address: int, data: memoryview) -> None:
        """Copy into a region; returns when the buffer may be reused."""
        view = data.cast("B")
        # torch makes no tensor of a read-only buffer.
        source = view if not view.readonly else bytearray(view)
        self._at(address, view.nbytes).copy_(self._torch.frombuffer(source, dtype=self._torch.uint8))
        self._torch.cuda.current_stream(self.device).synchronize()

    def copy_to_host(self, address: int, into: memoryview) -> None:
        """Copy out of a region into a writable buffer."""
        view = into.cast("B")
        self._torch.frombuffer(view, dtype=self._torch.uint8).copy_(self._at(address, view.nbytes))

    def zero(self, address: int, length: int) -> None:
        """Fill a stretch of a region with zeros."""
        self._at(address, length).zero_()

    def synchronize(self) -> None:
        """Return when the device has done everything asked for."""
        self._torch.cuda.synchronize(self.device)

    def _at(self, address: int, length: int) -> Any:
        return self._torch.as_tensor(_Bytes(address, length), device=f"cuda:{self.device}")


class _Bytes:
    """Device memory that torch may look at without owning it (the CUDA array interface, version 3)."""

    def __init__(self, address: int, length: int) -> None:
        self.__cuda_array_interface__ = {"shape": (length,), "typestr": "|u1", "data": (address, False), "version": 3}
