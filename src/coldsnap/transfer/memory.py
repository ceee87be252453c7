"""Memory whose addresses stay while its contents come and go.

The one rule: an allocation's address is fixed from ``allocate`` to ``close``; ``release`` gives the backing back to the
system, ``remap`` brings backing to the same address, and neither does twice what is done already, so that a restore
that failed half-way can simply be tried again.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import Protocol

from attrs import frozen

from coldsnap.transfer.native import address_of

__all__ = ["HostMemory", "MemoryProvider", "PreservedMemory", "Region"]

HUGE_PAGE_BYTES = 2 << 20


@frozen(kw_only=True)
class Region:
    """One allocation of a provider.

    Attributes:
        address: First byte; on the provider's device, or in this process.
        size_bytes: Bytes asked for.
        mapped_bytes: Bytes reserved: the size in whole pages of the provider.
        tag: What it is for: weights, kv_cache, …
    """

    address: int
    size_bytes: int
    mapped_bytes: int
    tag: str


class PreservedMemory(Protocol):
    """Tagged allocations with stable addresses that someone else made, for example an engine's own allocator."""

    @property
    def device(self) -> int | None:
        """CUDA ordinal of the addresses, ``None`` for this process's memory."""

    def regions(self, tag: str | None = None) -> tuple[Region, ...]:
        """Return the allocations with a tag, or all, in order of allocation."""

    def is_mapped(self, region: Region) -> bool:
        """Tell whether the region has backing."""

    def release(self, regions: Iterable[Region]) -> None:
        """Give the backing away and keep the addresses; released ones are left alone."""

    def remap(self, regions: Iterable[Region]) -> None:
        """Bring zeroed backing to the same addresses; mapped ones are left alone."""

    def copy_from_host(self, address: int, data: memoryview) -> None:
        """Copy into a region."""

    def copy_to_host(self, address: int, into: memoryview) -> None:
        """Copy out of a region into a writable buffer; any thread may ask."""

    def zero(self, address: int, length: int) -> None:
        """Fill a stretch of a region with zeros."""

    def synchronize(self) -> None:
        """Return when everything asked for has happened."""


class MemoryProvider(PreservedMemory, Protocol):
    """Preserved memory that allocates, too."""

    def allocate(self, size_bytes: int, *, tag: str) -> Region:
        """Reserve an address range and back it with zeros."""

    def close(self) -> None:
        """Give everything back, addresses too."""


class HostMemory:
    """This process's own memory: anonymous mappings, released with madvise."""

    device: int | None = None

    def __init__(self) -> None:
        self._maps: dict[Region, mmap.mmap] = {}
        self._released: set[Region] = set()

    def allocate(self, size_bytes: int, *, tag: str) -> Region:
        """Reserve an address range and back it with zeros, in huge pages where that pays."""
        mapped_bytes = max(-(-size_bytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE
        pages = mmap.mmap(-1, mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if mapped_bytes >= HUGE_PAGE_BYTES:
            pages.madvise(mmap.MADV_HUGEPAGE)
        region = Region(
            address=address_of(memoryview(pages)), size_bytes=size_bytes, mapped_bytes=mapped_bytes, tag=tag
        )
        self._maps[region] = pages
        return region

    def buffer(self, region: Region) -> memoryview:
        """Return the bytes of a region, for whoever computes with them; zeros while it is released."""
        return memoryview(self._maps[region])[: region.size_bytes]

    def regions(self, tag: str | None = None) -> tuple[Region, ...]:
        """Return the allocations with a tag, or all, in order of allocation."""
        return tuple(region for region in self._maps if tag in (None, region.tag))

    def is_mapped(self, region: Region) -> bool:
        """Tell whether the region has backing."""
        return region in self._maps and region not in self._released

    def release(self, regions: Iterable[Region]) -> None:
        """Give the backing away and keep the addresses; released ones are left alone."""
        for region in regions:
            if region not in self._released:
                self._maps[region].madvise(mmap.MADV_DONTNEED)
                self._released.add(region)

    def remap(self, regions: Iterable[Region]) -> None:
        """Bring zeroed backing to the same addresses; mapped ones are left alone."""
        # The kernel backs a page when it is first touched.
        self._released.difference_update(regions)

    def copy_from_host(self, address: int, data: memoryview) -> None:
        """Copy into a region."""
        self._view(address, data.nbytes)[:] = data.cast("B")

    def copy_to_host(self, address: int, into: memoryview) -> None:
        """Copy out of a region into a writable buffer."""
        into.cast("B")[:] = self._view(address, into.nbytes)

    def zero(self, address: int, length: int) -> None:
        """Fill a stretch of a region with zeros; whole pages go back to the kernel, which brings zeroed ones."""
        end = address + length
        first, last = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if first >= last:
            self._view(address, length)[:] = bytes(length)
            return
        self._view(address, first - address)[:] = bytes(first - address)
        self._view(last, end - last)[:] = bytes(end - last)
        region, pages = self._owner(first, last - first)
        pages.madvise(mmap.MADV_DONTNEED, first - region.address, last - first)

    def synchronize(self) -> None:
        """Return: everything happens at once."""

    def close(self) -> None:
        """Give everything back, addresses too."""
        for pages in self._maps.values():
            pages.close()
        self._maps.clear()
        self._released.clear()

    def _view(self, address: int, length: int) -> memoryview:
        region, pages = self._owner(address, length)
        return memoryview(pages)[address - region.address :][:length]

    def _owner(self, address: int, length: int) -> tuple[Region, mmap.mmap]:
        for region, pages in self._maps.items():
            offset = address - region.address
            if offset >= 0 and offset + length <= region.mapped_bytes:
                if region in self._released:
                    raise ValueError(f"the region at {region.address:#x} is released: remap it first")
                return region, pages
        raise ValueError(f"no region holds {length} bytes at {address:#x}")
