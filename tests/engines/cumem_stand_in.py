"""A GPU's memory played by host mappings at fixed addresses, beneath vLLM's real ``CuMemAllocator``.

Replaced is the lowest layer alone: the extension with ``create_and_map`` and ``unmap_and_release``, the runtime
library, the few functions of torch that need a device, and the answer which platform it is. Everything above runs as it
is: vLLM's ``cumem.py``, its tables, and the code under test.

The one rule: it is as strict as a driver. What has no backing cannot be touched, mapping twice fails, new memory holds
garbage, and a call on the wrong device is refused.
"""

import ctypes
import importlib
import mmap
import sys
import threading
import types

GRANULARITY = 2 << 20
GARBAGE = 0xCD

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]

RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
FIXED = 0x10
PROT_NONE = 0


def pages(address, size, protection, flags):
    got = libc.mmap(address, size, protection, flags, -1, 0)
    if got in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    return got


class Device:
    """One device: an ordinal, a capacity, reserved ranges and their backing."""

    def __init__(self, ordinal=1, capacity=1 << 40):
        self.ordinal, self.capacity = ordinal, capacity
        self.reserved, self.backed, self.blocks = {}, {}, {}
        self.calls, self.synchronized, self.fail_access = [], 0, 0
        self.thread = threading.local()

    @property
    def used(self):
        return sum(self.backed.values())

    def malloc(self, allocator, size):
        """Do what the extension's ``my_malloc`` does: reserve, tell the allocator, back."""
        size = -(-size // GRANULARITY) * GRANULARITY
        start = pages(None, size + GRANULARITY, PROT_NONE, RESERVED)
        address = -(-start // GRANULARITY) * GRANULARITY
        self.reserved[address] = size
        handle = (self.ordinal, size, address, 0x1000 + len(self.reserved))
        allocator.python_malloc_callback(handle)
        self.create_and_map(*handle)
        return address

    def create_and_map(self, device, size, address, _handle):
        self.calls.append(("map", address))
        assert device == self.ordinal and self.reserved[address] == size
        if self.used + size > self.capacity:
            raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:128")
        if address in self.backed:
            raise RuntimeError("CUDA Error: invalid argument at cumem_allocator.cpp:132")
        pages(address, size, mmap.PROT_READ | mmap.PROT_WRITE, RESERVED | FIXED)
        ctypes.memset(address, GARBAGE, size)
        self.backed[address] = size
        if self.fail_access:
            self.fail_access -= 1
            raise RuntimeError("CUDA Error: unknown error at cumem_allocator.cpp:160")

    def unmap_and_release(self, device, size, address, _handle):
        self.calls.append(("unmap", address))
        assert device == self.ordinal
        if address not in self.backed:
            raise RuntimeError("CUDA Error: invalid argument at cumem_allocator.cpp:185")
        pages(address, size, PROT_NONE, RESERVED | FIXED)
        del self.backed[address]

    # The runtime library.

    def cudaMemset(self, address, value, size):
        self.reach(address, size)
        ctypes.memset(address, value, size)

    def cudaMemcpy(self, destination, source, size):
        self.reach(destination, size)
        self.reach(source, size)
        ctypes.memmove(destination, source, size)

    def reach(self, address, size):
        if getattr(self.thread, "current", 0) != self.ordinal:
            raise RuntimeError(f"CUDART error: this thread is on device {getattr(self.thread, 'current', 0)}")
        for base, length in self.reserved.items():
            if base < address + size and address < base + length and base not in self.backed:
                raise RuntimeError("CUDART error: invalid argument")

    # torch.

    def set_device(self, ordinal):
        self.thread.current = ordinal

    def synchronize(self, _ordinal=None):
        self.synchronized += 1

    def snapshot(self):
        """Return what torch's caching allocator would: each backed range a segment, with the blocks that a test set."""
        return [
            {"address": address, "total_size": size, "blocks": self.blocks.get(address, [])}
            for address, size in self.reserved.items()
        ]


def install(device):
    """Put the device beneath vLLM and torch, and import vLLM's allocator over it."""
    import torch
    from vllm.distributed.device_communicators import cuda_wrapper

    extension = types.ModuleType("vllm.cumem_allocator")
    extension.init_module = lambda malloc, free: None
    extension.python_create_and_map = device.create_and_map
    extension.python_unmap_and_release = device.unmap_and_release
    sys.modules["vllm.cumem_allocator"] = extension
    cuda_wrapper.CudaRTLibrary = lambda: device
    torch.cuda.set_device = device.set_device
    torch.cuda.synchronize = device.synchronize
    torch.cuda.memory_snapshot = device.snapshot
    torch.accelerator.synchronize = device.synchronize
    torch.accelerator.empty_cache = lambda: None
    device.set_device(device.ordinal)
    cumem = importlib.import_module("vllm.device_allocator.cumem")
    assert cumem.cumem_available and cumem.libcudart is device
    sys.modules["vllm.device_allocator"].get_mem_allocator_instance = cumem.CuMemAllocator.get_instance
    return cumem


def tensor_at(address, count, dtype):
    """Return a tensor that lies at an address, as torch's own do on a device."""
    import torch

    size = count * torch.empty((), dtype=dtype).element_size()
    return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=dtype)


class Tagged:
    """Allocations under a tag, as ``use_memory_pool`` of vLLM makes them."""

    def __init__(self, allocator, tag):
        self.allocator, self.tag = allocator, tag

    def __enter__(self):
        self.before, self.allocator.current_tag = self.allocator.current_tag, self.tag

    def __exit__(self, *_):
        self.allocator.current_tag = self.before
