"""From a file to final addresses: open it, choose a backend, move.

The one rule: the filesystem behind the *opened* file decides what ``auto`` means; what was asked for by name is done or
refused. Neither this module nor a backend keeps the file open.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from attrs import evolve

from coldsnap.errors import NativeError, UnsupportedError
from coldsnap.host.mounts import choose_io, filesystem_behind
from coldsnap.transfer.backend import BackendName, FileExtent, HydrationJob, HydrationReceipt, Tuning
from coldsnap.transfer.memory import PreservedMemory
from coldsnap.transfer.native import NativeLibrary
from coldsnap.transfer.reference import PythonBackend

__all__ = ["hydrate", "opened", "verify"]


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[int]:
    """Open a regular file for reading: links are resolved first, and the leaf must not be one by then.

    Model files are links to blobs, and the filesystem of the blob is the one that matters.
    """
    real = os.path.realpath(path)
    try:
        # Without O_NONBLOCK the open of a fifo would wait for somebody who writes into it.
        fd = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise NativeError(f"{os.fspath(path)} cannot be opened: {error.strerror}", status=error.errno or 0) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise NativeError(f"{os.fspath(path)} is not a regular file")
        yield fd
    finally:
        os.close(fd)


def hydrate(
    path: str | os.PathLike[str],
    extents: Sequence[FileExtent],
    *,
    memory: PreservedMemory,
    library: NativeLibrary | None,
    backend: BackendName = "auto",
    preverified: bool = False,
    tuning: Tuning | None = None,
) -> HydrationReceipt:
    """Bring extents of a file to their final addresses.

    Args:
        path: The file; links are followed.
        extents: What goes where. Their digests are checked on the way.
        memory: Who owns the addresses.
        library: The native library; needed for every backend but python.
        backend: ``io.hydration_backend``. ``auto``: around the page cache where the filesystem is a local disk and
            the page cache does not hold the range, through it everywhere else.
        preverified: ``io.verify_mode = "preverified"``: the file was verified before, so digests are not compared.
        tuning: How to use the machine.

    Returns:
        The receipt, after everything has arrived, was verified and synchronised.

    Raises:
        NativeError: The transfer failed; the destination is garbage, and the call may be repeated.
        IntegrityError: The file has other bytes than expected.
        UnsupportedError: ``gds`` without ``preverified``, or without a path for it.
    """
    if backend == "gds" and not preverified:
        raise UnsupportedError(
            "gds moves bytes past the host, where nothing can verify them",
            field="io.hydration_backend",
            works='io.verify_mode = "preverified", or another backend',
        )
    with opened(path) as fd:
        job = _job(fd, path, extents, backend, tuning)
        if preverified:
            job = evolve(job, extents=[evolve(extent, crc32=None, sha256=None) for extent in extents])
        if backend == "python":
            return PythonBackend(memory).hydrate(job)
        native = _require(library, backend).on(memory.device)
        if backend == "gds":
            _require_gds(native, job)
        memory.synchronize()  # the transfer has streams of its own
        return native.hydrate(job)


def verify(
    path: str | os.PathLike[str],
    extents: Sequence[FileExtent],
    *,
    library: NativeLibrary,
    backend: BackendName = "auto",
    tuning: Tuning | None = None,
) -> HydrationReceipt:
    """Compare extents of a file with their digests, without delivering them.

    Args:
        path: The file; links are followed.
        extents: With digests; their addresses are ignored.
        library: The native library.
        backend: As for :func:`hydrate`, without python and gds.
        tuning: How to use the machine.

    Raises:
        NativeError: The file could not be read.
        IntegrityError: The file has other bytes than expected.
    """
    with opened(path) as fd:
        return library.verify(_job(fd, path, extents, backend, tuning))


def _job(
    fd: int,
    path: str | os.PathLike[str],
    extents: Sequence[FileExtent],
    backend: BackendName,
    tuning: Tuning | None,
) -> HydrationJob:
    filesystem = filesystem_behind(fd, path=os.fspath(path))
    chosen, reason = choose_io(filesystem, backend)
    return HydrationJob(
        fd=fd,
        path=os.fspath(path),
        extents=tuple(extents),
        requested=backend,
        reason=reason,
        filesystem=filesystem,
        direct_open=chosen == "direct",
        tuning=tuning or Tuning(),
    )


def _require(library: NativeLibrary | None, backend: str) -> NativeLibrary:
    if library is None:
        raise NativeError(f"the {backend} backend needs the native I/O library, and none was loaded")
    return library


def _require_gds(native: NativeLibrary, job: HydrationJob) -> None:
    why = native.gds_refuses(job.fd)
    if why is not None:
        raise UnsupportedError(
            f"gds cannot bring {job.path} to CUDA device {native.device}: {why}",
            field="io.hydration_backend",
            works="auto, direct or buffered",
        )
