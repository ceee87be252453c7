"""The recovery provider: one worker's memory out of the checkpoint that it once loaded, and its residual.

The one rule: nothing but the pinned files will do. They are compared before an address is mapped, and what is in them
on its way; a file of another revision is an error and never a reason to go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from attrs import frozen

from coldsnap.artifact.extents import Coverage
from coldsnap.artifact.manifest import RecoveryManifest, read_document
from coldsnap.engines.weights.generation import RECOVERY_MANIFEST, RESIDUAL
from coldsnap.engines.weights.native import Reading, fill_residual, matching_regions, require_size
from coldsnap.engines.weights.replaying import Loading, ReplayReceipt, replay
from coldsnap.errors import AdmissionError
from coldsnap.transfer.backend import HydrationReceipt
from coldsnap.transfer.checkpoint import require_files
from coldsnap.transfer.memory import PreservedMemory, Region

__all__ = ["Recoverable", "admit_recovery", "refill"]


@frozen(kw_only=True)
class Recoverable:
    """A generation whose model bytes are in the checkpoint, and that belongs into this memory.

    Attributes:
        manifest: Which byte belongs where, and where it comes from.
        coverage: The receipt that none is left out.
        regions: The allocations, in the order of the manifest.
        residual: The residual.
    """

    manifest: RecoveryManifest
    coverage: Coverage
    regions: tuple[Region, ...]
    residual: Path


def admit_recovery(
    directory: Path, *, manifest_sha256: str, memory: PreservedMemory, worker: str | None = None
) -> Recoverable:
    """Check that a generation can be recovered into this memory; nothing is mapped or moved.

    Args:
        directory: With the recovery manifest and the residual.
        manifest_sha256: Digest of the recovery manifest.
        memory: Whose allocations it is for.
        worker: Whose generation it must be; None: whosever.

    Raises:
        IntegrityError: Manifest, residual or a file of the checkpoint are not those captured.
        FormatError: A rule of the formats is broken, or a file is not private.
        CoverageError: The manifest leaves a byte out.
        AdmissionError: It is another worker's, for other allocations, or has no copies.
    """
    manifest = read_document(RecoveryManifest, directory / RECOVERY_MANIFEST, sha256=manifest_sha256)
    coverage = manifest.prove()
    if worker not in (None, manifest.worker):
        raise AdmissionError(
            f"the generation in {directory} is worker {manifest.worker}'s, this is worker {worker}; "
            "give each worker its own directory"
        )
    if not manifest.copies:
        raise AdmissionError(
            f"the recovery manifest in {directory} lists no copies, as none did before they were recorded; "
            "restore from the pack, or capture anew"
        )
    regions = matching_regions(
        manifest.allocations, memory, what=f"worker {manifest.worker} in capture {manifest.capture_id}"
    )
    require_size(directory / RESIDUAL, manifest.residual, "manifest.4")
    require_files(manifest.files)
    return Recoverable(manifest=manifest, coverage=coverage, regions=regions, residual=directory / RESIDUAL)


def refill(
    admitted: Recoverable,
    *,
    memory: PreservedMemory,
    loading: Loading,
    reading: Reading,
    stale: Sequence[Region] = (),
    between: Callable[[str], None] = lambda _: None,
) -> Mapping[str, HydrationReceipt | ReplayReceipt]:
    """Bring every byte to its address: the model's out of the checkpoint, then the residual.

    Args:
        admitted: What to bring; its regions are mapped.
        memory: Where to.
        loading: How the checkpoint is read.
        reading: How the residual is read.
        stale: Regions that an attempt before this one has mapped; their model bytes are cleared first.
        between: Called with ``checkpoint`` and ``residual`` before each.

    Returns:
        The receipts, after everything has arrived, was verified and synchronised: ``checkpoint``, and ``residual``
        when it holds bytes.

    Raises:
        IntegrityError: Bytes are not those captured; the memory is garbage.
        NativeError: A transfer failed; the memory is garbage, and the call may be repeated.
    """
    manifest = admitted.manifest
    cleared = {region.address for region in stale}
    for extent in manifest.model_extents:
        base = manifest.allocations[extent.allocation].address
        if base in cleared:
            memory.zero(base + extent.offset, extent.size)
    between("checkpoint")
    receipts: dict[str, HydrationReceipt | ReplayReceipt] = {
        "checkpoint": replay(manifest, memory=memory, loading=loading, between=lambda at: between(f"checkpoint:{at}"))
    }
    between("residual")
    if (residual := fill_residual(manifest, admitted.residual, memory=memory, reading=reading)) is not None:
        receipts["residual"] = residual
    memory.synchronize()
    return receipts
