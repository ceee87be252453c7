"""Small memories to split, pack and hydrate: strategies and a worker's files, made by the real writers."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

from hypothesis import strategies as st

from coldsnap.artifact.durable import staged_file
from coldsnap.artifact.extents import Allocation, Extent, ExtentMap
from coldsnap.artifact.manifest import (
    Blob,
    ModelExtent,
    ModelSource,
    NativeManifest,
    RecoveryManifest,
    ReloadExtent,
)
from coldsnap.artifact.pack import Bytes, Pack
from coldsnap.artifact.payloads import PayloadObject
from coldsnap.artifact.residual import Residual, write_residual
from coldsnap.artifact.store import Store

SOURCE = ModelSource(model_id="tiny", revision="a" * 40)
BASE = 0x7F00_0000_0000


@st.composite
def maps(draw, *, most: int = 20_000) -> ExtentMap:
    """A map of some of the bytes of one to four allocations."""
    sizes = draw(st.lists(st.integers(1, most), min_size=1, max_size=4))
    allocations = [Allocation(address=BASE + index * (1 << 24), size=size) for index, size in enumerate(sizes)]
    extents = []
    for index, size in enumerate(sizes):
        edges = draw(st.lists(st.integers(0, size), max_size=8, unique=True))
        edges = sorted(edges)
        extents += [
            Extent(allocation=index, offset=low, size=high - low)
            for low, high in zip(edges[::2], edges[1::2], strict=False)
        ]
    return ExtentMap.of(allocations, draw(st.permutations(extents)))


class Memory:
    """What a worker's allocations hold."""

    def __init__(self, allocations: tuple[Allocation, ...], *, seed: int = 0) -> None:
        generator = random.Random(seed)
        self.bytes = [generator.randbytes(allocation.size) for allocation in allocations]

    def source(self, extent: Extent) -> Bytes:
        return Bytes(memoryview(self.bytes[extent.allocation])[extent.offset : extent.end])


def model_map(*, sizes: tuple[int, ...] = (20_480, 9_000)) -> ExtentMap:
    """A map of model bytes that leaves gaps at odd places."""
    allocations = tuple(Allocation(address=BASE + index * (1 << 24), size=size) for index, size in enumerate(sizes))
    extents = [
        Extent(allocation=0, offset=0, size=5_000),
        Extent(allocation=0, offset=8_192, size=4_096),
        Extent(allocation=0, offset=12_288, size=3),
        Extent(allocation=1, offset=100, size=8_000),
    ]
    return ExtentMap.of(allocations, extents)


def semantic(extent: Extent) -> str:
    return hashlib.sha256(f"{extent.allocation}/{extent.offset}".encode()).hexdigest()


def native_manifest(model: ExtentMap, pack: Pack, residual: Residual) -> NativeManifest:
    return NativeManifest(
        capture_id="capture-0001",
        worker="0",
        model=SOURCE,
        allocations=model.allocations,
        pack=Blob(bytes=pack.bytes, sha256=pack.sha256),
        residual=residual.blob,
        model_extents=tuple(
            ModelExtent(
                allocation=extent.allocation,
                offset=extent.offset,
                size=extent.size,
                semantic_id=semantic(extent),
                pack_offset=entry.offset,
                sha256=entry.sha256,
                crc32=entry.crc32,
            )
            for extent, entry in zip(model.extents, pack.entries, strict=True)
        ),
        residual_extents=residual.native,
    )


def recovery_manifest(model: ExtentMap, residual: Residual) -> RecoveryManifest:
    return RecoveryManifest(
        capture_id="capture-0001",
        worker="0",
        model_source=SOURCE,
        allocations=model.allocations,
        residual=residual.blob,
        model_extents=tuple(
            ReloadExtent(
                allocation=extent.allocation, offset=extent.offset, size=extent.size, semantic_id=semantic(extent)
            )
            for extent in model.extents
        ),
        residual_extents=residual.recovery,
    )


def captured(
    directory: Path, store: Store, *, model: ExtentMap | None = None, recovery: ExtentMap | None = None, seed: int = 0
) -> tuple[NativeManifest, RecoveryManifest, Memory]:
    """Write pack and residual of one worker, as a capture does, and return the manifests."""
    model = model or model_map()
    recovery = recovery or model
    memory = Memory(model.allocations, seed=seed)
    pack = store.write([memory.source(extent) for extent in model.extents])
    with staged_file(directory, "weights.blob") as staged:
        residual = write_residual(staged, model.complement(), recovery.complement(), memory.source)
        staged.publish(directory / "weights.blob")
    return native_manifest(model, pack, residual), recovery_manifest(recovery, residual), memory


def payload(manifest: NativeManifest, worker: str = "0") -> PayloadObject:
    """Return what a descriptor says about the manifest's pack."""
    hexadecimal = manifest.pack.sha256.removeprefix("sha256:")
    return PayloadObject(
        worker=worker,
        path=f"model-payloads/sha256/{hexadecimal}.pack",
        bytes=manifest.pack.bytes,
        sha256=manifest.pack.sha256,
    )
