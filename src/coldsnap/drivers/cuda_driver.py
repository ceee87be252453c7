"""The NVIDIA driver's process checkpoint API through ``cuda-bindings``.

The one rule: no context outlives a call. CUDA is initialised, which is what takes long; a context would hold half a
gigabyte of the very device whose memory is to be restored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["CHECKPOINTED", "FAILED", "LOCKED", "RUNNING", "CudaDriver", "CudaFailure", "open_driver"]

RUNNING, LOCKED, CHECKPOINTED, FAILED = "running", "locked", "checkpointed", "failed"
_STATES = (RUNNING, LOCKED, CHECKPOINTED, FAILED)  # CUprocessState, in the order of its values


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

    def restore(self, pid: int) -> None:
        """Turn checkpointed into locked: take the devices and move memory back."""
        ...

    def unlock(self, pid: int) -> None:
        """Turn locked into running."""
        ...

    def memory(self) -> Sequence[tuple[int, int]]:
        """Return free and total bytes of each device."""
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

    def restore(self, pid: int) -> None:
        """See :class:`CudaDriver`."""
        self._call("cuCheckpointProcessRestore", pid, None)

    def unlock(self, pid: int) -> None:
        """See :class:`CudaDriver`."""
        self._call("cuCheckpointProcessUnlock", pid, None)

    def memory(self) -> Sequence[tuple[int, int]]:
        """See :class:`CudaDriver`. Free memory is known to a context only: each lives for this one question."""
        found = []
        for ordinal in range(int(self._call("cuDeviceGetCount"))):
            device = self._call("cuDeviceGet", ordinal)
            context = self._call("cuDevicePrimaryCtxRetain", device)
            try:
                self._call("cuCtxPushCurrent", context)
                free, total = self._call("cuMemGetInfo")
                self._call("cuCtxPopCurrent")
            finally:
                self._call("cuDevicePrimaryCtxRelease", device)
            found.append((int(free), int(total)))
        return found


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
