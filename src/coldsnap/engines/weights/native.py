"""The native provider: one worker's memory out of its pack and its residual.

The one rule: everything that can be known is checked before an address is mapped (digest and coverage of the
manifest, every allocation, the identity of the pack), and every byte on its way. A pack that is another one is an
error and never a reason to load the model in another way.

::

    admitted = admit(directory, pack=path, manifest_sha256=digest, memory=memory)
    # … map admitted.regions …
    receipts = fill(admitted, memory=memory, reading=Reading(…))      # {"pack": …, "residual": …}
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from attrs import field, frozen

from coldsnap.artifact.admission import Request, decide
from coldsnap.artifact.evidence import Verify, hash_file
from coldsnap.artifact.extents import Allocation, Coverage
from coldsnap.artifact.manifest import Blob, NativeManifest, RecoveryManifest, read_document
from coldsnap.artifact.private import open_private
from coldsnap.engines.weights.generation import NATIVE_MANIFEST, RESIDUAL
from coldsnap.errors import AdmissionError, IntegrityError, PayloadMissingError
from coldsnap.transfer.backend import BackendName, FileExtent, HydrationReceipt, Tuning
from coldsnap.transfer.hydrate import hydrate
from coldsnap.transfer.memory import PreservedMemory, Region
from coldsnap.transfer.native import NativeLibrary

__all__ = [
    "WEIGHTS",
    "Admitted",
    "Reading",
    "admit",
    "admit_pack",
    "fill",
    "fill_residual",
    "matching_regions",
    "move",
    "require_residual",
    "require_size",
]

WEIGHTS = "weights"
_SHOWN = 8


@frozen(kw_only=True)
class Reading:
    """How a generation is read.

    Attributes:
        library: The native library; needed for every backend but python.
        backend: ``io.hydration_backend``, with ``io.hibernate_read_mode`` in it.
        preverified: ``io.verify_mode`` is preverified: the pack's evidence stands for its bytes, and the residual is
            hashed before instead of on the way.
        tuning: How to use the machine.
    """

    library: NativeLibrary | None = None
    backend: BackendName = "auto"
    preverified: bool = False
    tuning: Tuning = field(factory=Tuning)


@frozen(kw_only=True)
class Admitted:
    """A generation that belongs into this memory.

    Attributes:
        manifest: Which byte belongs where.
        coverage: The receipt that none is left out.
        regions: The allocations, in the order of the manifest.
        pack: The pack, None when the residual holds everything.
        residual: The residual.
    """

    manifest: NativeManifest
    coverage: Coverage
    regions: tuple[Region, ...]
    pack: Path | None
    residual: Path


def admit(
    directory: Path,
    *,
    pack: Path | None,
    manifest_sha256: str,
    memory: PreservedMemory,
    worker: str | None = None,
    verify: Verify | Literal["none"] = "evidence",
) -> Admitted:
    """Check that a generation is whole and belongs into this memory; nothing is mapped or moved.

    Args:
        directory: With the native manifest and the residual.
        pack: The pack; None when the residual holds everything.
        manifest_sha256: Digest of the native manifest.
        memory: Whose allocations it is for.
        worker: Whose generation it must be; None: whosever.
        verify: ``evidence`` admits an unchanged pack by its record, ``full`` reads it; ``none`` looks at name and size
            alone, for a caller who admits the pack himself before he accepts an answer.

    Raises:
        IntegrityError: Manifest, pack or residual have another digest or size.
        FormatError: A rule of the formats is broken, or a file is not private.
        CoverageError: The manifest leaves a byte out.
        AdmissionError: The manifest is another worker's, or for other allocations; each difference is named.
    """
    manifest = read_document(NativeManifest, directory / NATIVE_MANIFEST, sha256=manifest_sha256)
    coverage = manifest.prove()
    if worker not in (None, manifest.worker):
        raise AdmissionError(
            f"the generation in {directory} is worker {manifest.worker}'s, this is worker {worker}; "
            "give each worker its own directory"
        )
    regions = matching_regions(
        manifest.allocations, memory, what=f"worker {manifest.worker} in capture {manifest.capture_id}"
    )
    residual = directory / RESIDUAL
    require_size(residual, manifest.residual, "manifest.4")
    admit_pack(manifest, pack, verify)
    return Admitted(
        manifest=manifest,
        coverage=coverage,
        regions=regions,
        pack=pack if manifest.model_extents else None,
        residual=residual,
    )


def fill(
    admitted: Admitted,
    *,
    memory: PreservedMemory,
    reading: Reading,
    between: Callable[[str], None] = lambda _: None,
) -> Mapping[str, HydrationReceipt]:
    """Bring every byte to its address: the model's from the pack, then the residual.

    Args:
        admitted: What to bring; its regions are mapped.
        memory: Where to.
        reading: How.
        between: Called with ``pack`` and ``residual`` before each.

    Returns:
        The receipts, after everything has arrived, was verified and synchronised: ``pack`` and ``residual``, those
        that hold bytes.

    Raises:
        IntegrityError: Bytes are not those captured; the memory is garbage.
        NativeError: A transfer failed; the memory is garbage, and the call may be repeated.
        UnsupportedError: The backend cannot do it here.
    """
    manifest = admitted.manifest
    receipts: dict[str, HydrationReceipt] = {}
    between("pack")
    if admitted.pack is not None:
        receipts["pack"] = move(admitted.pack, _from_pack(manifest), memory, reading)
    between("residual")
    if (residual := fill_residual(manifest, admitted.residual, memory=memory, reading=reading)) is not None:
        receipts["residual"] = residual
    memory.synchronize()
    return receipts


def fill_residual(
    manifest: NativeManifest | RecoveryManifest, path: Path, *, memory: PreservedMemory, reading: Reading
) -> HydrationReceipt | None:
    """Bring the residual's bytes to their addresses; None when there are none.

    Raises:
        IntegrityError: They are not those captured.
        NativeError: The transfer failed.
    """
    if not manifest.residual_extents:
        return None
    if reading.preverified:
        require_residual(manifest, path)
    return move(path, _from_residual(manifest), memory, reading)


def move(path: Path, extents: Sequence[FileExtent], memory: PreservedMemory, reading: Reading) -> HydrationReceipt:
    """Bring extents of a file to their addresses, read as was asked for; raises what ``transfer.hydrate`` does."""
    return hydrate(
        path,
        extents,
        memory=memory,
        library=reading.library,
        backend=reading.backend,
        preverified=reading.preverified,
        tuning=reading.tuning,
    )


def _from_pack(manifest: NativeManifest) -> list[FileExtent]:
    # In the order of the file: runs of extents that touch are read in one piece.
    ordered = sorted(manifest.model_extents, key=lambda one: one.pack_offset)
    return [
        FileExtent(
            file_offset=one.pack_offset,
            address=manifest.allocations[one.allocation].address + one.offset,
            length=one.size,
            crc32=one.crc32,
        )
        for one in ordered
    ]


def _from_residual(manifest: NativeManifest | RecoveryManifest) -> list[FileExtent]:
    return [
        FileExtent(
            file_offset=one.file_offset,
            address=manifest.allocations[one.allocation].address + one.offset,
            length=one.size,
            crc32=one.crc32,
        )
        for one in manifest.residual_extents
    ]


def matching_regions(allocations: Sequence[Allocation], memory: PreservedMemory, *, what: str) -> tuple[Region, ...]:
    """Demand that the memory has exactly these allocations, and return them in that order.

    Args:
        allocations: What is expected.
        memory: What is compared, in the regions of the allocations and in ``weights``.
        what: Whose allocations they are, for the error.

    Raises:
        AdmissionError: Address, size or region of one differ; the first differences are named.
    """
    expected = {(one.address, one.size, one.region) for one in allocations}
    tags = {one.region for one in allocations} | {WEIGHTS}
    found = {(one.address, one.size_bytes, one.tag): one for tag in sorted(tags) for one in memory.regions(tag)}
    differences = sorted(expected ^ found.keys())
    if differences:
        lines = [
            f"{address:#x}: {size} bytes of {tag} are only in {what if here else 'the memory of this process'}"
            for address, size, tag in differences[:_SHOWN]
            for here in [(address, size, tag) in expected]
        ]
        more = len(differences) - len(lines)
        raise AdmissionError(
            f"the memory of this process does not have the allocations of {what}:",
            [*lines, f"and {more} more"] if more else lines,
        )
    return tuple(found[one.address, one.size, one.region] for one in allocations)


def admit_pack(manifest: NativeManifest, pack: Path | None, verify: Verify | Literal["none"]) -> None:
    """Demand the pack that a manifest names.

    Args:
        manifest: One without model extents needs none.
        pack: Its path.
        verify: As for :func:`admit`.

    Raises:
        IntegrityError: It is not given, or another one.
        PayloadMissingError: It is not there.
        FormatError: It is not private.
    """
    if not manifest.model_extents:
        return
    expected = manifest.pack
    if pack is None:
        raise IntegrityError("no pack was given", path=NATIVE_MANIFEST, expected=expected.sha256, actual="nothing")
    if pack.name != f"{expected.sha256.removeprefix('sha256:')}.pack":
        what = "another pack than the manifest's (rule store.3)"
        raise IntegrityError(what, path=str(pack), expected=expected.sha256, actual=pack.name)
    if not os.path.lexists(pack):
        raise PayloadMissingError(
            f"the pack {pack} of {manifest.worker} is not there; bring it back, and try again", digest=expected.sha256
        )
    if verify == "none":
        require_size(pack, expected, "validation.2")
        return
    request = Request(
        path=os.path.abspath(pack),
        expected_sha256=expected.sha256,
        expected_bytes=expected.bytes,
        worker=manifest.worker,
        verify=verify,
    )
    decide(request, index=manifest.index)


def require_size(path: Path, expected: Blob, rule: str) -> None:
    """Refuse a private file of another size.

    Raises:
        IntegrityError: With the rule.
        FormatError: It is not private.
    """
    with open_private(path) as (_, status):
        if status.st_size != expected.bytes:
            raise IntegrityError(
                f"wrong size (rule {rule})",
                path=str(path),
                expected=f"{expected.bytes} bytes",
                actual=f"{status.st_size} bytes",
            )


def require_residual(manifest: NativeManifest | RecoveryManifest, path: Path) -> None:
    """Read a residual in full, and demand its digest.

    Raises:
        IntegrityError: It has other bytes.
        FormatError: It is not private.
    """
    with open_private(path) as (fd, status):
        actual = hash_file(fd, status, str(path))
    if actual != manifest.residual.sha256:
        raise IntegrityError(
            "wrong content (rule manifest.4)", path=str(path), expected=manifest.residual.sha256, actual=actual
        )
