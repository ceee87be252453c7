"""A CUDA driver for tests of the probes: the same calls, memory in Python, states in a shared directory.

``FAKE_CUDA`` names the directory, ``FAKE_CUDA_FAULT`` one thing that goes wrong.
"""

import ctypes
import enum
import os
from pathlib import Path

SHARED = Path(os.environ["FAKE_CUDA"])
FAULT = os.environ.get("FAKE_CUDA_FAULT", "")


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_ILLEGAL_STATE = 401
    CUDA_ERROR_NOT_READY = 600


class CUdevice_attribute(enum.IntEnum):
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76


class CUprocessState(enum.IntEnum):
    CU_PROCESS_STATE_RUNNING = 0
    CU_PROCESS_STATE_LOCKED = 1
    CU_PROCESS_STATE_CHECKPOINTED = 2


class CUmemAllocationType(enum.IntEnum):
    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class CUmemLocationType(enum.IntEnum):
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemAccess_flags(enum.IntEnum):
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class CUmemAllocationGranularity_flags(enum.IntEnum):
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0


class CUipcMem_flags(enum.IntEnum):
    CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1


class CUcheckpointLockArgs:
    timeoutMs = 0


class _Location:
    type = id = None


class CUmemAllocationProp:
    def __init__(self):
        self.type, self.location = None, _Location()


class CUmemAccessDesc:
    def __init__(self):
        self.flags, self.location = None, _Location()


class CUipcMemHandle:
    def __init__(self):
        self.buffer = ctypes.create_string_buffer(64)

    def getPtr(self):
        return ctypes.addressof(self.buffer)


class _Uuid:
    bytes = bytes(range(16))


def CUdeviceptr(value):
    return int(value)


OK = CUresult.CUDA_SUCCESS
memory, mapped, physical = {}, {}, {}
next_address = [1 << 32]


def _reserve(size):
    next_address[0] += 1 << 24
    return next_address[0]


def _store(address):
    return physical[mapped[address]] if address in mapped else memory[address]


def cuInit(flags):
    assert flags == 0
    return (CUresult.CUDA_ERROR_NO_DEVICE if FAULT == "no device" else OK,)


def cuDriverGetVersion():
    return OK, 13010


def cuDeviceGetCount():
    return OK, 1


def cuDeviceGet(index):
    return OK, index


def cuDeviceGetAttribute(attribute, device):
    return OK, 9 if attribute == CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR else 0


def cuDeviceGetUuid(device):
    return OK, _Uuid()


def cuDeviceGetName(length, device):
    return OK, b"Fake GPU".ljust(length, b"\0")


def cuDeviceTotalMem(device):
    return OK, (140 << 30) - 12345


def cuDevicePrimaryCtxRetain(device):
    return OK, "context"


def cuCtxSetCurrent(context):
    return (OK,)


def cuMemAlloc(size):
    address = _reserve(size)
    memory[address] = bytearray(size)
    return OK, address


def cuMemFree(address):
    del memory[address]
    return (OK,)


def cuMemcpyHtoD(address, data, size):
    _store(address)[:size] = data[:size]
    return (OK,)


def cuMemcpyDtoH(buffer, address, size):
    buffer[:] = _store(address)[:size]
    if (SHARED / f"lost-{os.getpid()}").exists():
        buffer[0] ^= 1
    return (OK,)


def cuIpcGetMemHandle(address):
    handle = CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), os.getpid().to_bytes(8, "little"), 8)
    (SHARED / f"ipc-{os.getpid()}").write_bytes(memory[address])
    return OK, handle


def cuIpcOpenMemHandle(handle, flags):
    if FAULT == "ipc":
        return CUresult.CUDA_ERROR_ILLEGAL_STATE, None
    address = _reserve(0)
    memory[address] = bytearray((SHARED / f"ipc-{int.from_bytes(handle.buffer.raw[:8], 'little')}").read_bytes())
    return OK, address


def cuIpcCloseMemHandle(address):
    return cuMemFree(address)


def cuMemGetAllocationGranularity(properties, option):
    assert properties.location.type == CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    return OK, 1 << 21


def cuMemAddressReserve(size, alignment, address, flags):
    return OK, _reserve(size) if not address or FAULT == "moved" else address


def cuMemCreate(size, properties, flags):
    physical[len(physical) + 1] = bytearray(size)
    return OK, len(physical)


def cuMemMap(address, size, offset, handle, flags):
    mapped[address] = handle
    return (OK,)


def cuMemSetAccess(address, size, descriptions, count):
    assert len(descriptions) == count
    return (OK,)


def cuMemUnmap(address, size):
    del mapped[address]
    return (OK,)


def cuMemAddressFree(address, size):
    return (OK,)


def cuMemRelease(handle):
    return (OK,)


def _state(pid):
    path = SHARED / f"state-{pid}"
    return CUprocessState(int(path.read_text())) if path.exists() else CUprocessState.CU_PROCESS_STATE_RUNNING


def _step(pid, before, after):
    if _state(pid) != before:
        return (CUresult.CUDA_ERROR_ILLEGAL_STATE,)
    (SHARED / f"state-{pid}").write_text(str(int(after)))
    return (OK,)


def cuCheckpointProcessGetState(pid):
    return OK, _state(pid)


def cuCheckpointProcessGetRestoreThreadId(pid):
    return OK, 1 if FAULT == "thread" else pid


def cuCheckpointProcessLock(pid, arguments):
    if FAULT == "lock":
        return (CUresult.CUDA_ERROR_NOT_READY,)
    assert arguments.timeoutMs > 0
    return _step(pid, 0, 1)


def cuCheckpointProcessCheckpoint(pid, arguments):
    return _step(pid, 1, 1 if FAULT == "stuck" else 2)


def cuCheckpointProcessRestore(pid, arguments):
    if FAULT == "lost":
        (SHARED / f"lost-{pid}").touch()
    return _step(pid, 2, 1)


def cuCheckpointProcessUnlock(pid, arguments):
    return _step(pid, 1, 0)
