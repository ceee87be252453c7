"""From memory to a new file: durable before it has a name.

The one rule: the bytes go to a partial name; the final name appears by one rename after fdatasync and, if asked for,
after the durable bytes were read again and compared. Whatever fails leaves nothing under the final name.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from coldsnap.artifact.durable import FaultPoint, staged_file, unharmed
from coldsnap.errors import NativeError
from coldsnap.host.mounts import filesystem_behind
from coldsnap.transfer.backend import CaptureJob, CaptureReceipt, Source, Tuning
from coldsnap.transfer.memory import PreservedMemory
from coldsnap.transfer.native import NativeLibrary
from coldsnap.transfer.reference import PythonBackend

__all__ = ["CaptureBackendName", "capture", "packed"]

CaptureBackendName: TypeAlias = Literal["auto", "python", "buffered", "direct"]


def capture(
    path: str | os.PathLike[str],
    sources: Sequence[Source],
    *,
    memory: PreservedMemory,
    library: NativeLibrary | None,
    backend: CaptureBackendName = "auto",
    pad: bool = True,
    file_sha256: bool = False,
    read_back: bool = False,
    tuning: Tuning | None = None,
    at: FaultPoint = unharmed,
) -> CaptureReceipt:
    """Write memory to a file, which replaces one of that name when it is complete.

    Args:
        path: The final name.
        sources: What goes where, in file order, without overlap.
        memory: Who owns the addresses.
        library: The native library; needed for every backend but python.
        backend: ``io.capture_backend``. ``auto``: around the page cache for an aligned layout where the filesystem
            takes it, through it otherwise. ``direct``: refused for an unaligned layout.
        pad: Fill each extent up to 4096 bytes with zeros.
        file_sha256: Make the digest of the whole file, gaps counted as zeros.
        read_back: Read the durable file again, from the disk where it can be, and compare it.
        tuning: How to use the machine.
        at: Fault point.

    Returns:
        The receipt, after the file is durable under its final name.

    Raises:
        NativeError: The transfer failed: nothing new is under the final name.
        IntegrityError: The durable file has other bytes than the memory.
    """
    final = Path(path)
    with staged_file(final.parent, final.name, at=at) as staged:
        fd = staged.stream.fileno()
        job = CaptureJob(
            fd=fd,
            path=str(final),
            sources=tuple(sources),
            requested=backend,
            filesystem=filesystem_behind(fd, path=str(final), real=str(staged.path)),
            pad=pad,
            file_sha256=file_sha256,
            read_back=read_back,
            tuning=tuning or Tuning(),
        )
        memory.synchronize()  # the transfer has streams of its own
        receipt = _backend(backend, memory, library).capture(job)
        staged.publish(final)
    return receipt


def packed(
    regions: Sequence[tuple[int, int]], *, verification: Literal["none", "crc32", "crc32+sha256"]
) -> list[Source]:
    """Lay stretches of memory one after the other, each from a multiple of 4096 bytes.

    Args:
        regions: ``(address, length)`` of each.
        verification: Which digests to make of each.
    """
    sources, offset = [], 0
    for address, length in regions:
        sources.append(Source(address=address, file_offset=offset, length=length, verification=verification))
        offset += -(-length // 4096) * 4096
    return sources


def _backend(
    backend: CaptureBackendName, memory: PreservedMemory, library: NativeLibrary | None
) -> NativeLibrary | PythonBackend:
    if backend == "python":
        return PythonBackend(memory)
    if library is None:
        raise NativeError(f"the {backend} backend needs the native I/O library, and none was loaded")
    return library.on(memory.device)
