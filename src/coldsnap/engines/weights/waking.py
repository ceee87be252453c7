"""Sleeping allocations are mapped and filled again: one attempt, from the first check to the last copy.

The one rule: what is mapped already stays mapped, and what was filled before is filled again; an attempt that fails
leaves nothing that the next one has to know but the mappings, which the memory itself remembers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from coldsnap.artifact.durable import FaultPoint
from coldsnap.engines.weights.replaying import ReplayReceipt
from coldsnap.errors import IntegrityError
from coldsnap.transfer.backend import HydrationReceipt
from coldsnap.transfer.memory import PreservedMemory, Region

__all__ = ["SAMPLE_BYTES", "Fill", "Waking", "mapped_bytes"]

Receipt = HydrationReceipt | ReplayReceipt
Fill = Callable[[Sequence[Region], Callable[[str], None]], Mapping[str, Receipt]]

SAMPLE_BYTES = 64
_FILLER = 0xA5  # what a read-back that copies nothing would leave


class Waking:
    """One attempt.

    Args:
        memory: Whose allocations.
        at: Fault point.
    """

    def __init__(self, memory: PreservedMemory, at: FaultPoint) -> None:
        self._memory = memory
        self._at = at
        self._bytes: dict[str, int] = {}
        self._mapped = 0
        self._seconds: dict[str, float] = {}
        self._receipts: Mapping[str, Receipt] = {}

    def weights(self, regions: Sequence[Region], fill: Fill) -> None:
        """Map and fill what is preserved.

        Args:
            regions: All of it.
            fill: Brings every byte; called with the regions that an attempt before this one has mapped already, and
                with what is to be told before each of its parts.
        """
        stale = [region for region in regions if self._memory.is_mapped(region)]
        self._remap("weights", regions)
        self._receipts = fill(stale, lambda kind: self._at(f"{kind}:fill"))
        for kind in dict.fromkeys(("pack", "residual", *self._receipts)):
            receipt = self._receipts.get(kind)
            self._bytes[kind] = receipt.bytes if receipt else 0
            self._seconds[kind] = receipt.seconds if receipt else 0.0

    def discarded(self, tag: str, regions: Sequence[Region]) -> None:
        """Map what was thrown away, and see that it is zero (manifest.8).

        Raises:
            IntegrityError: It is not, at the start, the middle or the end of a named allocation.
        """
        self._remap(tag, regions)
        with self._timed(tag):
            self._at(f"{tag}:zero")
            for region in regions:
                self._memory.zero(region.address, region.size_bytes)
            self._memory.synchronize()
            self._at(f"{tag}:read-back")
            for region in regions:
                _require_zero(self._memory, region)
        self._bytes[tag] = sum(region.size_bytes for region in regions)

    def _remap(self, tag: str, regions: Iterable[Region]) -> None:
        with self._timed("remap"):
            self._at(f"{tag}:remap")
            missing = [region for region in regions if not self._memory.is_mapped(region)]
            self._memory.remap(missing)
            self._memory.synchronize()
            self._mapped += len(missing)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.monotonic() - began

    def reply(self) -> dict[str, Any]:
        """Return what the reply to the request says about it."""
        details = {kind: _details(receipt) for kind, receipt in self._receipts.items()}
        first = next(iter(details.values()), None)
        return {
            "bytes": self._bytes,
            "mapped": self._mapped,
            "seconds": self._seconds,
            "receipt": first and {name: first[name] for name in ("requested", "effective", "reason")},
            "receipts": details,
        }


def _details(receipt: Receipt) -> dict[str, Any]:
    return {
        "requested": receipt.requested,
        "effective": receipt.effective,
        "reason": receipt.reason,
        "bytes": receipt.bytes,
        "seconds": receipt.seconds,
        "verified_extents": receipt.verified_extents,
        **receipt.details(),
    }


def _require_zero(memory: PreservedMemory, region: Region) -> None:
    length = min(SAMPLE_BYTES, region.size_bytes)
    for place, offset in (
        ("start", 0),
        ("middle", (region.size_bytes - length) // 2),
        ("end", region.size_bytes - length),
    ):
        found = bytearray([_FILLER]) * length
        memory.copy_to_host(region.address + offset, memoryview(found))
        if any(found):
            raise IntegrityError(
                f"the {place} is not zero after it was mapped again (rule manifest.8)",
                path=f"the allocation of {region.tag} at {region.address:#x}",
                expected="zeros",
                actual=found[:16].hex(),
            )


def mapped_bytes(regions: Iterable[Region]) -> int:
    """Return how much backing regions have when they are mapped."""
    return sum(region.mapped_bytes for region in regions)
