"""The CUDA driver API, called by name, with failures as exceptions.

The one rule: only modules that run in a child of their own import this; ``cuInit`` stays in a process for ever, and
one that has called it can no longer be dumped as it is.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from coldsnap.errors import ColdSnapError

NO_DEVICE = 100
GIB = 1 << 30


class CudaCallError(ColdSnapError):
    """A driver call failed; ``.status`` is its CUresult."""

    status: int


class Cuda:
    """An initialised driver.

    Attributes:
        api: The module ``cuda.bindings.driver``, for its structures and constants.
    """

    def __init__(self) -> None:
        from cuda.bindings import driver  # noqa: PLC0415  optional, and absent where there is no GPU

        self.api: Any = driver
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a driver function; return its one value, or a tuple of several.

        Raises:
            CudaCallError: It answers anything but success.
        """
        status, *values = getattr(self.api, name)(*arguments)
        if int(status):
            raise CudaCallError(f"{name}: {getattr(status, 'name', status)}", status=int(status))
        return values[0] if len(values) == 1 else tuple(values)

    def devices(self) -> list[dict[str, Any]]:
        """Describe the visible devices."""
        return [self._device(index) for index in range(self.call("cuDeviceGetCount"))]

    def _device(self, index: int) -> dict[str, Any]:
        device = self.call("cuDeviceGet", index)
        attribute = self.api.CUdevice_attribute
        major = self.call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
        minor = self.call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
        uuid = bytes(self.call("cuDeviceGetUuid", device).bytes).hex()
        parts = (uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:])
        memory = int(self.call("cuDeviceTotalMem", device))
        return {
            "index": index,
            "uuid": f"GPU-{'-'.join(parts)}",
            "name": bytes(self.call("cuDeviceGetName", 256, device)).split(b"\0")[0].decode(),
            "compute_capability": f"{major}.{minor}",
            "memory_bytes": memory,
            "capacity_class_bytes": round(memory / GIB) * GIB,
        }

    def version(self) -> str:
        """Return the CUDA version the driver speaks; it is encoded as ``1000 * major + 10 * minor``."""
        number = int(self.call("cuDriverGetVersion"))
        return f"{number // 1000}.{number % 1000 // 10}"


def inventory() -> dict[str, Any]:
    """Return ``known``, ``reason``, ``gpus`` and ``cuda`` of this machine; never raises."""
    nothing: dict[str, Any] = {"known": False, "reason": "", "gpus": [], "cuda": None}
    try:
        cuda = Cuda()
        return {"known": True, "reason": "", "gpus": cuda.devices(), "cuda": cuda.version()}
    except ImportError:
        return {**nothing, "reason": "cuda-bindings is not installed in this Python; install coldsnap[cuda]"}
    except CudaCallError as error:
        return {**nothing, "known": error.status == NO_DEVICE, "reason": f"the CUDA driver says {error}"}
    except RuntimeError as error:
        # cuda-bindings raises it when libcuda cannot be loaded.
        return {**nothing, "reason": f"the CUDA driver library cannot be loaded: {error}"}


if __name__ == "__main__":
    json.dump(inventory(), sys.stdout)
