"""pagemap-*.img: which pages of a process or a shared mapping are in which file, and which need not be.

The one rule: only what reads as zeros without being there is left out: all-zero pages of anonymous private mappings. A
page of a private mapping of a file would read as the file, and one of a shared mapping may be someone else's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from attrs import frozen

from coldsnap.drivers.images import COMMON_MAGIC, join_messages, parse_entry, read_messages
from coldsnap.drivers.messages import message
from coldsnap.errors import FormatError

__all__ = ["PAGE_BYTES", "Pagemap", "PagemapEntry", "Range", "anonymous_private", "without_zero_pages"]

PAGE_BYTES = 4096
MAGIC, MM_MAGIC = (COMMON_MAGIC, 0x56084025), (COMMON_MAGIC, 0x57492820)
PREFIX, SHARED_PREFIX = "pagemap-", "pagemap-shmem-"

IN_PARENT, LAZY, PRESENT = 1 << 0, 1 << 1, 1 << 2
KNOWN = LAZY | PRESENT
UNKNOWN = 1 << 32
"""A bit outside CRIU's field: the entry has fields that this library does not know."""

ANON_PRIVATE = 1 << 9
# Kinds whose content is the kernel's or a device's, or that somebody else may see: vsyscall, vdso, System V memory,
# sockets, vvar, asynchronous I/O, memfd, shadow stacks, guards, uprobes, plugins.
SPECIAL = sum(1 << bit for bit in (2, 3, 10, 11, 12, 13, 14, 15, 16, 17, 27))
MAP_PRIVATE, MAP_ANONYMOUS, MAP_HUGETLB = 0x02, 0x20, 0x40000

Range = tuple[int, int]
"""First address, and the one after the last."""


class PagemapEntry(NamedTuple):
    """A run of pages.

    Attributes:
        address: Of the first.
        pages: How many.
        flags: CRIU's: in the parent image, lazy, present.
    """

    address: int
    pages: int
    flags: int


@frozen(kw_only=True)
class Pagemap:
    """One pagemap-*.img.

    Attributes:
        name: Of the file.
        pages_id: The pages are in ``pages-<pages_id>.img``, in the order of the entries.
        entries: All runs.
    """

    name: str
    pages_id: int
    entries: tuple[PagemapEntry, ...]

    @classmethod
    def read(cls, images_fd: int, name: str) -> Pagemap:
        """Read one.

        Args:
            images_fd: The directory of images.
            name: Of the file.

        Raises:
            FormatError: Rules image.1 to image.3; pagemap.1: no head; pagemap.2: entries of a
                kind that this library does not know.
        """
        head, *rest = read_messages(images_fd, name, MAGIC) or [b""]
        parsed = parse_entry("pagemap_head", head, name)
        if not parsed.HasField("pages_id"):
            raise FormatError("it does not say where its pages are", path=name, rule="pagemap.1")
        entries = tuple(_entry(data, name) for data in rest)
        if any(entry.flags & ~KNOWN for entry in entries):
            text = "it has entries of another kind (pages of an earlier image, or a newer CRIU's)"
            raise FormatError(text, path=name, rule="pagemap.2")
        return cls(name=name, pages_id=parsed.pages_id, entries=entries)

    @property
    def pages_name(self) -> str:
        """Return the name of the file of pages."""
        return f"pages-{self.pages_id}.img"

    @property
    def pages(self) -> int:
        """Return how many pages there are in the file."""
        return sum(entry.pages for entry in self.entries if entry.flags & PRESENT)

    @property
    def mm_name(self) -> str | None:
        """Return the file with the mappings of the process; ``None`` for a shared mapping."""
        return None if self.name.startswith(SHARED_PREFIX) else f"mm-{self.name.removeprefix(PREFIX)}"

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        build = message("pagemap_entry")
        head = message("pagemap_head")(pages_id=self.pages_id).SerializeToString()
        entries = (
            build(
                vaddr=entry.address,
                # The field that CRIU before 4.1 read; it demands one, and reads the other where there is one.
                compat_nr_pages=entry.pages & 0xFFFFFFFF,
                flags=entry.flags,
                nr_pages=entry.pages,
            ).SerializeToString()
            for entry in self.entries
        )
        return join_messages(MAGIC, [head, *entries])


def _entry(data: bytes, name: str) -> PagemapEntry:
    from google.protobuf import unknown_fields  # noqa: PLC0415  (protobuf loads with the first message)

    parsed = parse_entry("pagemap_entry", data, name)
    # As CRIU itself reads what its older versions wrote.
    flags = parsed.flags if parsed.HasField("flags") else PRESENT
    pages = parsed.nr_pages if parsed.HasField("nr_pages") else parsed.compat_nr_pages
    flags |= IN_PARENT if parsed.in_parent else 0
    flags |= UNKNOWN if len(unknown_fields.UnknownFieldSet(parsed)) else 0
    return PagemapEntry(parsed.vaddr, pages, flags)


def anonymous_private(images_fd: int, name: str) -> tuple[Range, ...]:
    """Return the anonymous private mappings of a process, ascending, neighbours joined.

    Args:
        images_fd: The directory of images.
        name: Its mm-*.img.

    Raises:
        FormatError: Rules image.1 to image.3.
    """
    found: list[Range] = []
    for data in read_messages(images_fd, name, MM_MAGIC):
        for vma in sorted(parse_entry("mm_entry", data, name).vmas, key=lambda vma: int(vma.start)):
            if not _reads_as_zeros(vma.flags, vma.status):
                continue
            if found and found[-1][1] == vma.start:
                found[-1] = (found[-1][0], vma.end)
            else:
                found.append((vma.start, vma.end))
    return tuple(found)


def _reads_as_zeros(flags: int, status: int) -> bool:
    private = flags & (MAP_PRIVATE | MAP_ANONYMOUS) == MAP_PRIVATE | MAP_ANONYMOUS
    return bool(private and status & ANON_PRIVATE) and not status & SPECIAL and not flags & MAP_HUGETLB


def without_zero_pages(
    pagemap: Pagemap, ranges: Sequence[Range], zero: bytes
) -> tuple[tuple[PagemapEntry, ...], tuple[Range, ...]]:
    """Leave out pages that are all zeros and lie in one of the ranges.

    Args:
        pagemap: Of the pages.
        ranges: Addresses of mappings that read as zeros where there is no page, ascending.
        zero: A byte for each page of the file: 1 when it is all zeros.

    Returns:
        The entries that are left, and the stretches of the file that hold their pages: first page, page after the last.

    Raises:
        FormatError: Rule pagemap.3: the file has another number of pages than the entries.
    """
    if len(zero) != pagemap.pages:
        text = f"its entries have {pagemap.pages} pages, the file has {len(zero)}"
        raise FormatError(text, path=pagemap.name, rule="pagemap.3")
    kept: list[PagemapEntry] = []
    stretches: list[Range] = []
    at = 0
    for entry in pagemap.entries:
        if not entry.flags & PRESENT:
            kept.append(entry)
            continue
        for first, end in _kept_runs(entry, ranges, zero, at):
            kept.append(PagemapEntry(entry.address + first * PAGE_BYTES, end - first, entry.flags))
            if stretches and stretches[-1][1] == at + first:
                stretches[-1] = (stretches[-1][0], at + end)
            else:
                stretches.append((at + first, at + end))
        at += entry.pages
    return tuple(kept), tuple(stretches)


def _kept_runs(entry: PagemapEntry, ranges: Sequence[Range], zero: bytes, at: int) -> Iterator[Range]:
    """Yield the runs of pages of an entry that stay, counted from its first."""
    position = 0
    for first, end in _zero_runs(entry, ranges, zero, at):
        if first > position:
            yield position, first
        position = end
    if position < entry.pages:
        yield position, entry.pages


def _zero_runs(entry: PagemapEntry, ranges: Sequence[Range], zero: bytes, at: int) -> Iterator[Range]:
    """Yield the runs of zero pages of an entry that lie in the ranges, counted from its first page."""
    last = entry.address + entry.pages * PAGE_BYTES
    number = max(0, bisect_right(ranges, (entry.address, last)) - 1)
    for low, high in ranges[number:]:
        if low >= last:
            return
        first = at + max(0, low - entry.address) // PAGE_BYTES
        end = at + max(0, min(last, high) - entry.address) // PAGE_BYTES
        while (first := zero.find(1, first, end)) >= 0:
            after = zero.find(0, first, end)
            after = end if after < 0 else after
            yield first - at, after - at
            first = after
