"""The reference backend: Python alone, through a memory provider.

The one rule: it is simple enough to be right by reading, and every other backend must equal it.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import time
import zlib
from collections.abc import Iterator

from coldsnap.errors import IntegrityError, NativeError
from coldsnap.transfer.backend import (
    CaptureJob,
    CaptureReceipt,
    FileExtent,
    HydrationJob,
    HydrationReceipt,
    Source,
    SourceDigest,
    StageTimes,
)
from coldsnap.transfer.memory import PreservedMemory

__all__ = ["PythonBackend"]

PAGE_BYTES = 4096
WINDOW_BYTES = 16 << 20


class PythonBackend:
    """Hydrates out of a mapping and captures with plain writes, one thread, bounded memory."""

    def __init__(self, memory: PreservedMemory) -> None:
        self._memory = memory

    def hydrate(self, job: HydrationJob) -> HydrationReceipt:
        """Move and verify one extent after the other."""
        began = time.monotonic_ns()
        size = os.fstat(job.fd).st_size
        for index, extent in enumerate(job.extents):
            if extent.file_offset + extent.length > size:
                raise NativeError(
                    f"hydrating from {job.path} failed: extent {index} ends at byte "
                    f"{extent.file_offset + extent.length} of a file of {size} bytes",
                )
        verified = 0
        for index, extent in enumerate(job.extents):
            verified += self._deliver(job, index, extent)
        self._memory.synchronize()
        moved = sum(extent.length for extent in job.extents)
        return HydrationReceipt(
            requested=job.requested,
            effective="python",
            reason=job.reason,
            path=job.path,
            filesystem=job.filesystem,
            bytes=moved,
            buffered_bytes=moved,
            times=StageTimes(total_ns=time.monotonic_ns() - began),
            verified_extents=verified,
            access="map",
        )

    def _deliver(self, job: HydrationJob, index: int, extent: FileExtent) -> bool:
        crc, sha256 = 0, hashlib.sha256()
        address = extent.address
        for window in _windows(job.fd, extent.file_offset, extent.length):
            with window:
                self._memory.copy_from_host(address, window)
                address += window.nbytes
                if extent.crc32 is not None:
                    crc = zlib.crc32(window, crc)
                if extent.sha256 is not None:
                    sha256.update(window)
        where = f"{job.path}, extent {index}"
        if extent.crc32 not in (None, crc):
            raise IntegrityError("wrong bytes", path=where, expected=f"{extent.crc32:08x}", actual=f"{crc:08x}")
        if extent.sha256 not in (None, sha256.digest()):
            expected = extent.sha256.hex() if extent.sha256 else ""
            raise IntegrityError("wrong bytes", path=where, expected=expected, actual=sha256.hexdigest())
        return extent.crc32 is not None

    def capture(self, job: CaptureJob) -> CaptureReceipt:
        """Write one source after the other, then sync."""
        began = time.monotonic_ns()
        file_bytes = _require_order(job)
        try:
            os.ftruncate(job.fd, file_bytes)
            digests = tuple(self._write(job.fd, source) for source in job.sources)
            os.fdatasync(job.fd)
            file_sha256 = _sha256(job.fd, file_bytes) if job.file_sha256 else None
            if job.read_back:
                self._compare(job)
        except OSError as error:
            raise NativeError(f"capturing to {job.path} failed: {error.strerror}", status=error.errno or 0) from error
        moved = sum(source.length for source in job.sources)
        return CaptureReceipt(
            requested=job.requested,
            effective="python",
            reason="requested",
            path=job.path,
            filesystem=job.filesystem,
            bytes=moved,
            buffered_bytes=moved,
            times=StageTimes(total_ns=time.monotonic_ns() - began),
            file_bytes=file_bytes,
            digests=digests,
            file_sha256=file_sha256,
            read_back=job.read_back,
        )

    def _write(self, fd: int, source: Source) -> SourceDigest:
        crc, sha256, offset = 0, hashlib.sha256(), source.file_offset
        for piece in self._pieces(source):
            crc = zlib.crc32(piece, crc)
            if source.verification == "crc32+sha256":
                sha256.update(piece)
            _write_all(fd, piece, offset)
            offset += piece.nbytes
        return SourceDigest(
            crc32=None if source.verification == "none" else crc,
            sha256=sha256.digest() if source.verification == "crc32+sha256" else None,
        )

    def _pieces(self, source: Source) -> Iterator[memoryview]:
        # A mapping of its own: freed heap keeps these bytes, and a process image made later would have them.
        with mmap.mmap(-1, max(min(WINDOW_BYTES, source.length), 1)) as buffer, memoryview(buffer) as whole:
            for done in range(0, source.length, WINDOW_BYTES):
                with whole[: min(WINDOW_BYTES, source.length - done)] as piece:
                    self._memory.copy_to_host(source.address + done, piece)
                    yield piece

    def _compare(self, job: CaptureJob) -> None:
        os.posix_fadvise(job.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        for index, source in enumerate(job.sources):
            done = 0
            for piece in self._pieces(source):
                found = os.pread(job.fd, piece.nbytes, source.file_offset + done)
                if found != piece:
                    raise IntegrityError(
                        "wrong bytes",
                        path=f"{job.path}, extent {index}",
                        expected=f"{zlib.crc32(piece):08x}",
                        actual=f"{zlib.crc32(found):08x}",
                    )
                done += piece.nbytes


def _windows(fd: int, offset: int, length: int) -> Iterator[memoryview]:
    """Map a stretch of a file piece by piece."""
    while length:
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        size = min(length, WINDOW_BYTES)
        with (
            mmap.mmap(fd, offset - start + size, prot=mmap.PROT_READ, offset=start) as pages,
            memoryview(pages) as whole,
        ):
            yield whole[offset - start :]
        offset += size
        length -= size


def _require_order(job: CaptureJob) -> int:
    end = 0
    for index, source in enumerate(job.sources):
        if source.file_offset < end:
            raise NativeError(
                f"capturing to {job.path} failed: extent {index} starts before the end of the one before it"
            )
        end = source.file_offset + source.length
        end += -end % PAGE_BYTES if job.pad else 0
    return end


def _write_all(fd: int, piece: memoryview, offset: int) -> None:
    while piece.nbytes:
        done = os.pwrite(fd, piece, offset)
        if not done:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        piece, offset = piece[done:], offset + done


def _sha256(fd: int, size: int) -> bytes:
    digest = hashlib.sha256()
    for window in _windows(fd, 0, size):
        with window:
            digest.update(window)
    return digest.digest()
