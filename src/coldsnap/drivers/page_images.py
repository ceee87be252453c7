"""The pages of a capsule: smaller once the dump is over, and as CRIU wants them again before a thaw.

The one rule: what CRIU is shown at a thaw is, page for page, what it wrote at the dump, but for zero pages that are
zeros without being there. A file of pages is replaced only when its successor is whole.

``shrink_pages`` leaves out zero pages and compresses; ``rebuild_pages`` brings the files of pages back in memory,
each block compared with its checksum before any process exists.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Literal

from attrs import evolve, field, frozen, validators

from coldsnap.artifact.pageimage import BLOCK_BYTES, SUFFIX, PageImage, read_image
from coldsnap.drivers.pagemap import (
    PAGE_BYTES,
    Pagemap,
    Range,
    anonymous_private,
    without_zero_pages,
)
from coldsnap.drivers.tree_record import TREE, read_tree_record, write_tree_record
from coldsnap.errors import DriverError
from coldsnap.transfer.native import NativeLibrary
from coldsnap.transfer.native_images import Backend, ImageMoved

__all__ = [
    "Compression",
    "Feed",
    "RebuiltPages",
    "ShrunkPages",
    "ZeroPages",
    "figures",
    "page_images",
    "rebuild_pages",
    "shrink_pages",
    "zeros_may_be_many",
]

Compression = Literal["none", "lz4"]
ZeroPages = Literal["drop", "many", "keep"]

IMAGES = "images"
PARTIAL = ".partial"
RAW = ".img"
MANY = 1 / 16
SAMPLES, SAMPLED = 2048, 1 / 24
"""One page of each of so many equal stretches of a file is looked at. When fewer than a 24th of them are zeros, those
of the whole file are a sixteenth with a chance of less than one in ten thousand, and then nothing but its size suffers.
"""
MOST_IMAGES = 200
"""Descriptors that CRIU is given at once; the kernel passes at most 253 in a message."""


@frozen(kw_only=True)
class Feed:
    """How compressed pages reach CRIU.

    Attributes:
        way: rebuilt: as files in memory, whole before CRIU starts, which takes from them what it has restored. stream:
            through pipes while CRIU restores.
        workers: Threads that decompress.
        backend: How they are read; auto: directly unless the page cache holds them.
        library: libcoldsnap_io; by default the packaged one.
    """

    way: Literal["rebuilt", "stream"] = "rebuilt"
    workers: int = field(default=1, validator=validators.ge(1))
    backend: Backend = "auto"
    library: NativeLibrary | None = None


@frozen(kw_only=True)
class ShrunkPages:
    """What became of the pages of a capsule.

    Attributes:
        compression: How they are stored now.
        images: Files of pages.
        raw_bytes: As CRIU wrote them.
        zero_bytes: Of them zero pages that were left out.
        stored_bytes: What their files take now.
        image_bytes: All files of the image directory now.
        seconds: How long it took, s.
    """

    compression: Compression
    images: int
    raw_bytes: int
    zero_bytes: int
    stored_bytes: int
    image_bytes: int
    seconds: float

    @property
    def details(self) -> Mapping[str, float]:
        """The figures of a receipt."""
        return {
            "raw_bytes": self.raw_bytes,
            "zero_bytes": self.zero_bytes,
            "stored_bytes": self.stored_bytes,
            "shrink_s": self.seconds,
        }


@frozen(kw_only=True)
class RebuiltPages:
    """Files of pages in memory, for one thaw.

    Attributes:
        fds: Name that CRIU asks for → descriptor.
        moved: What each took.
    """

    fds: dict[str, int] = field(factory=dict)
    moved: tuple[ImageMoved, ...] = ()

    def close(self) -> None:
        """Give the memory back; a second time there is none."""
        while self.fds:
            os.close(self.fds.popitem()[1])


def figures(moved: Sequence[ImageMoved]) -> Mapping[str, float]:
    """Return the figures of a receipt; none when nothing was compressed."""
    if not moved:
        return {}
    return {
        "pages_s": sum(each.seconds for each in moved),
        "pages_bytes": sum(each.raw_bytes for each in moved),
        "pages_read_bytes": sum(each.buffered_bytes + each.direct_bytes for each in moved),
        "pages_direct_bytes": sum(each.direct_bytes for each in moved),
        "pages_workers": max(each.workers for each in moved),
    }


@contextmanager
def _opened(directory_fd: int, name: str, flags: int = os.O_RDONLY) -> Iterator[int]:
    fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def shrink_pages(
    capsule_dir: Path,
    *,
    compression: Compression,
    zero_pages: ZeroPages = "drop",
    library: NativeLibrary | None = None,
    workers: int = 1,
) -> ShrunkPages:
    """Make the files of pages of a fresh capsule smaller.

    Args:
        capsule_dir: Nobody reads it yet.
        compression: lz4 turns ``pages-N.img`` into ``pages-N.blocks``; none keeps the name.
        zero_pages: Those of anonymous private memory. drop: left out of pages and pagemaps; many: left out of a file
            of which they are a sixteenth or more, which pays for writing it anew; keep.
        library: libcoldsnap_io; by default the packaged one.
        workers: Threads that compress.

    Returns:
        What became of them.

    Raises:
        DriverError: A file cannot be written: the disk is full.
        FormatError: CRIU wrote something that this library does not know.
        NativeError: The library is absent, or failed: the disk is full.
    """
    began = time.monotonic()
    library = library or NativeLibrary.load()
    raw = zeros = 0
    with _images_of(capsule_dir) as (capsule_fd, images_fd):
        pagemaps = [Pagemap.read(images_fd, name) for name in _pagemaps(images_fd)]
        for pagemap in pagemaps:
            try:
                kept = _kept(images_fd, pagemap, zero_pages, library)
                spans = [(first * PAGE_BYTES, (end - first) * PAGE_BYTES) for first, end in kept]
                stays = sum(length for _, length in spans)
                if compression == "lz4":
                    _compress(images_fd, pagemap, spans, library, workers)
                elif stays < pagemap.pages * PAGE_BYTES:
                    _copy(images_fd, pagemap, spans)
            except OSError as error:
                raise DriverError(
                    f"the pages of {pagemap.name} cannot be rewritten in {capsule_dir}: {error.strerror}",
                    command="shrink the images",
                ) from error
            raw += pagemap.pages * PAGE_BYTES
            zeros += pagemap.pages * PAGE_BYTES - stays
        sizes = {name: os.stat(name, dir_fd=images_fd).st_size for name in sorted(os.listdir(images_fd))}
        record = evolve(read_tree_record(capsule_fd), image_bytes=sizes)
        os.unlink(TREE, dir_fd=capsule_fd)
        write_tree_record(capsule_fd, record)
    return ShrunkPages(
        compression=compression,
        images=len(pagemaps),
        raw_bytes=raw,
        zero_bytes=zeros,
        stored_bytes=sum(size for name, size in sizes.items() if name.startswith("pages-")),
        image_bytes=sum(sizes.values()),
        seconds=time.monotonic() - began,
    )


@contextmanager
def _images_of(capsule_dir: Path) -> Iterator[tuple[int, int]]:
    flags = os.O_DIRECTORY | os.O_RDONLY | os.O_CLOEXEC
    capsule_fd = os.open(capsule_dir, flags)
    try:
        images_fd = os.open(IMAGES, flags, dir_fd=capsule_fd)
        try:
            yield capsule_fd, images_fd
        finally:
            os.close(images_fd)
    finally:
        os.close(capsule_fd)


def _pagemaps(images_fd: int) -> list[str]:
    return sorted(name for name in os.listdir(images_fd) if name.startswith("pagemap-") and name.endswith(RAW))


def _all_of(pagemap: Pagemap) -> tuple[Range, ...]:
    return ((0, pagemap.pages),) if pagemap.pages else ()


def _kept(images_fd: int, pagemap: Pagemap, zero_pages: ZeroPages, library: NativeLibrary) -> tuple[Range, ...]:
    """Rewrite a pagemap without zero pages; return which pages of the file it still means."""
    if zero_pages == "keep" or pagemap.mm_name is None or not pagemap.pages:
        return _all_of(pagemap)
    with _opened(images_fd, pagemap.pages_name) as pages_fd:
        if zero_pages == "many" and not zeros_may_be_many(pages_fd, pagemap.pages):
            return _all_of(pagemap)
        zero = library.zero_pages(pages_fd, os.fstat(pages_fd).st_size // PAGE_BYTES)
    entries, kept = without_zero_pages(pagemap, anonymous_private(images_fd, pagemap.mm_name), zero)
    dropped = pagemap.pages - sum(end - first for first, end in kept)
    if not dropped or (zero_pages == "many" and dropped < MANY * pagemap.pages):
        return _all_of(pagemap)
    _replace(images_fd, pagemap.name, evolve(pagemap, entries=entries).encode())
    return kept


def zeros_may_be_many(pages_fd: int, pages: int) -> bool:
    """Say whether it is worth to look at every page of a file for zeros, by a few of them.

    Args:
        pages_fd: The file.
        pages: How many pages it has.
    """
    if pages < 4 * SAMPLES:
        return True  # looked through as soon
    choose, zero = random.Random(pages).randrange, bytes(PAGE_BYTES)  # noqa: S311 - anywhere in each stretch
    bounds = [pages * number // SAMPLES for number in range(SAMPLES + 1)]
    chosen = (choose(low, high) for low, high in pairwise(bounds))
    found = sum(os.pread(pages_fd, PAGE_BYTES, page * PAGE_BYTES) == zero for page in chosen)
    return found >= SAMPLED * SAMPLES


def _replace(images_fd: int, name: str, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with _opened(images_fd, name + PARTIAL, flags) as fd, os.fdopen(fd, "wb", closefd=False) as file:
        file.write(data)
    os.rename(name + PARTIAL, name, src_dir_fd=images_fd, dst_dir_fd=images_fd)


def _copy(images_fd: int, pagemap: Pagemap, spans: Sequence[tuple[int, int]]) -> None:
    """Keep just these stretches of a file of pages."""
    name = pagemap.pages_name
    with (
        _opened(images_fd, name) as source,
        _opened(images_fd, name + PARTIAL, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as target,
    ):
        for offset, length in spans:
            done = 0
            while done < length:  # inside the kernel, and shared where the filesystem can
                done += os.copy_file_range(source, target, length - done, offset + done)
    os.rename(name + PARTIAL, name, src_dir_fd=images_fd, dst_dir_fd=images_fd)


def _compress(
    images_fd: int, pagemap: Pagemap, spans: Sequence[tuple[int, int]], library: NativeLibrary, workers: int
) -> None:
    name = pagemap.pages_name.removesuffix(RAW) + SUFFIX
    with (
        _opened(images_fd, pagemap.pages_name) as source,
        _opened(images_fd, name, os.O_RDWR | os.O_CREAT | os.O_EXCL) as target,
    ):
        image, _ = library.pack_pages(
            source, spans, target, block_bytes=BLOCK_BYTES, acceleration=1, workers=workers, path=name
        )
        image.finish(target)
    os.unlink(pagemap.pages_name, dir_fd=images_fd)


def page_images(images_fd: int) -> Mapping[str, str]:
    """Return the compressed files of pages of an image directory: name that CRIU asks for → name of the file.

    Args:
        images_fd: The directory.
    """
    names = sorted(name for name in os.listdir(images_fd) if name.endswith(SUFFIX))
    return {name.removesuffix(SUFFIX) + RAW: name for name in names}


def rebuild_pages(images_fd: int, feed: Feed) -> RebuiltPages:
    """Bring the compressed files of pages of a capsule back, in memory; without any there is nothing to do.

    Args:
        images_fd: The directory of images.
        feed: How.

    Returns:
        Descriptors for CRIU; close them after the thaw.

    Raises:
        DriverError: There are more than CRIU can be given.
        FormatError: One is not a page image.
        IntegrityError: A block of one is not what was written.
        NativeError: One cannot be read, memory is full, or the library is absent.
    """
    found = page_images(images_fd)
    if not found:
        return RebuiltPages()
    if len(found) > MOST_IMAGES:
        raise DriverError(
            f"the image has {len(found)} compressed files of pages, and CRIU can be given {MOST_IMAGES}; capture it "
            'with io.image_compression = "none"',
            command="rebuild the images",
        )
    library = feed.library or NativeLibrary.load()
    fds: dict[str, int] = {}
    with ExitStack() as undo:
        moved = []
        for name, stored in found.items():
            with _opened(images_fd, stored) as source:
                image = read_image(source, stored)
                fds[name] = target = _memory(name, image)
                undo.callback(os.close, target)
                moved.append(library.unpack_pages(source, image, target, workers=feed.workers, backend=feed.backend))
        undo.pop_all()
    return RebuiltPages(fds=fds, moved=tuple(moved))


def _memory(name: str, image: PageImage) -> int:
    fd = os.memfd_create(f"coldsnap-{name}", os.MFD_CLOEXEC)
    os.ftruncate(fd, image.raw_bytes)
    return fd
