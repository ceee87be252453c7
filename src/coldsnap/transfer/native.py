"""The native library: found, checked, loaded, and called with Python's own objects.

The one rule: this module and its ``interface`` are the only ones that touch ctypes. A library is hashed before it is
loaded, and what is loaded is the file that was hashed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.resources
import itertools
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from attrs import frozen

from coldsnap.errors import IntegrityError, NativeError
from coldsnap.transfer.backend import (
    RANGES_KEPT,
    CaptureJob,
    CaptureReceipt,
    HydrationJob,
    HydrationReceipt,
    Tuning,
)
from coldsnap.transfer.interface import (
    ABI,
    SIGNATURES,
    Match,
    Options,
    Part,
    Range,
    Result,
    Statistics,
    Stream,
    addresses,
    extents_of,
    sources_of,
)
from coldsnap.transfer.native_images import NativeImages
from coldsnap.transfer.outcome import ACCESSES, BACKENDS, capture_receipt, hydration_receipt

__all__ = ["ABI", "NativeLibrary", "RingStatistics", "address_of", "packaged", "view_of"]

LIBRARY_NAME = "libcoldsnap_io.so"
HOST = -1
_NO_EXTENT = (1 << 64) - 1
_ALL_LANES = (1 << 32) - 1

_DISCARD, _FILE_SHA256, _READ_BACK, _PAD, _NO_DIRECT_OPEN = 1, 2, 4, 8, 16
_MISMATCH = 7


_loads = itertools.count()


@frozen(kw_only=True)
class RingStatistics:
    """What the library holds between transfers.

    Attributes:
        ring_bytes: Size of the ring.
        registered_bytes: Of them page-locked for the driver.
    """

    ring_bytes: int
    registered_bytes: int


def address_of(buffer: memoryview) -> int:
    """Return the address of a writable buffer's first byte; the buffer must outlive its use."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def view_of(address: int, length: int) -> memoryview:
    """Return a writable view of this process's memory; whoever owns the memory must outlive it."""
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")


@contextlib.contextmanager
def _packaged() -> Iterator[Path]:
    resource = importlib.resources.files("coldsnap.transfer").joinpath(LIBRARY_NAME)
    with importlib.resources.as_file(resource) as path:
        yield path


def _hashed(path: Path, expected: str | None) -> int:
    """Open the library and compare its digest; the descriptor is what gets loaded."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise NativeError(
            f"the native I/O library {path} cannot be opened: {error.strerror}; reinstall coldsnap, "
            "or set io.hydration_backend and io.capture_backend to python"
        ) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NativeError(f"the native I/O library {path} is not a regular file; correct io.native_library")
    if expected is not None:
        with open(fd, "rb", buffering=0, closefd=False) as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != expected:
            os.close(fd)
            raise NativeError(
                f"the native I/O library {path} has SHA-256 {found}, io.native_sha256 expects {expected}; "
                "install that build, or correct the digest"
            )
    return fd


class NativeLibrary(NativeImages):
    """libcoldsnap_io, loaded into this process.

    Implements the hydration and capture backends ``auto``, ``buffered``, ``direct`` and (hydration) ``gds``.
    """

    def __init__(self, path: Path, library: ctypes.CDLL, *, device: int | None = None) -> None:
        self.path = path
        self.device = device
        self._library = library

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None, *, sha256: str | None = None) -> Self:
        """Check and load the library.

        Args:
            path: ``io.native_library``; ``None`` for the packaged one.
            sha256: ``io.native_sha256``: the digest it must have, checked before a byte of it runs.

        Raises:
            NativeError: Absent, another digest, not loadable, or another interface version.
        """
        with contextlib.nullcontext(Path(path)) if path is not None else _packaged() as chosen:
            fd = _hashed(chosen, sha256)
            try:
                # The very file that was hashed, whatever its name leads to by now. glibc answers a name that it has
                # loaded before with what was there then, so no name is used twice.
                library = ctypes.CDLL(f"/proc/self/fd/{'./' * next(_loads)}{fd}")
                for name, (result, arguments) in SIGNATURES.items():
                    function = getattr(library, f"coldsnap_io_{name}")
                    function.restype, function.argtypes = result, arguments
            except (OSError, AttributeError) as error:
                raise NativeError(
                    f"{chosen} is not a usable native I/O library: {error}; reinstall coldsnap"
                ) from error
            finally:
                os.close(fd)
            found = int(library.coldsnap_io_abi_version())
            if found != ABI:
                raise NativeError(
                    f"{chosen} has interface version {found}, coldsnap needs {ABI}; install that of this release"
                )
            return cls(chosen, library)

    def on(self, device: int | None) -> Self:
        """Return the same library for addresses on a CUDA device, or in host memory for ``None``."""
        return type(self)(self.path, self._library, device=device)

    # Failures

    def _check(self, status: int, what: str, path: str = "") -> None:
        if not status:
            return
        error = self._library.coldsnap_io_last_error().contents
        message = error.message.decode(errors="replace")
        if status == _MISMATCH:
            where = path if error.extent == _NO_EXTENT else f"{path}, extent {error.extent}"
            raise IntegrityError(
                "wrong bytes", path=where, expected=error.expected.decode(), actual=error.actual.decode()
            )
        raise NativeError(f"{what} failed: {message}", status=status)

    # Availability

    def load_cuda(self, path: str | os.PathLike[str] | None = None) -> None:
        """Load the CUDA driver from an unusual place, before the first use; ``None`` loads the system's now."""
        self._check(self._library.coldsnap_io_load_cuda(None if path is None else os.fsencode(path)), "loading CUDA")

    def load_cufile(self, path: str | os.PathLike[str] | None = None) -> None:
        """Load cuFile from an unusual place, before the first use; ``None`` loads the system's now."""
        self._check(
            self._library.coldsnap_io_load_cufile(None if path is None else os.fsencode(path)), "loading cuFile"
        )

    def unavailable(self, backend: str, *, capture: bool = False) -> str | None:
        """Return why a backend cannot be tried here, or ``None`` when it can."""
        call = self._library.coldsnap_io_capture_available if capture else self._library.coldsnap_io_hydrate_available
        return self._reason(call(BACKENDS.index(backend), self._device))

    def gds_refuses(self, fd: int) -> str | None:
        """Return why cuFile does not bring this file to this device, or ``None`` after a block of it arrived."""
        return self._reason(self._library.coldsnap_io_probe_gds(fd, self._device))

    def _reason(self, status: int) -> str | None:
        return str(self._library.coldsnap_io_last_error().contents.message.decode(errors="replace")) if status else None

    @property
    def _device(self) -> int:
        return HOST if self.device is None else self.device

    # Transfers

    def hydrate(self, job: HydrationJob) -> HydrationReceipt:
        """Bring extents to their addresses; see :class:`~coldsnap.transfer.backend.HydrationBackend`."""
        options = self._options(job.tuning, job.requested, 0 if job.direct_open else _NO_DIRECT_OPEN)
        return self._read(job, options, "hydrating from")

    def verify(self, job: HydrationJob) -> HydrationReceipt:
        """Read and verify extents without delivering them; their addresses are ignored."""
        flags = _DISCARD | (0 if job.direct_open else _NO_DIRECT_OPEN)
        return self._read(job, self._options(job.tuning, job.requested, flags, HOST), "verifying")

    def _read(self, job: HydrationJob, options: Options, what: str) -> HydrationReceipt:
        result, ranges = Result(), (Range * RANGES_KEPT)()
        status = self._library.coldsnap_io_hydrate(
            job.fd,
            extents_of(job.extents),
            len(job.extents),
            ctypes.byref(options),
            ctypes.byref(result),
            ranges,
            RANGES_KEPT,
        )
        self._check(status, f"{what} {job.path}", job.path)
        return hydration_receipt(job, result, list(ranges))

    def capture(self, job: CaptureJob) -> CaptureReceipt:
        """Write memory to an empty file; see :class:`~coldsnap.transfer.backend.CaptureBackend`."""
        sources = sources_of(job.sources)
        flags = _PAD * job.pad + _FILE_SHA256 * job.file_sha256 + _READ_BACK * job.read_back
        options = self._options(job.tuning, job.requested, flags)
        result = Result()
        status = self._library.coldsnap_io_capture(
            job.fd, sources, len(job.sources), ctypes.byref(options), ctypes.byref(result)
        )
        self._check(status, f"capturing to {job.path}", job.path)
        return capture_receipt(job, result, list(sources))

    def _options(self, tuning: Tuning, backend: str, flags: int, device: int | None = None) -> Options:
        return Options(
            abi=ABI,
            backend=BACKENDS.index(backend),
            access=ACCESSES.index(tuning.access),
            queue_depth=tuning.queue_depth,
            chunk_bytes=tuning.chunk_bytes,
            slice_bytes=tuning.slice_bytes,
            threads=tuning.threads,
            cuda_device=self._device if device is None else device,
            flags=flags,
        )

    # The rest

    def resident_pages(self, fd: int, offset: int, length: int, block_bytes: int) -> tuple[int, ...]:
        """Return how many pages of each block the page cache holds.

        Raises:
            NativeError: The kernel does not say.
        """
        count = -(-length // block_bytes)
        pages = (ctypes.c_uint64 * count)()
        status = self._library.coldsnap_io_residency(fd, offset, length, block_bytes, pages, count)
        self._check(status, "asking for resident pages")
        return tuple(pages)

    def crc32(self, data: memoryview, crc: int = 0) -> int:
        """Return the CRC-32 of a contiguous buffer appended to ``crc``."""
        with addresses(data) as (place,):
            return int(self._library.coldsnap_io_crc32(crc, place, data.nbytes))

    def crc32_combine(self, first: int, second: int, second_length: int) -> int:
        """Return the CRC-32 of two pieces one after the other."""
        return int(self._library.coldsnap_io_crc32_combine(first, second, second_length))

    def sha256(self, data: memoryview) -> bytes:
        """Return the SHA-256 of a writable buffer."""
        digest = (ctypes.c_uint8 * 32)()
        self._library.coldsnap_io_sha256(address_of(data) if data.nbytes else 0, data.nbytes, digest)
        return bytes(digest)

    @property
    def sha256_lanes(self) -> int:
        """How many streams a core hashes at once; below 2 this library is no faster than others."""
        return int(self._library.coldsnap_io_sha256_lanes())

    def limit_sha256_lanes(self, most: int | None) -> None:
        """Take no more than so many in this whole process, for tests and measurements; ``None``: all there are."""
        self._library.coldsnap_io_sha256_limit(_ALL_LANES if most is None else most)

    def sha256_begin(self) -> Stream:
        """Begin a stream; one thread at a time may use it."""
        stream = Stream()
        self._library.coldsnap_io_sha256_begin(ctypes.byref(stream))
        return stream

    def sha256_update(self, parts: Sequence[tuple[Stream, memoryview]]) -> None:
        """Add a contiguous buffer to each of several different streams."""
        with addresses(*(data for _, data in parts)) as places:
            told = (Part * len(parts))()
            for part, (stream, data), place in zip(told, parts, places, strict=True):
                part.stream, part.data, part.length = ctypes.pointer(stream), place, data.nbytes
            self._library.coldsnap_io_sha256_update(told, len(parts))

    def sha256_end(self, stream: Stream) -> bytes:
        """Return the digest of a stream."""
        digest = (ctypes.c_uint8 * 32)()
        self._library.coldsnap_io_sha256_end(ctypes.byref(stream), digest)
        return bytes(digest)

    def crc32_copy(self, crc: int, target: memoryview, source: memoryview) -> int:
        """Copy a contiguous buffer to the beginning of a writable one, and return its CRC-32 appended to ``crc``."""
        if target.nbytes < source.nbytes:
            raise ValueError(f"{source.nbytes} bytes do not fit into {target.nbytes}")
        with addresses(target, source) as (to, place):
            return int(self._library.coldsnap_io_crc32_copy(crc, to, place, source.nbytes))

    def search(
        self, fd: int, path: str, offset: int, length: int, patterns: Sequence[bytes]
    ) -> tuple[tuple[int, int], ...]:
        """Find pieces of memory in a range of a file, at any byte.

        Args:
            fd: Open for reading.
            path: For errors.
            offset: First byte where a pattern may begin.
            length: Bytes after it where one may begin; a pattern may reach beyond them, not beyond the file.
            patterns: At most 1024 different ones, all of one size of 64 to 4096 bytes.

        Returns:
            File offset and index of the pattern of every place, in file order.

        Raises:
            NativeError: The file cannot be read, or is shorter.
        """
        joined, found, capacity = b"".join(patterns), ctypes.c_uint64(0), 1024
        while True:
            matches = (Match * capacity)()
            status = self._library.coldsnap_io_search(
                *(fd, offset, length, joined, len(patterns), len(patterns[0]) if patterns else 0),
                *(matches, capacity, ctypes.byref(found)),
            )
            self._check(status, f"searching {path}")
            if found.value <= capacity:
                return tuple((match.file_offset, match.pattern) for match in matches[: found.value])
            capacity = found.value

    def memcpy(self, destination: int, source: int, length: int, threads: int) -> None:
        """Copy between host addresses with so many threads."""
        self._check(self._library.coldsnap_io_memcpy(destination, source, length, threads), "copying")

    def statistics(self) -> RingStatistics:
        """Return what the library holds now."""
        statistics = Statistics()
        self._library.coldsnap_io_read_statistics(ctypes.byref(statistics))
        return RingStatistics(ring_bytes=statistics.ring_bytes, registered_bytes=statistics.registered_bytes)

    def release(self) -> None:
        """Give the page-locked ring back: before this process is frozen, and when memory is short."""
        self._check(self._library.coldsnap_io_release(), "releasing the ring")


@functools.cache
def packaged() -> NativeLibrary | None:
    """Load the library of this installation, once; ``None`` where there is none (a source tree never built).

    For work whose result is the same without it.
    """
    present = importlib.resources.files("coldsnap.transfer").joinpath(LIBRARY_NAME).is_file()
    return NativeLibrary.load() if present else None
