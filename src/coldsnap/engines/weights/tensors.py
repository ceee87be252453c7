"""The storages of a model's tensors, as memory that bytes are copied out of and into.

The one rule: a storage is whole or not there. Bytes go by address, an address belongs to one storage, and a stretch
that leaves it is an error, so that a wrong layout cannot write into a neighbour.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from coldsnap.engines.weights.destinations import named_tensors
from coldsnap.engines.weights.storages import storage_of
from coldsnap.errors import ContractError, NativeError, UnsupportedError
from coldsnap.transfer.memory import Region

__all__ = ["WEIGHTS", "TensorMemory", "persistent_tensors"]

WEIGHTS = "weights"


def persistent_tensors(model: Any, also: Iterable[str] = ()) -> dict[str, Any]:
    """Return what a load fills: every parameter and persistent buffer that has elements, in the order of names.

    Args:
        model: The module.
        also: Names of buffers that are not persistent and were written nevertheless.
    """
    derived = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set  # noqa: SLF001  torch has no other way to ask
    } - set(also)
    return {name: one for name, one in named_tensors(model).items() if name not in derived and one.numel()}


class TensorMemory:
    """The storages of some tensors, all on one device; they stay where they are.

    Args:
        tensors: By name.

    Raises:
        ContractError: One has no memory, or they are on several devices.

    Attributes:
        device: CUDA ordinal, None for this process's memory.
    """

    device: int | None

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        found: dict[int, Any] = {}
        for name, tensor in tensors.items():
            storage = storage_of(tensor)
            if storage is None or not storage.data_ptr():
                raise ContractError(f"{name} has no memory of its own when its load ends, so that nothing can be saved")
            found[storage.data_ptr()] = storage
        self._storages = [found[address] for address in sorted(found)]
        self._addresses = sorted(found)
        devices = {storage.device for storage in self._storages}
        if len(devices) > 1 or any(device.type not in ("cpu", "cuda") for device in devices):
            told = ", ".join(sorted(map(str, devices)))
            raise ContractError(f"the tensors of the model are on {told}; expected the processor or one CUDA device")
        self.device = next((device.index for device in devices if device.type == "cuda"), None)

    def regions(self, tag: str | None = None) -> tuple[Region, ...]:
        """Return one region for each storage, ascending by address."""
        return tuple(
            Region(address=one.data_ptr(), size_bytes=one.nbytes(), mapped_bytes=one.nbytes(), tag=WEIGHTS)
            for one in self._storages
            if tag in (None, WEIGHTS)
        )

    def is_mapped(self, region: Region) -> bool:
        """Tell whether the region is one of a storage: its backing never goes."""
        return region.address in self._addresses

    def release(self, regions: Iterable[Region]) -> None:
        """Refuse: a storage has no address without its backing.

        Raises:
            UnsupportedError: Always, when anything is asked for.
        """
        for region in regions:
            raise UnsupportedError(
                f"the storage at {region.address:#x} cannot give its memory away and keep its address",
                field="weights.mode",
                works="an engine with a memory provider",
            )

    def remap(self, regions: Iterable[Region]) -> None:
        """Return: everything is mapped."""

    def copy_from_host(self, address: int, data: memoryview) -> None:
        """Copy into a storage; returns when the buffer may be reused."""
        view = data.cast("B")
        if view.nbytes:
            # torch warns of a buffer that it could write to and must not.
            source = bytearray(view) if view.readonly else view
            self._bytes(address, view.nbytes).copy_(torch.frombuffer(source, dtype=torch.uint8))

    def copy_to_host(self, address: int, into: memoryview) -> None:
        """Copy out of a storage into a writable buffer; any thread may ask."""
        view = into.cast("B")
        if view.nbytes:
            torch.frombuffer(view, dtype=torch.uint8).copy_(self._bytes(address, view.nbytes))

    def zero(self, address: int, length: int) -> None:
        """Fill a stretch of a storage with zeros."""
        self._bytes(address, length).zero_()

    def synchronize(self) -> None:
        """Return when the device has done everything asked for."""
        if self.device is not None:
            torch.cuda.synchronize(self.device)

    def _bytes(self, address: int, length: int) -> Any:
        at = bisect_right(self._addresses, address) - 1
        storage = self._storages[at] if at >= 0 else None
        if storage is None or address + length > storage.data_ptr() + storage.nbytes():
            raise NativeError(f"no tensor of the model holds {length} bytes at {address:#x}")
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return whole[address - storage.data_ptr() :][:length]
