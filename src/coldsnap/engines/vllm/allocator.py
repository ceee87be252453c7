"""vLLM's own allocator, seen as memory whose addresses stay while its backing comes and goes.

vLLM allocates weights and the KV cache through ``CuMemAllocator``: every segment has a reserved address range, and
``pointer_to_data`` says of each whether it has physical memory. This class moves the backing with vLLM's own two
functions and keeps vLLM's own flag, so that vLLM's sleep, wake-up and accounting see what is true.

The one rule: ``is_asleep`` of vLLM's table is the only record of what is mapped. It changes after the driver has done
its part and never before, so that a call that failed half-way can be made again without mapping anything twice.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

from coldsnap.engines.vllm.kv_payload import KvStorage, discardable
from coldsnap.errors import NativeError
from coldsnap.transfer.memory import Region
from coldsnap.transfer.native import address_of

__all__ = ["KV_CACHE", "WEIGHTS", "CumemMemory"]

WEIGHTS = "weights"
KV_CACHE = "kv_cache"

# Everything else that vLLM puts into this allocator (runtime state, scratch space, CUDA graph pools) keeps its backing:
# the CUDA checkpoint saves it, and nobody else could fill it again.
TAGS = (WEIGHTS, KV_CACHE)

UNUSED = "inactive"
"""State of a block in torch's snapshot of its caching allocator that holds no tensor and waits for nothing."""


class CumemMemory:
    """The allocations of vLLM's allocator on one device, those of the weights and of the KV cache.

    Attributes:
        device: CUDA ordinal of the addresses.
    """

    device: int | None

    def __init__(self, module: Any, *, device: int, torch: Any, storages: Callable[[], tuple[KvStorage, ...]]) -> None:
        """Look at the allocator of this process.

        Args:
            module: ``vllm.device_allocator.cumem``.
            device: CUDA ordinal of the worker.
            torch: The module.
            storages: Returns where the engine's KV caches lie; nothing before they are made.
        """
        self.device = device
        self._module = module
        self._torch = torch
        self._storages = storages

    @classmethod
    def of_process(cls, *, device: int, storages: Callable[[], tuple[KvStorage, ...]]) -> Self:
        """Make it for the vLLM worker of this process."""
        import torch  # noqa: PLC0415  only the engine's environment has them
        from vllm.device_allocator import cumem  # noqa: PLC0415

        return cls(cumem, device=device, torch=torch, storages=storages)

    @property
    def _table(self) -> dict[int, Any]:
        table: dict[int, Any] = self._module.CuMemAllocator.get_instance().pointer_to_data
        return table

    def regions(self, tag: str | None = None) -> tuple[Region, ...]:
        """Return the allocations with a tag, or all, in order of allocation.

        An allocation that vLLM tagged as KV cache counts only when KV caches are what lies in it: vLLM 0.26 makes block
        tables and other small state under the same tag.
        """
        wanted = TAGS if tag is None else (tag,)
        storages = self._storages() if KV_CACHE in wanted else ()
        found = []
        for address, data in list(self._table.items()):
            if data.tag not in TAGS or data.tag not in wanted or data.handle[0] != self.device:
                continue
            size = int(data.handle[1])  # already rounded up to the granularity of the device
            region = Region(address=address, size_bytes=size, mapped_bytes=size, tag=data.tag)
            if data.tag != KV_CACHE or discardable(region, storages):
                found.append(region)
        return tuple(found)

    def vacant(self, tag: str) -> tuple[tuple[int, int], ...]:
        """Return where in the allocations with a tag torch's caching allocator has nothing: address and size.

        A segment is larger than the tensors in it, and what a load used for a moment (a shard of the checkpoint, say)
        stays in the pool. A block that waits for a stream before it is free counts as used.
        """
        bases = {region.address: region.size_bytes for region in self.regions(tag)}
        found = []
        for segment in self._torch.cuda.memory_snapshot():
            if bases.get(segment["address"]) == segment["total_size"]:
                found += [(block["address"], block["size"]) for block in segment["blocks"] if block["state"] == UNUSED]
        return tuple(found)

    def is_mapped(self, region: Region) -> bool:
        """Tell whether the region has physical memory."""
        data = self._table.get(region.address)
        return data is not None and not data.is_asleep

    def release(self, regions: Iterable[Region]) -> None:
        """Give the physical memory away and keep the addresses; released ones are left alone.

        Raises:
            NativeError: The driver refused, or an allocation is not there any more.
        """
        entries = [(region, self._entry(region)) for region in regions]
        self.synchronize()
        for region, data in entries:
            if not data.is_asleep:
                self._call("unmap_and_release", region, data)
                data.is_asleep = True
        self.synchronize()

    def remap(self, regions: Iterable[Region]) -> None:
        """Bring zeroed physical memory to the same addresses; mapped ones are left alone.

        Raises:
            NativeError: There is not enough memory, or the driver refused: what was mapped before stays mapped.
        """
        entries = [(region, self._entry(region)) for region in regions]
        for region, data in entries:
            if data.is_asleep:
                self._wake(region, data)
        self.synchronize()

    def _wake(self, region: Region, data: Any) -> None:
        if data.cpu_backup_tensor is not None:
            raise NativeError(
                f"vLLM itself holds a copy of the {region.tag} at {region.address:#x}: it was put to sleep by its own "
                "backend; wake it by POST /wake_up first"
            )
        try:
            self._map(region, data)
        except NativeError:
            # What torch caches without using it may be just what is missing. Only now: in a process as large as an
            # engine the search for garbage takes a quarter of a second, and a restore waits for this.
            self.settle()
            self._map(region, data)
        data.is_asleep = False
        # The driver promises nothing about the contents of new physical memory.
        self.zero(region.address, region.mapped_bytes)

    def _map(self, region: Region, data: Any) -> None:
        try:
            self._call("create_and_map", region, data)
        except NativeError:
            # The call has three steps. When only the last one failed, the range is mapped, and the next attempt would
            # find it taken; in the other cases there is nothing to undo, and the driver says so.
            with contextlib.suppress(NativeError):
                self._call("unmap_and_release", region, data)
            raise

    def copy_from_host(self, address: int, data: memoryview) -> None:
        """Copy into a region; returns when the buffer may be reused."""
        view = data.cast("B")
        self._require_mapped(address, view.nbytes)
        # A read-only view has no address that ctypes would tell.
        source = view if not view.readonly else memoryview(bytearray(view))
        self._copy(address, address_of(source), view.nbytes)

    def copy_to_host(self, address: int, into: memoryview) -> None:
        """Copy out of a region into a writable buffer."""
        view = into.cast("B")
        self._require_mapped(address, view.nbytes)
        self._copy(address_of(view), address, view.nbytes)

    def zero(self, address: int, length: int) -> None:
        """Fill a stretch of a region with zeros."""
        self._require_mapped(address, length)
        self._use_device()
        with self._told(f"clearing {length} bytes at {address:#x}"):
            self._module.libcudart.cudaMemset(address, 0, length)

    def synchronize(self) -> None:
        """Return when the device has done everything asked for."""
        self._use_device()
        with self._told("waiting for the device"):
            self._torch.cuda.synchronize(self.device)

    def settle(self) -> None:
        """Wait for the device, and free what nobody needs: unreachable tensors, and what torch keeps in reserve.

        Before a release and not after it: a segment that torch gives back must still have its backing.
        """
        self.synchronize()
        gc.collect()
        self._torch.cuda.empty_cache()

    def _copy(self, destination: int, source: int, length: int) -> None:
        self._use_device()
        with self._told(f"copying {length} bytes from {source:#x} to {destination:#x}"):
            self._module.libcudart.cudaMemcpy(destination, source, length)

    def _use_device(self) -> None:
        # Requests arrive on threads of their own, and a new thread begins with device 0.
        self._torch.cuda.set_device(self.device)

    def _entry(self, region: Region) -> Any:
        data = self._table.get(region.address)
        if data is None or int(data.handle[1]) != region.mapped_bytes or data.tag != region.tag:
            raise NativeError(
                f"vLLM no longer has the allocation of {region.mapped_bytes} bytes of {region.tag} at "
                f"{region.address:#x}: the engine changed since it was released; start it anew"
            )
        return data

    def _require_mapped(self, address: int, length: int) -> None:
        for base, data in self._table.items():
            if base <= address and address + length <= base + int(data.handle[1]):
                if data.is_asleep:
                    raise NativeError(f"the {data.tag} at {base:#x} has no backing: remap it first")
                return
        raise NativeError(f"no allocation of vLLM holds {length} bytes at {address:#x}")

    def _call(self, name: str, region: Region, data: Any) -> None:
        self._use_device()
        with self._told(f"{name} of {region.mapped_bytes} bytes of {region.tag} at {region.address:#x}"):
            getattr(self._module, name)(data.handle)

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        # The extension and the runtime library raise RuntimeError with the driver's words.
        try:
            yield
        except RuntimeError as error:
            raise NativeError(f"{what} failed on CUDA device {self.device}: {error}") from error
