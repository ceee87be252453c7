"""What a transfer is: extents of a file, final addresses, and the receipt of what happened.

The one rule: a backend returns a receipt only after every byte has arrived, was verified and synchronised; in every
other case it raises, and the destination must be taken for garbage. An explicit backend never degrades.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from attrs import field, frozen, validators

from coldsnap.host.facts import FilesystemFacts

__all__ = [
    "Access",
    "BackendName",
    "CaptureBackend",
    "CaptureReceipt",
    "FileExtent",
    "FileRange",
    "HydrationBackend",
    "HydrationReceipt",
    "Source",
    "SourceDigest",
    "StageTimes",
    "Tuning",
]

PAGE_BYTES = 4096
MIB = 1 << 20

BackendName = Literal["auto", "python", "buffered", "direct", "gds"]
Access = Literal["auto", "read", "map", "register"]
Verification = Literal["none", "crc32", "crc32+sha256"]


def _digest(_instance: object, _attribute: object, value: bytes | None) -> None:
    if value is not None and len(value) != 32:
        raise ValueError(f"a SHA-256 digest has 32 bytes, not {len(value)}")


def _pages(_instance: object, attribute: object, value: int) -> None:
    if value % PAGE_BYTES:
        raise ValueError(f"{getattr(attribute, 'name', 'a size')} is not a multiple of {PAGE_BYTES} bytes: {value}")


@frozen(kw_only=True)
class FileExtent:
    """A stretch of a file and where it goes.

    Attributes:
        file_offset: First byte in the file.
        address: Final address: on the device of the memory provider, or in this process.
        length: Bytes; 0 is allowed.
        crc32: Expected CRC-32 (zlib's), ``None`` for no check.
        sha256: Expected SHA-256, 32 bytes; needs ``crc32``.
    """

    file_offset: int = field(validator=validators.ge(0))
    address: int = field(validator=validators.ge(0))
    length: int = field(validator=validators.ge(0))
    crc32: int | None = None
    sha256: bytes | None = field(default=None, validator=_digest)

    def __attrs_post_init__(self) -> None:
        if self.sha256 is not None and self.crc32 is None:
            raise ValueError("an extent with a SHA-256 needs its CRC-32, too")


@frozen(kw_only=True)
class Source:
    """A stretch of memory and where it goes in a new file.

    Attributes:
        address: First byte, on the device of the memory provider or in this process.
        file_offset: Where it goes; sources are in file order and do not overlap.
        length: Bytes.
        verification: Which digests to make of it.
    """

    address: int = field(validator=validators.ge(0))
    file_offset: int = field(validator=validators.ge(0))
    length: int = field(validator=validators.ge(0))
    verification: Verification = "none"


@frozen(kw_only=True)
class SourceDigest:
    """The digests made of one source: those it asked for."""

    crc32: int | None = None
    sha256: bytes | None = None


@frozen(kw_only=True)
class Tuning:
    """How a native transfer uses the machine.

    Attributes:
        queue_depth: Chunks in flight, 1 to 64. The ring holds at most ``queue_depth * chunk_bytes``.
        chunk_bytes: Bytes of a chunk; a multiple of 4096. Chunks are moved in slices that fit the caches.
        slice_bytes: Bytes of one read and one copy, at most a chunk; 0: chosen.
        threads: Threads that read, verify and copy; 0: chosen.
        access: How buffered ranges leave the page cache; ``auto``: read, or on the host the faster of read and map.
    """

    queue_depth: int = field(default=4, validator=[validators.ge(1), validators.le(64)])
    chunk_bytes: int = field(default=64 * MIB, validator=[validators.ge(PAGE_BYTES), _pages])
    slice_bytes: int = field(default=0, validator=[validators.ge(0), _pages])
    threads: int = field(default=0, validator=validators.ge(0))
    access: Access = "auto"


@frozen(kw_only=True)
class FileRange:
    """A stretch of the file that went one way.

    Attributes:
        file_offset: First byte.
        length: Bytes, gaps between extents included.
        backend: buffered, direct or gds.
        reason: Why that: for example ``resident`` or ``not-resident``.
    """

    file_offset: int
    length: int
    backend: str
    reason: str


@frozen(kw_only=True)
class StageTimes:
    """Where the time went. Stages are sums over threads, so they may exceed the total; all in ns.

    Attributes:
        initialization_ns: Layout, threads and ring; wall clock.
        io_ns: Reading or writing the file.
        wait_ns: Waiting for the copies of a stage.
        checksum_ns: Verifying.
        enqueue_ns: Handing copies to the driver, or copying on the host.
        synchronize_ns: The last copies.
        durability_ns: fdatasync; wall clock.
        read_back_ns: Comparing the durable file; wall clock.
        total_ns: All of it; wall clock.
    """

    initialization_ns: int = 0
    io_ns: int = 0
    wait_ns: int = 0
    checksum_ns: int = 0
    enqueue_ns: int = 0
    synchronize_ns: int = 0
    durability_ns: int = 0
    read_back_ns: int = 0
    total_ns: int = 0


@frozen(kw_only=True)
class _Receipt:
    """What both directions say.

    Attributes:
        requested: The backend asked for.
        effective: What was used: python, buffered, direct, ``direct+buffered-edges``, ``direct+buffered`` or gds.
        reason: Why.
        path: The file.
        filesystem: The filesystem behind it: type, source and mount point.
        fallback_errno: Error of the direct open that ``auto`` gave up, else ``None``.
        bytes: Bytes moved to or from final addresses.
        buffered_bytes: Bytes through the page cache.
        direct_bytes: Bytes around it.
        threads: Threads used.
        slice_bytes: Bytes of one read or write.
        ring_bytes: Page-locked bytes used.
        times: Where the time went.
    """

    requested: str
    effective: str
    reason: str
    path: str
    filesystem: FilesystemFacts
    fallback_errno: int | None = None
    bytes: int = 0
    buffered_bytes: int = 0
    direct_bytes: int = 0
    threads: int = 1
    slice_bytes: int = 0
    ring_bytes: int = 0
    times: StageTimes = field(factory=StageTimes)

    @property
    def seconds(self) -> float:
        """Duration, s."""
        return self.times.total_ns / 1e9

    def details(self) -> Mapping[str, float | int | str]:
        """Return the figures by name, as receipts of plans keep them."""
        return {
            "path": self.path,
            "filesystem_type": self.filesystem.type,
            "mount_source": self.filesystem.source,
            "mountpoint": self.filesystem.mountpoint,
            "fallback_errno": self.fallback_errno or 0,
            "buffered_bytes": self.buffered_bytes,
            "direct_bytes": self.direct_bytes,
            "threads": self.threads,
            "ring_bytes": self.ring_bytes,
            "io_s": self.times.io_ns / 1e9,
            "checksum_s": self.times.checksum_ns / 1e9,
        }


@frozen(kw_only=True)
class HydrationReceipt(_Receipt):
    """Bytes have arrived at their addresses.

    Attributes:
        verified_extents: Extents whose digests were compared.
        edge_bytes: Bytes of unaligned edges, which direct transfers read through the page cache.
        access: How buffered ranges left the page cache: read, map or register; empty when there were none.
        ranges: Stretches of the file and how each went, in file order; the first :data:`RANGES_KEPT`.
        range_count: How many there were.
    """

    verified_extents: int = 0
    edge_bytes: int = 0
    access: str = ""
    ranges: tuple[FileRange, ...] = ()
    range_count: int = 0


RANGES_KEPT = 256


@frozen(kw_only=True)
class CaptureReceipt(_Receipt):
    """A file has appeared under its final name, durable.

    Attributes:
        file_bytes: Size of the file.
        digests: One for each source.
        file_sha256: Digest of the whole file, when asked for.
        read_back: Whether the durable file was read again and compared.
    """

    file_bytes: int = 0
    digests: tuple[SourceDigest, ...] = ()
    file_sha256: bytes | None = None
    read_back: bool = False


class HydrationBackend(Protocol):
    """Something that brings extents of an open file to their addresses."""

    def hydrate(self, job: HydrationJob) -> HydrationReceipt:
        """Move, verify, synchronise; return only then.

        Raises:
            NativeError: The transfer failed.
            IntegrityError: The bytes are not those expected.
        """


class CaptureBackend(Protocol):
    """Something that writes memory to an empty file and makes it durable."""

    def capture(self, job: CaptureJob) -> CaptureReceipt:
        """Copy, sum, write, sync; return only then.

        Raises:
            NativeError: The transfer failed; the file is garbage.
        """


@frozen(kw_only=True)
class HydrationJob:
    """One hydrate, as a backend gets it.

    Attributes:
        fd: The file, open for reading.
        path: Its name, for messages.
        extents: What goes where.
        requested: The backend asked for.
        reason: Why this backend, as far as the filesystem decides it.
        filesystem: Where the file lies.
        direct_open: Whether ``auto`` may open it around the page cache.
        tuning: How to use the machine.
    """

    fd: int
    path: str
    extents: Sequence[FileExtent]
    requested: str
    reason: str
    filesystem: FilesystemFacts
    direct_open: bool = True
    tuning: Tuning = field(factory=Tuning)


@frozen(kw_only=True)
class CaptureJob:
    """One capture, as a backend gets it.

    Attributes:
        fd: The file, empty, open for reading and writing.
        path: Its final name, for messages.
        sources: What goes where, in file order.
        requested: The backend asked for.
        filesystem: Where the file will lie.
        pad: Fill each extent up to 4096 bytes with zeros.
        file_sha256: Make the digest of the whole file.
        read_back: Read the durable file again and compare it.
        tuning: How to use the machine.
    """

    fd: int
    path: str
    sources: Sequence[Source]
    requested: str
    filesystem: FilesystemFacts
    pad: bool = True
    file_sha256: bool = False
    read_back: bool = False
    tuning: Tuning = field(factory=Tuning)
