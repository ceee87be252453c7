"""At a wake: the copies of the load are done again, out of the pinned safetensors.

The one rule: plain copies go straight to their final address and are verified on the way; everything else is verified
where it has arrived. Nothing counts as recovered before the checksum that the capture took is met.
"""

from __future__ import annotations

import os
import re
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from attrs import define, field, frozen

from coldsnap.artifact.manifest import RecoveryManifest
from coldsnap.artifact.replay import ReplayCopy
from coldsnap.engines.weights.batches import Batch, batches
from coldsnap.engines.weights.source import Staging
from coldsnap.errors import IntegrityError
from coldsnap.transfer.backend import BackendName, FileExtent, HydrationReceipt, Tuning
from coldsnap.transfer.hydrate import hydrate, opened
from coldsnap.transfer.memory import HostMemory, PreservedMemory
from coldsnap.transfer.native import NativeLibrary

__all__ = ["LoaderBackend", "Loading", "ReplayReceipt", "replay"]

LoaderBackend = Literal["auto", "direct", "buffered", "mmap", "torch"]

_EXTENT = re.compile(r", extent (\d+)$")
_OBSERVED = 8  # files that a receipt describes one by one


@frozen(kw_only=True)
class Loading:
    """How a checkpoint is read.

    Attributes:
        library: The native library; without one, auto reads through a mapping.
        backend: ``weights.recovery.loader_backend``.
        tuning: Of the transfers.
        staging_bytes: ``weights.recovery.staging_bytes``.
        verify_bytes: ``weights.recovery.verify_bytes``.
    """

    library: NativeLibrary | None = None
    backend: LoaderBackend = "auto"
    tuning: Tuning = field(factory=Tuning)
    staging_bytes: int = 256 << 20
    verify_bytes: int = 0

    @property
    def transfer(self) -> BackendName:
        """What it is called by the transfers."""
        if self.backend in ("mmap", "torch") or (self.backend == "auto" and self.library is None):
            return "python"
        return "direct" if self.backend == "direct" else "buffered" if self.backend == "buffered" else "auto"


@define(kw_only=True)
class ReplayReceipt:
    """What was done; the figures grow while it is done.

    Attributes:
        requested: The loader backend.
        effective: What the transfers did, and torch where it read.
        reason: Why, by the filesystem.
        bytes: Written to final addresses.
        verified_extents: Copies and extents whose checksum was met.
    """

    requested: str
    effective: str = ""
    reason: str = ""
    bytes: int = 0
    seconds: float = 0.0
    verified_extents: int = 0
    read_bytes: int = 0
    reads: int = 0
    io_s: float = 0.0
    verification_s: float = 0.0
    sampled_bytes: int = 0
    plain_copies: int = 0
    staged_copies: int = 0
    slab_bytes: int = 0
    files: int = 0
    tensors: int = 0
    transfers: list[HydrationReceipt] = field(factory=list)

    def details(self) -> Mapping[str, Any]:
        """Return the figures by name."""
        return {
            "files": self.files,
            "tensors": self.tensors,
            "plain_copies": self.plain_copies,
            "staged_copies": self.staged_copies,
            "local_read_bytes": self.read_bytes,
            "local_read_extents": self.reads,
            "staging_buffer_bytes": self.slab_bytes,
            "io_s": self.io_s,
            "verification_s": self.verification_s,
            "verified_sample_bytes": self.sampled_bytes,
            "distributed_world_size": 1,
            "observed": [_observed(one) for one in _one_for_each_file(self.transfers)[:_OBSERVED]],
        }


def replay(
    manifest: RecoveryManifest,
    *,
    memory: PreservedMemory,
    loading: Loading,
    bases: Sequence[int] | None = None,
    between: Callable[[str], None] = lambda _: None,
) -> ReplayReceipt:
    """Do every copy again.

    Args:
        manifest: With copies; its allocations are mapped.
        memory: Where to.
        loading: How.
        bases: Where each allocation begins in this process; None: where it was.
        between: Called with ``plain``, ``staged`` and ``verify`` before each.

    Raises:
        IntegrityError: A tensor of the checkpoint is not the captured one; it is named. The memory is garbage.
        NativeError: A transfer failed; the memory is garbage, and the call may be repeated.
    """
    return _Replay(manifest, memory, loading, bases).run(between)


class _Replay:
    def __init__(
        self, manifest: RecoveryManifest, memory: PreservedMemory, loading: Loading, bases: Sequence[int] | None
    ) -> None:
        self._manifest = manifest
        self._memory = memory
        self._loading = loading
        self._bases = [one.address for one in manifest.allocations] if bases is None else bases
        straight = loading.backend != "torch"
        self._plain = [one for one in manifest.copies if straight and one.crc32 is not None]
        self._staged = [one for one in manifest.copies if not (straight and one.crc32 is not None)]
        self._receipt = ReplayReceipt(
            requested=loading.backend,
            plain_copies=len(self._plain),
            staged_copies=len(self._staged),
            files=len(manifest.files),
            tensors=len({(one.file, one.tensor) for one in manifest.copies}),
        )

    def run(self, between: Callable[[str], None]) -> ReplayReceipt:
        began = time.monotonic()
        between("plain")
        self._move_plain()
        between("staged")
        if self._loading.backend == "torch":
            self._read_with_torch()
        else:
            self._move_staged()
        self._memory.synchronize()
        between("verify")
        with self._timed("verification_s"):
            self._verify_staged_extents()
            self._verify_samples()
        self._receipt.seconds = time.monotonic() - began
        self._settle_names()
        return self._receipt

    # Straight to the final address

    def _move_plain(self) -> None:
        by_file: defaultdict[int, list[ReplayCopy]] = defaultdict(list)
        for copy in self._plain:
            by_file[copy.file].append(copy)
        for file, copies in sorted(by_file.items()):
            copies.sort(key=lambda copy: copy.file_offset + copy.source.offset)
            self._transfer(file, copies, [self._bases[copy.allocation] + copy.target.offset for copy in copies])
            self._receipt.bytes += sum(copy.target.bytes for copy in copies)
            self._receipt.verified_extents += len(copies)

    def _transfer(
        self, file: int, copies: Sequence[ReplayCopy], addresses: Sequence[int], into: PreservedMemory | None = None
    ) -> None:
        path = self._manifest.files[file].path
        extents = [
            FileExtent(
                file_offset=copy.file_offset + copy.source.offset,
                address=address,
                length=copy.source.span,
                crc32=copy.crc32 if into is None else None,
            )
            for copy, address in zip(copies, addresses, strict=True)
        ]
        with self._timed("io_s"), _named(copies, path):
            receipt = hydrate(
                path,
                extents,
                memory=into or self._memory,
                library=self._loading.library,
                backend=self._loading.transfer,
                tuning=self._loading.tuning,
            )
        self._receipt.transfers.append(receipt)
        self._receipt.read_bytes += receipt.bytes
        self._receipt.reads += len(extents)

    # Through a slab

    def _move_staged(self) -> None:
        if not self._staged:
            return
        slab = HostMemory()
        try:
            for batch in batches(self._staged, slab_bytes=self._loading.staging_bytes):
                self._move_batch(slab, batch)
        finally:
            slab.close()

    def _move_batch(self, slab: HostMemory, batch: Batch) -> None:
        from coldsnap.engines.weights.staged import deliver, source_in_slab  # noqa: PLC0415  most models need no torch

        regions = [region for region in slab.regions() if region.size_bytes >= batch.bytes]
        region = regions[0] if regions else slab.allocate(batch.bytes, tag="slab")
        self._receipt.slab_bytes = max(self._receipt.slab_bytes, batch.bytes)
        self._transfer(
            batch.file,
            [one.copy for one in batch.staged],
            [region.address + one.at for one in batch.staged],
            into=slab,
        )
        with slab.buffer(region) as view:
            self._compare_slab(batch, view)
            for one in batch.staged:
                source = source_in_slab(view, one.at, one.copy.source)
                deliver(one.copy, source, memory=self._memory, base=self._bases[one.copy.allocation])
                self._receipt.bytes += one.copy.target.bytes
                del source  # it holds the view

    def _compare_slab(self, batch: Batch, view: memoryview) -> None:
        if not self._loading.verify_bytes:
            return
        with opened(self._manifest.files[batch.file].path) as fd:
            for one in batch.staged:
                for offset, size in _ends(one.copy.source.span, self._loading.verify_bytes):
                    self._compare(fd, one.copy, offset, bytes(view[one.at + offset : one.at + offset + size]))

    def _read_with_torch(self) -> None:
        from coldsnap.engines.weights.staged import deliver, source_in_file  # noqa: PLC0415

        for copy in self._staged:
            path = self._manifest.files[copy.file].path
            with self._timed("io_s"):
                source = source_in_file(path, copy)
            if copy.crc32 is None:
                self._compare_source(copy, source)
            crc32 = deliver(copy, source, memory=self._memory, base=self._bases[copy.allocation])
            if copy.crc32 is not None:
                _require_checksum(copy.tensor, path, copy.crc32, crc32)
                self._receipt.verified_extents += 1
            self._receipt.read_bytes += copy.source.span
            self._receipt.reads += 1
            self._receipt.bytes += copy.target.bytes

    def _compare_source(self, copy: ReplayCopy, source: Any) -> None:
        from coldsnap.engines.weights.storages import read_bytes, storage_of  # noqa: PLC0415

        if not self._loading.verify_bytes:
            return
        begin = source.storage_offset() * copy.source.width
        with opened(self._manifest.files[copy.file].path) as fd:
            for offset, size in _ends(copy.source.span, self._loading.verify_bytes):
                self._compare(fd, copy, offset, read_bytes(storage_of(source), [(begin + offset, size)]))

    # Where it has arrived

    def _verify_staged_extents(self) -> None:
        """Compare every model extent that a copy without a checksum of its own has touched."""
        touched: defaultdict[int, list[ReplayCopy]] = defaultdict(list)
        for copy in self._staged:
            if copy.crc32 is None:
                touched[copy.allocation].append(copy)
        with Staging(self._memory) as staging:
            for extent in self._manifest.model_extents:
                here = [
                    copy
                    for copy in touched.get(extent.allocation, ())
                    if copy.target.offset < extent.offset + extent.size and extent.offset < copy.target.end
                ]
                if not here:
                    continue
                crc32, summed = 0, zlib.crc32 if self._loading.library is None else self._loading.library.crc32
                for piece in staging.pieces(self._bases[extent.allocation] + extent.offset, extent.size):
                    crc32 = summed(piece, crc32)
                tensors = ", ".join(dict.fromkeys(copy.tensor for copy in here))
                _require_checksum(tensors, self._manifest.files[here[0].file].path, extent.crc32 or 0, crc32)
                self._receipt.verified_extents += 1

    def _verify_samples(self) -> None:
        """Compare both ends of every plain copy with the file, as it is read now."""
        if not self._loading.verify_bytes:
            return
        by_file: defaultdict[int, list[ReplayCopy]] = defaultdict(list)
        for copy in self._manifest.copies:
            if copy.crc32 is not None:
                by_file[copy.file].append(copy)
        for file, copies in by_file.items():
            with opened(self._manifest.files[file].path) as fd:
                for copy in copies:
                    for offset, size in _ends(copy.target.bytes, self._loading.verify_bytes):
                        found = bytearray(size)
                        address = self._bases[copy.allocation] + copy.target.offset + offset
                        self._memory.copy_to_host(address, memoryview(found))
                        self._compare(fd, copy, offset, bytes(found))

    def _compare(self, fd: int, copy: ReplayCopy, offset: int, found: bytes) -> None:
        expected = os.pread(fd, len(found), copy.file_offset + copy.source.offset + offset)
        self._receipt.sampled_bytes += len(found)
        if expected != found:
            raise IntegrityError(
                f"{len(found)} bytes at {offset} of what {copy.name} takes from {copy.tensor} arrived otherwise",
                path=self._manifest.files[copy.file].path,
                expected=expected[:16].hex(),
                actual=found[:16].hex(),
            )

    @contextmanager
    def _timed(self, figure: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        setattr(self._receipt, figure, getattr(self._receipt, figure) + time.monotonic() - began)

    def _settle_names(self) -> None:
        transfers, loading = self._receipt.transfers, self._loading
        names = {"mmap" if one.effective == "python" else one.effective for one in transfers}
        names |= {"torch"} if loading.backend == "torch" else set()
        self._receipt.effective = "+".join(sorted(names)) or "nothing to do"
        reasons = {one.reason for one in transfers}
        if loading.backend == "auto" and loading.library is None:
            reasons = {"no-native-library"}
        self._receipt.reason = ", ".join(sorted(reasons)) or "explicit-policy"


def _require_checksum(tensor: str, path: str, expected: int, actual: int) -> None:
    if expected != actual:
        raise IntegrityError(
            f"the tensor {tensor} is not the one that was loaded at capture (rule manifest.6)",
            path=path,
            expected=f"CRC-32 {expected:08x}",
            actual=f"CRC-32 {actual:08x}",
        )


@contextmanager
def _named(copies: Sequence[ReplayCopy], path: str) -> Iterator[None]:
    """Say of which tensor the bytes are that a transfer found to be others."""
    try:
        yield
    except IntegrityError as error:
        number = _EXTENT.search(error.path)
        if number is None:
            raise
        raise IntegrityError(
            f"the tensor {copies[int(number[1])].tensor} is not the one that was loaded at capture (rule manifest.6)",
            path=path,
            expected=error.expected,
            actual=error.actual,
        ) from error


def _ends(size: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, size) of both ends of something; the same one twice only when it is that small."""
    length = min(size, most)
    yield 0, length
    yield size - length, length


def _one_for_each_file(transfers: Iterable[HydrationReceipt]) -> list[HydrationReceipt]:
    return list({one.path: one for one in transfers}.values())


def _observed(receipt: HydrationReceipt) -> Mapping[str, Any]:
    return {
        "path": receipt.path,
        "requested": receipt.requested,
        "effective": receipt.effective,
        "reason": receipt.reason,
        "filesystem_type": receipt.filesystem.type,
        "mount_source": receipt.filesystem.source,
        "mountpoint": receipt.filesystem.mountpoint,
        "device": receipt.filesystem.device,
        "fallback_errno": receipt.fallback_errno or 0,
    }
