"""The NVIDIA driver's process checkpoint API through ``cuda-bindings``.

The one rule: no context outlives a call. CUDA is initialised, which is what takes long; a context would hold half a
gigabyte of the very device whose memory is to be restored.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

__all__ = [
    "CHECKPOINTED",
    "FAILED",
    "LOCKED",
    "RUNNING",
    "CudaDriver",
    "CudaFailure",
    "Moves",
    "open_driver",
    "restore_arguments",
]

RUNNING, LOCKED, CHECKPOINTED, FAILED = "running", "locked", "checkpointed", "failed"
_STATES = (RUNNING, LOCKED, CHECKPOINTED, FAILED)  # CUprocessState, in the order of its values


Moves = Sequence[tuple[str, str]]
"""UUID of a device before → of the one to take instead."""

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
UUID_BYTES = 16


class CudaFailure(Exception):
    """The driver refused.

    Attributes:
        status: Its number, for example 201.
    """

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class CudaDriver(Protocol):
    """The driver's process checkpoint API (CUDA driver API, section Checkpointing), pids in the helper's namespace.

    Every method raises :class:`CudaFailure` when the driver refuses.
    """

    def state(self, pid: int) -> str:
        """Return running, locked, checkpointed or failed."""
        ...

    def lock(self, pid: int, timeout_ms: int) -> None:
        """Turn running into locked: finish what was submitted and block further calls."""
        ...

    def checkpoint(self, pid: int) -> None:
        """Turn locked into checkpointed: move device memory to host memory and let go of the devices."""
        ...

    def restore(self, pid: int, moves: Moves = ()) -> None:
        """Turn checkpointed into locked: take the devices and move memory back.

        Args:
            pid: The process.
            moves: UUID of a device before → of the one to take instead; none, or one for every device it had.
        """
        ...

    def unlock(self, pid: int) -> None:
        """Turn locked into running."""
        ...

    def memory(self) -> Sequence[tuple[int, int]]:
        """Return free and total bytes of each device."""
        ...

    def devices(self) -> Sequence[str]:
        """Return the UUID of each device, in the same order: ``GPU-`` and 36 characters."""
        ...


class _Bindings:
    """The calls of :class:`CudaDriver`."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self._call("cuInit", 0)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the driver; it answers with a status, then its results."""
        status, *results = getattr(self._api, name)(*arguments)
        if int(status) != 0:
            _, text = self._api.cuGetErrorString(status)
            words = text.decode() if isinstance(text, bytes) else str(text)
            raise CudaFailure(f"{name}: {words} ({int(status)})", status=int(status))
        return results[0] if len(results) == 1 else tuple(results)

    def state(self, pid: int) -> str:
        """See :class:`CudaDriver`."""
        return _STATES[int(self._call("cuCheckpointProcessGetState", pid))]

    def lock(self, pid: int, timeout_ms: int) -> None:
        """See :class:`CudaDriver`."""
        arguments = self._api.CUcheckpointLockArgs()
        arguments.timeoutMs = timeout_ms
        self._call("cuCheckpointProcessLock", pid, arguments)

    def checkpoint(self, pid: int) -> None:
        """See :class:`CudaDriver`."""
        self._call("cuCheckpointProcessCheckpoint", pid, None)

    def restore(self, pid: int, moves: Moves = ()) -> None:
        """See :class:`CudaDriver`."""
        self._call("cuCheckpointProcessRestore", pid, restore_arguments(self._api, moves))

    def unlock(self, pid: int) -> None:
        """See :class:`CudaDriver`."""
        self._call("cuCheckpointProcessUnlock", pid, None)

    def memory(self) -> Sequence[tuple[int, int]]:
        """See :class:`CudaDriver`. Free memory is known to a context only: each lives for this one question."""
        found = []
        for device in self._devices():
            try:
                found.append(self._memory_of(device))
            except CudaFailure as failure:
                if failure.status != OUT_OF_MEMORY:
                    raise
                found.append((0, int(self._call("cuDeviceTotalMem", device))))
        return found

    def devices(self) -> Sequence[str]:
        """See :class:`CudaDriver`."""
        return [_text(bytes(self._call("cuDeviceGetUuid", device).bytes)) for device in self._devices()]

    def _devices(self) -> list[Any]:
        return [self._call("cuDeviceGet", ordinal) for ordinal in range(int(self._call("cuDeviceGetCount")))]

    def _memory_of(self, device: Any) -> tuple[int, int]:
        context = self._call("cuDevicePrimaryCtxRetain", device)
        try:
            self._call("cuCtxPushCurrent", context)
            free, total = self._call("cuMemGetInfo")
            self._call("cuCtxPopCurrent")
        finally:
            self._call("cuDevicePrimaryCtxRelease", device)
        return int(free), int(total)


def _text(uuid: bytes) -> str:
    """Write a UUID as NVIDIA's tools do."""
    digits = uuid.hex()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def restore_arguments(api: Any, moves: Moves) -> Any:
    """Return ``CUcheckpointRestoreArgs`` for moves to other devices; ``None`` without any.

    Args:
        api: The module ``cuda.bindings.driver``.
        moves: As for :meth:`CudaDriver.restore`.
    """
    if not moves:
        return None
    pairs = []
    for old, new in moves:
        pair = api.CUcheckpointGpuPair()
        pair.oldUuid, pair.newUuid = _uuid(api, old), _uuid(api, new)
        pairs.append(pair)
    arguments = api.CUcheckpointRestoreArgs()
    arguments.gpuPairs, arguments.gpuPairsCount = pairs, len(pairs)
    return arguments


def _uuid(api: Any, text: str) -> Any:
    # The bindings let a UUID be read only, since a driver makes them; one of another machine has to be written.
    uuid = api.CUuuid()
    ctypes.memmove(uuid.getPtr(), bytes.fromhex(text.removeprefix("GPU-").replace("-", "")), UUID_BYTES)
    return uuid


def open_driver() -> CudaDriver:
    """Load the driver and initialise it.

    Raises:
        CudaFailure: There is no driver, or it refuses.
        ImportError: ``cuda-bindings`` is not installed.
    """
    from cuda.bindings import driver  # noqa: PLC0415  (a host without a GPU needs none of it)

    try:
        return _Bindings(driver)
    except RuntimeError as error:  # what the bindings raise when libcuda.so.1 is not there
        raise CudaFailure(f"the NVIDIA driver cannot be loaded: {error}") from error
