"""What is zero need not be stored: memory that comes back is zeroed before anything is brought to it.

An engine keeps state beside its weights that is mostly empty: vLLM's sampler counts the tokens of 1,024 requests over
the whole vocabulary, 0.6 GB among the weights, and each of the rows has a few.

The one rule: what a load wrote is left alone, whatever it holds. A pack depends on the model and on nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import evolve

from coldsnap.artifact.cores import in_threads
from coldsnap.artifact.extents import Extent, ExtentMap, prove
from coldsnap.engines.weights.source import Staging
from coldsnap.engines.weights.split import Split

__all__ = ["without_zeros"]

CHUNK_BYTES = 64 << 10
"""Zeros are looked for in whole chunks; a tail is looked at as it is."""

LEAST_BYTES = 128 << 10
"""A shorter run stays in the residual: reading it costs less than naming it."""

_ZERO = bytes(CHUNK_BYTES)


def without_zeros(split: Split, staging: Staging, *, threads: int) -> Split:
    """Return the split with the long runs of zeros of its residual among what is vacant.

    Args:
        split: What is the model's and what is not.
        staging: Reads the memory, which must not change until the generation is written.
        threads: How many read.
    """
    found = in_threads(lambda extent: _runs(split, staging, extent), _long(split.residual.extents), threads=threads)
    zeros = [run for runs in found for run in runs]
    if not zeros:
        return split
    vacant = ExtentMap.of(split.allocations, (*split.vacant.extents, *zeros)).merged()
    residual = ExtentMap.of(split.allocations, (*split.model.extents, *vacant.extents)).complement()
    return evolve(
        split,
        residual=residual,
        vacant=vacant,
        coverage=prove(split.allocations, split.model.extents, residual.extents, vacant.extents),
    )


def _long(extents: Sequence[Extent]) -> list[Extent]:
    return [extent for extent in extents if extent.size >= LEAST_BYTES]


def _runs(split: Split, staging: Staging, extent: Extent) -> list[Extent]:
    """Return the runs of zeros of an extent that are long enough."""
    runs: list[tuple[int, int]] = []
    for begin, end in _zero_chunks(staging, split.allocations[extent.allocation].address + extent.offset, extent.size):
        if runs and runs[-1][1] == begin:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((begin, end))
    return [
        Extent(allocation=extent.allocation, offset=extent.offset + begin, size=end - begin)
        for begin, end in runs
        if end - begin >= LEAST_BYTES
    ]


def _zero_chunks(staging: Staging, address: int, size: int) -> Iterator[tuple[int, int]]:
    position = 0
    for piece in staging.pieces(address, size):
        for at in range(0, piece.nbytes, CHUNK_BYTES):
            with piece[at : at + CHUNK_BYTES] as chunk:
                # A copy, since memory views are compared element by element, and bytes all at once.
                if bytes(chunk) == _ZERO[: chunk.nbytes]:
                    yield position + at, position + at + chunk.nbytes
        position += piece.nbytes
