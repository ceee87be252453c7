"""GPU memory of a throw-away process, in each of the ways that the drivers rely on.

The one rule: every method writes a known pattern, does one thing, and says the digest of what is there afterwards.
"""

from __future__ import annotations

import hashlib
from typing import Any

from coldsnap.host.canary import SIZE_BYTES, pattern
from coldsnap.host.cuda import Cuda

IPC_HANDLE_BYTES = 64
VMM_ALIGNMENT_BYTES = 1 << 21


class CudaMemory:
    """The primary context of device 0 and one classic allocation in it."""

    def __init__(self) -> None:
        self.cuda = Cuda()
        self.device = self.cuda.call("cuDeviceGet", 0)
        self.cuda.call("cuCtxSetCurrent", self.cuda.call("cuDevicePrimaryCtxRetain", self.device))
        self.address = self.cuda.call("cuMemAlloc", SIZE_BYTES)
        self._write(self.address, pattern(2))

    def _write(self, address: Any, data: bytes) -> None:
        self.cuda.call("cuMemcpyHtoD", address, data, len(data))

    def _digest(self, address: Any, size_bytes: int = SIZE_BYTES) -> str:
        buffer = bytearray(size_bytes)
        self.cuda.call("cuMemcpyDtoH", buffer, address, size_bytes)
        return hashlib.sha256(buffer).hexdigest()

    def classic(self) -> str:
        """Digest the classic allocation."""
        return self._digest(self.address)

    def again(self) -> str:
        """Allocate, write, read and free anew: the context still works."""
        address = self.cuda.call("cuMemAlloc", SIZE_BYTES)
        try:
            self._write(address, pattern(3))
            return self._digest(address)
        finally:
            self.cuda.call("cuMemFree", address)

    def ipc_export(self) -> str:
        """Return the classic allocation's IPC handle, hexadecimal."""
        handle = self.cuda.call("cuIpcGetMemHandle", self.address)
        # The binding shows the opaque structure by address only.
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            memory.seek(int(handle.getPtr()))
            return bytes(memory.read(IPC_HANDLE_BYTES)).hex()

    def ipc_import(self, text: str) -> str:
        """Open another process's handle and digest what it sees there."""
        handle = self.cuda.api.CUipcMemHandle()
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(int(handle.getPtr()))
            memory.write(bytes.fromhex(text))
        lazily = self.cuda.api.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        address = self.cuda.call("cuIpcOpenMemHandle", handle, int(lazily))
        try:
            return self._digest(address)
        finally:
            self.cuda.call("cuIpcCloseMemHandle", address)

    def vmm(self) -> str:
        """Map physical memory, give its address range back, reserve that very range again and map it there.

        Returns:
            ``<digest> <address> <second address>``; a driver that places the range elsewhere shows it.
        """
        call, api = self.cuda.call, self.cuda.api
        properties = self._vmm_properties()
        grain = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        size = max(int(call("cuMemGetAllocationGranularity", properties, grain)), VMM_ALIGNMENT_BYTES)
        first = int(call("cuMemAddressReserve", size, 0, 0, 0))
        handle = call("cuMemCreate", size, properties, 0)
        self._map(first, size, handle)
        self._write(api.CUdeviceptr(first), pattern(4))
        call("cuMemUnmap", api.CUdeviceptr(first), size)
        call("cuMemAddressFree", api.CUdeviceptr(first), size)
        second = int(call("cuMemAddressReserve", size, 0, api.CUdeviceptr(first), 0))
        self._map(second, size, handle)
        digest = self._digest(api.CUdeviceptr(second))
        call("cuMemUnmap", api.CUdeviceptr(second), size)
        call("cuMemAddressFree", api.CUdeviceptr(second), size)
        call("cuMemRelease", handle)
        return f"{digest} {first:#x} {second:#x}"

    def _vmm_properties(self) -> Any:
        api = self.cuda.api
        properties = api.CUmemAllocationProp()
        properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = int(self.device)
        return properties

    def _map(self, address: int, size_bytes: int, handle: Any) -> None:
        api = self.cuda.api
        self.cuda.call("cuMemMap", api.CUdeviceptr(address), size_bytes, 0, handle, 0)
        access = api.CUmemAccessDesc()
        access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = int(self.device)
        access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.cuda.call("cuMemSetAccess", api.CUdeviceptr(address), size_bytes, [access], 1)
