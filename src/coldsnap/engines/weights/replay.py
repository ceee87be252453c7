"""At a capture: the copies of a load, written down so that they can be done again.

The one rule: what is written down is proven. Every model byte is written by a copy, every file is known by its size and
the digest of its header, and what each copy left in memory has a checksum; a recovery that comes out otherwise is
found.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from attrs import evolve, frozen

from coldsnap.artifact.cores import in_threads
from coldsnap.artifact.extents import Extent
from coldsnap.artifact.replay import Elements, ReplayCopy, SourceFile
from coldsnap.engines.weights.copies import Copy, View
from coldsnap.engines.weights.split import Split
from coldsnap.errors import AdmissionError
from coldsnap.transfer.checkpoint import header_of

__all__ = ["Recording", "Replay", "record_replay"]

Wanted = Literal["off", "auto", "required"]
_SHOWN = 5


@frozen(kw_only=True)
class Recording:
    """Whether a recovery is to be possible.

    Attributes:
        wanted: off; auto: where it is possible within the bound; required: or there is no capture.
        derived_max_bytes: ``weights.recovery.derived_buffer_max_bytes``.
    """

    wanted: Wanted = "auto"
    derived_max_bytes: int = 64 << 20


@frozen(kw_only=True)
class Replay:
    """What a recovery manifest needs beside extents; without copies there is none.

    Attributes:
        files: Which files were read.
        copies: What was copied.
        derived_bytes: Of parameters and buffers that no copy explains, which are in the residual.
        reason: Why there are no copies, empty when there are.
    """

    files: tuple[SourceFile, ...] = ()
    copies: tuple[ReplayCopy, ...] = ()
    derived_bytes: int = 0
    reason: str = ""


def record_replay(
    split: Split, recording: Recording, checksums: Callable[[Sequence[Extent]], Sequence[int]], *, known: bool
) -> Replay:
    """Write the copies down.

    Args:
        split: With the copies of the load.
        recording: Whether it is wanted, and what is too much.
        checksums: Takes the CRC-32 of stretches of the memory.
        known: Whether the checkpoint has an identity.

    Raises:
        AdmissionError: It is required, and not possible; with the reason.
    """
    if recording.wanted == "off":
        return Replay(reason="weights.recovery.enabled is false")
    derived = sum(split.derived.values())
    copies = list(_placed(split))
    if reason := _objection(split, recording, copies, known=known):
        if recording.wanted == "required":
            raise AdmissionError(f"the weights could not be recovered from the checkpoint: {reason}")
        return Replay(reason=reason, derived_bytes=derived)
    paths = list(dict.fromkeys(copy.source_path for copy, _, _ in copies))
    files = in_threads(header_of, paths)
    numbers = {path: number for number, path in enumerate(paths)}
    replayed = [_copy(copy, allocation, base, numbers[copy.source_path]) for copy, allocation, base in copies]
    return Replay(
        files=tuple(SourceFile(path=one.path, bytes=one.bytes, header_sha256=one.sha256) for one in files),
        copies=tuple(_summed(replayed, checksums)),
        derived_bytes=derived,
    )


def _objection(split: Split, recording: Recording, copies: Sequence[object], *, known: bool) -> str:
    derived = sum(split.derived.values())
    if not known:
        return "the checkpoint has no identity that another one could be told from"
    if not copies or not split.model.extents:
        return "no copy of the load was seen"
    if derived > recording.derived_max_bytes:
        largest = sorted(split.derived.items(), key=lambda one: (-one[1], one[0]))[:_SHOWN]
        named = ", ".join(f"{name} ({size:,})" for name, size in largest)
        return (
            f"{derived:,} bytes of parameters and buffers are not copied from the checkpoint, more than the "
            f"{recording.derived_max_bytes:,} of weights.recovery.derived_buffer_max_bytes; the largest: {named}"
        )
    return ""


def _placed(split: Split) -> Iterator[tuple[Copy, int, int]]:
    """Yield the copies that wrote model bytes, with the allocation and the offset of their destination in it."""
    by_address = sorted(range(len(split.allocations)), key=lambda index: split.allocations[index].address)
    bases = [split.allocations[index].address for index in by_address]
    for placed in split.copies:
        first = placed.base + placed.copy.destination_view.offset_bytes
        at = bisect_right(bases, first) - 1
        if at < 0:
            continue
        allocation = split.allocations[by_address[at]]
        if first >= allocation.address + allocation.size:
            continue  # in the process image
        if split.model.at(by_address[at], first - allocation.address) is not None:
            yield placed.copy, by_address[at], placed.base - allocation.address


def _copy(copy: Copy, allocation: int, base: int, file: int) -> ReplayCopy:
    target = _elements(copy.destination_view, base)
    source = _elements(copy.source_view, 0)
    if source.shape != target.shape:  # one number, for all elements
        source = evolve(source, shape=target.shape, stride=(0,) * len(target.shape))
    return ReplayCopy(
        file=file,
        tensor=copy.source_name,
        file_offset=copy.source_file_offset,
        length=copy.source_length,
        source=source,
        name=copy.destination_name,
        allocation=allocation,
        target=target,
    )


def _elements(view: View, base: int) -> Elements:
    return Elements(dtype=view.dtype, offset=base + view.offset_bytes, shape=view.shape, stride=view.stride)


def _summed(
    copies: Sequence[ReplayCopy], checksums: Callable[[Sequence[Extent]], Sequence[int]]
) -> Iterator[ReplayCopy]:
    """Give every plain copy its checksum: what is in memory is then what was in the file."""
    shared = _sharing(copies)
    plain = [index for index, copy in enumerate(copies) if copy.is_unbroken and index not in shared]
    sums = checksums(
        [
            Extent(allocation=copies[i].allocation, offset=copies[i].target.offset, size=copies[i].target.bytes)
            for i in plain
        ]
    )
    by_index = dict(zip(plain, sums, strict=True))
    for index, copy in enumerate(copies):
        yield evolve(copy, crc32=by_index[index]) if index in by_index else copy


def _sharing(copies: Sequence[ReplayCopy]) -> set[int]:
    """Return the copies whose destination may have bytes in common with another's."""
    ordered = sorted(range(len(copies)), key=lambda i: (copies[i].allocation, copies[i].target.offset, i))
    shared: set[int] = set()
    furthest = -1, 0, -1  # allocation, end, copy
    for index in ordered:
        copy = copies[index]
        allocation, end, owner = furthest
        if copy.allocation == allocation and copy.target.offset < end:
            shared |= {owner, index}
        if copy.allocation != allocation or copy.target.end > end:
            furthest = copy.allocation, copy.target.end, index
    return shared
