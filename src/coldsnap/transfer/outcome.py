"""What the native library reports, in words.

The one rule: numbers of the C interface become names here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from attrs import fields

from coldsnap.transfer.backend import (
    RANGES_KEPT,
    CaptureJob,
    CaptureReceipt,
    FileRange,
    HydrationJob,
    HydrationReceipt,
    SourceDigest,
    StageTimes,
)

BACKENDS = ("auto", "buffered", "direct", "gds")
ACCESSES = ("auto", "read", "map", "register")
REASONS = ("requested", "resident", "not-resident", "residency-unknown", "no-direct-open", "edge", "layout-not-aligned")
STAGES = tuple(stage.name for stage in fields(StageTimes))
Result: TypeAlias = Any
"""The library's result structure; its fields are those of ``coldsnap_io_result``."""


def _times(result: Result) -> StageTimes:
    return StageTimes(**{name: int(getattr(result, name)) for name in STAGES})


def effective(result: Result) -> str:
    """Name what was used."""
    if not result.direct_bytes:
        return "buffered"
    if not result.buffered_bytes:
        return "direct"
    return "direct+buffered-edges" if result.buffered_bytes == result.edge_bytes else "direct+buffered"


def hydration_receipt(job: HydrationJob, result: Result, ranges: Sequence[Any]) -> HydrationReceipt:
    """Describe a hydrate."""
    kept = ranges[: min(result.range_count, RANGES_KEPT)]
    fallback = result.direct_errno or None
    return HydrationReceipt(
        requested=job.requested,
        effective="gds" if job.requested == "gds" else effective(result),
        reason="direct-open-fallback" if fallback else job.reason,
        path=job.path,
        filesystem=job.filesystem,
        fallback_errno=fallback,
        bytes=result.bytes,
        buffered_bytes=result.buffered_bytes,
        direct_bytes=result.direct_bytes,
        threads=result.threads,
        slice_bytes=result.slice_bytes,
        ring_bytes=result.ring_bytes,
        times=_times(result),
        verified_extents=result.verified_extents,
        edge_bytes=result.edge_bytes,
        access=ACCESSES[result.access] if result.buffered_bytes else "",
        ranges=tuple(
            FileRange(
                file_offset=one.file_offset,
                length=one.length,
                backend=BACKENDS[one.backend],
                reason=REASONS[one.reason],
            )
            for one in kept
        ),
        range_count=result.range_count,
    )


def capture_receipt(job: CaptureJob, result: Result, sources: Sequence[Any]) -> CaptureReceipt:
    """Describe a capture."""
    fallback = result.direct_errno or None
    return CaptureReceipt(
        requested=job.requested,
        effective=effective(result),
        reason="direct-open-fallback" if fallback else REASONS[result.reason],
        path=job.path,
        filesystem=job.filesystem,
        fallback_errno=fallback,
        bytes=result.bytes,
        buffered_bytes=result.buffered_bytes,
        direct_bytes=result.direct_bytes,
        threads=result.threads,
        slice_bytes=result.slice_bytes,
        ring_bytes=result.ring_bytes,
        times=_times(result),
        file_bytes=result.file_bytes,
        digests=tuple(
            SourceDigest(
                crc32=int(one.crc32) if one.verify else None, sha256=bytes(one.sha256) if one.verify == 2 else None
            )
            for one in sources
        ),
        file_sha256=bytes(result.file_sha256) if job.file_sha256 else None,
        read_back=job.read_back,
    )
