"""Copies that go through a staging slab: in parts that fit, batch by batch, in the order of the load.

The one rule: what is read together lies together in one file and fits into one slab, whoever reads it. So a slab can be
filled by one rank for itself, or by one for several that need the same bytes. This is arithmetic: no torch, no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import evolve, frozen

from coldsnap.artifact.replay import Elements, ReplayCopy

__all__ = ["Batch", "Staged", "batches", "in_parts"]

ALIGNMENT = 64
"""Of a view in the slab: torch wants elements at multiples of their size."""


@frozen(kw_only=True)
class Staged:
    """A copy whose source is read into the slab.

    Attributes:
        copy: The copy, or a part of one.
        at: Where in the slab the first byte of its source lies.
    """

    copy: ReplayCopy
    at: int


@frozen(kw_only=True)
class Batch:
    """What is read at once.

    Attributes:
        file: Index of the file.
        staged: What of it.
        bytes: Of the slab.
    """

    file: int
    staged: tuple[Staged, ...]
    bytes: int


def batches(copies: Sequence[ReplayCopy], *, slab_bytes: int) -> Iterator[Batch]:
    """Yield copies as batches, in the given order: a copy may write over what one before it wrote.

    Args:
        copies: What is to be done.
        slab_bytes: What no batch exceeds.
    """
    held: list[Staged] = []
    used = 0
    for copy in (part for whole in copies for part in in_parts(whole, slab_bytes)):
        size = -(-copy.source.span // ALIGNMENT) * ALIGNMENT
        if held and (held[0].copy.file != copy.file or used + size > slab_bytes):
            yield Batch(file=held[0].copy.file, staged=tuple(held), bytes=used)
            held, used = [], 0
        held.append(Staged(copy=copy, at=used))
        used += size
    if held:
        yield Batch(file=held[0].copy.file, staged=tuple(held), bytes=used)


def in_parts(copy: ReplayCopy, most_bytes: int) -> Iterator[ReplayCopy]:
    """Yield a copy in parts of which neither source nor target spans more; whole when it fits."""
    if max(copy.source.span, copy.target.span) <= most_bytes - ALIGNMENT or max(copy.source.shape, default=1) == 1:
        yield copy
        return
    dimension = _widest(copy)
    half = copy.source.shape[dimension] // 2
    for begin, size in ((0, half), (half, copy.source.shape[dimension] - half)):
        yield from in_parts(
            evolve(
                copy,
                crc32=None,
                source=_narrowed(copy.source, dimension, begin, size),
                target=_narrowed(copy.target, dimension, begin, size),
            ),
            most_bytes,
        )


def _widest(copy: ReplayCopy) -> int:
    """Return the dimension that spans most bytes on the side that spans more."""
    wide = max(copy.source, copy.target, key=lambda view: view.span)
    spans = [(size - 1) * step for size, step in zip(wide.shape, wide.stride, strict=True)]
    return max((d for d, size in enumerate(wide.shape) if size > 1), key=lambda d: spans[d])


def _narrowed(view: Elements, dimension: int, begin: int, size: int) -> Elements:
    shape = tuple(size if d == dimension else full for d, full in enumerate(view.shape))
    return evolve(view, offset=view.offset + begin * view.stride[dimension] * view.width, shape=shape)
