"""GPU memory with stable addresses, through the driver's virtual memory management.

The one rule: an address range is reserved once and freed only by ``close``; physical memory comes and goes beneath it
(CUDA driver API, "Virtual Memory Management"). Copies use a stream of their own, so that nothing waits for an engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import define

from coldsnap.errors import NativeError
from coldsnap.transfer.memory import Region
from coldsnap.transfer.native import address_of

__all__ = ["CudaMemory"]


@define
class _Backing:
    region: Region
    handle: Any | None = None
    """The physical allocation, ``None`` while released."""


class CudaMemory:
    """Regions on one CUDA device."""

    def __init__(self, device: int = 0) -> None:
        from cuda.bindings import driver  # noqa: PLC0415  optional, and absent where there is no GPU

        self.device: int | None = device
        self._api: Any = driver
        self._call("cuInit", 0)
        self._handle = self._call("cuDeviceGet", device)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._handle)
        self._backings: dict[int, _Backing] = {}
        with self:
            self._stream = self._call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._properties = self._allocation_properties()
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity_bytes = int(self._call("cuMemGetAllocationGranularity", self._properties, minimum))

    def __enter__(self) -> None:
        self._call("cuCtxPushCurrent", self._context)

    def __exit__(self, *_: object) -> None:
        self._call("cuCtxPopCurrent")

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *values = getattr(self._api, name)(*arguments)
        if int(status):
            raise NativeError(f"{name} failed on CUDA device {self.device}: {status.name}", status=int(status))
        return values[0] if len(values) == 1 else tuple(values)

    def _allocation_properties(self) -> Any:
        properties = self._api.CUmemAllocationProp()
        properties.type = self._api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.device
        return properties

    def _access(self) -> Any:
        access = self._api.CUmemAccessDesc()
        access.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.device
        access.flags = self._api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def allocate(self, size_bytes: int, *, tag: str) -> Region:
        """Reserve an address range and back it with zeros."""
        mapped_bytes = max(-(-size_bytes // self.granularity_bytes), 1) * self.granularity_bytes
        with self:
            address = int(self._call("cuMemAddressReserve", mapped_bytes, 0, 0, 0))
        region = Region(address=address, size_bytes=size_bytes, mapped_bytes=mapped_bytes, tag=tag)
        self._backings[address] = _Backing(region)
        try:
            self.remap([region])
        except NativeError:
            del self._backings[address]
            self._call("cuMemAddressFree", address, mapped_bytes)
            raise
        return region

    def regions(self, tag: str | None = None) -> tuple[Region, ...]:
        """Return the allocations with a tag, or all, in order of allocation."""
        return tuple(one.region for one in self._backings.values() if tag in (None, one.region.tag))

    def is_mapped(self, region: Region) -> bool:
        """Tell whether the region has physical memory."""
        backing = self._backings.get(region.address)
        return backing is not None and backing.handle is not None

    def release(self, regions: Iterable[Region]) -> None:
        """Give the physical memory away and keep the addresses; released ones are left alone."""
        with self:
            # Whoever still uses the memory would fault in the middle of a kernel.
            self._call("cuCtxSynchronize")
            for region in regions:
                self._unback(self._backings[region.address])

    def _unback(self, backing: _Backing) -> None:
        if backing.handle is None:
            return
        self._call("cuMemUnmap", backing.region.address, backing.region.mapped_bytes)
        handle, backing.handle = backing.handle, None
        self._call("cuMemRelease", handle)

    def remap(self, regions: Iterable[Region]) -> None:
        """Bring zeroed physical memory to the same addresses; mapped ones are left alone."""
        with self:
            for region in regions:
                backing = self._backings[region.address]
                if backing.handle is None:
                    self._back(backing)
            self._call("cuStreamSynchronize", self._stream)

    def _back(self, backing: _Backing) -> None:
        address, size = backing.region.address, backing.region.mapped_bytes
        handle = self._call("cuMemCreate", size, self._properties, 0)
        try:
            self._call("cuMemMap", address, size, 0, handle, 0)
        except NativeError:
            self._call("cuMemRelease", handle)
            raise
        backing.handle = handle
        try:
            self._call("cuMemSetAccess", address, size, [self._access()], 1)
            # The driver promises nothing about the contents of new physical memory.
            self._call("cuMemsetD8Async", address, 0, size, self._stream)
        except NativeError:
            self._unback(backing)
            raise

    def copy_from_host(self, address: int, data: memoryview) -> None:
        """Copy into a region; returns when the buffer may be reused."""
        with self:
            self._call("cuMemcpyHtoDAsync", address, data.cast("B"), data.nbytes, self._stream)
            self._call("cuStreamSynchronize", self._stream)

    def copy_to_host(self, address: int, into: memoryview) -> None:
        """Copy out of a region into a writable buffer."""
        with self:
            self._call("cuMemcpyDtoHAsync", address_of(into.cast("B")), address, into.nbytes, self._stream)
            self._call("cuStreamSynchronize", self._stream)

    def zero(self, address: int, length: int) -> None:
        """Fill a stretch of a region with zeros."""
        with self:
            self._call("cuMemsetD8Async", address, 0, length, self._stream)

    def synchronize(self) -> None:
        """Return when the device has done everything asked for."""
        with self:
            self._call("cuCtxSynchronize")

    def close(self) -> None:
        """Give everything back, addresses too."""
        with self:
            self._call("cuCtxSynchronize")
            for backing in self._backings.values():
                self._unback(backing)
                self._call("cuMemAddressFree", backing.region.address, backing.region.mapped_bytes)
            self._call("cuStreamDestroy", self._stream)
        self._backings.clear()
        self._call("cuDevicePrimaryCtxRelease", self._handle)
