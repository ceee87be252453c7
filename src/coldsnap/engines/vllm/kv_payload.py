"""Where vLLM's KV caches really lie, and what else shares their allocations.

The one rule: an allocation is thrown away only for what is known to be KV cache in it; every other byte of it is copied
first and put back after.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from attrs import frozen

from coldsnap.transfer.memory import Region

__all__ = ["REMNANT_LIMIT_BYTES", "KvStorage", "Remnants", "discardable", "rests", "storages_of"]

# torch rounds a large segment up by less than 2 MiB, but may put another tensor behind the cache. An allocation with
# more than this beside the cache keeps its backing.
REMNANT_LIMIT_BYTES = 64 << 20


@frozen(kw_only=True)
class KvStorage:
    """The storage of one KV cache tensor.

    Attributes:
        index: Its place in the runner's ``kv_caches``; of caches that share a storage the first.
        address: First byte.
        size_bytes: Bytes.
    """

    index: int
    address: int
    size_bytes: int


class _Memory(Protocol):
    def copy_to_host(self, address: int, into: memoryview) -> None: ...

    def copy_from_host(self, address: int, data: memoryview) -> None: ...


def storages_of(kv_caches: Iterable[Any]) -> tuple[KvStorage, ...]:
    """Find the storages of a runner's ``kv_caches``: tensors, or lists of them, as Mamba layers have.

    Args:
        kv_caches: The runner's list; views of one storage are counted once.
    """
    found: dict[int, KvStorage] = {}
    for index, entry in enumerate(kv_caches):
        for tensor in entry if isinstance(entry, list | tuple) else (entry,):
            storage = tensor.untyped_storage()
            address, size = int(storage.data_ptr()), int(storage.nbytes())
            if size:
                found.setdefault(address, KvStorage(index=index, address=address, size_bytes=size))
    return tuple(found.values())


def discardable(region: Region, storages: Sequence[KvStorage]) -> bool:
    """Tell whether KV caches are what an allocation holds, but for a rest that is small enough to be copied."""
    rest = sum(size for _, size in rests(region, storages))
    return rest < region.mapped_bytes and rest <= REMNANT_LIMIT_BYTES


def rests(region: Region, storages: Sequence[KvStorage]) -> Iterator[tuple[int, int]]:
    """Yield address and size of each stretch of a region that no KV cache covers."""
    position, end = region.address, region.address + region.mapped_bytes
    for storage in sorted(storages, key=lambda one: one.address):
        if storage.address >= end:
            break
        if storage.address > position:
            yield position, storage.address - position
        position = max(position, min(storage.address + storage.size_bytes, end))
    if position < end:
        yield position, end - position


class Remnants:
    """What lies beside the KV caches, kept in host memory while their allocations have no backing."""

    def __init__(self) -> None:
        self._kept: dict[int, bytearray] = {}

    @property
    def kept_bytes(self) -> int:
        """Return how many bytes are held."""
        return sum(len(data) for data in self._kept.values())

    def keep(self, memory: _Memory, regions: Iterable[Region], storages: Sequence[KvStorage]) -> None:
        """Copy the rests of mapped regions; a rest of zeros needs no copy, since new backing is zero."""
        for region in regions:
            for address, size in rests(region, storages):
                data = bytearray(size)
                memory.copy_to_host(address, memoryview(data))
                self._kept.pop(address, None)
                if data != bytes(size):
                    self._kept[address] = data

    def put_back(self, memory: _Memory) -> None:
        """Write everything that is held to where it was, and hold it no longer."""
        for address, data in self._kept.items():
            memory.copy_from_host(address, memoryview(data))
        self._kept.clear()
