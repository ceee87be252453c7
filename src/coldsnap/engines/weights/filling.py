"""What a hydrate was asked for, admitted: the generation that this process released, by the provider that was chosen.

The one rule: only the generation that was released last belongs into this memory, whoever brings its bytes; it is
admitted before an address is mapped.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from coldsnap.engines.weights.generation import Generation
from coldsnap.engines.weights.native import Admitted, Reading, admit, fill
from coldsnap.engines.weights.recovery import Recoverable, admit_recovery, refill
from coldsnap.engines.weights.requests import HydrateRequest
from coldsnap.engines.weights.waking import Fill
from coldsnap.errors import AdmissionError
from coldsnap.transfer.memory import PreservedMemory
from coldsnap.transfer.native import NativeLibrary

__all__ = ["filling"]


def filling(
    asked: HydrateRequest,
    written: Generation,
    *,
    memory: PreservedMemory,
    worker: str,
    python: bool,
    library: Callable[[], NativeLibrary | None],
) -> Fill:
    """Admit a generation, and return what brings its bytes.

    Args:
        asked: How.
        written: What was released.
        memory: Whose allocations it is for.
        worker: Whose memory.
        python: Whether the release was told to do without the native library.
        library: Loads it.

    Raises:
        AdmissionError: It is another generation, or cannot be brought in this way.
        ArtifactError: Files are not those captured.
    """
    backend = asked.hydration_backend("python" if python else "auto")
    reading = Reading(
        library=None if backend == "python" else library(),
        backend=backend,
        preverified=asked.verify_mode == "preverified",
        tuning=asked.tuning,
    )
    if asked.provider == "native":
        admitted = _admit(asked, written, memory, worker)
        return lambda _, between: fill(admitted, memory=memory, reading=reading, between=between)
    recoverable = _admit_recovery(asked, written, memory, worker)
    loading = asked.loader.loading(None if python or not asked.loader.needs_library else library())
    return lambda stale, between: refill(
        recoverable, memory=memory, loading=loading, reading=reading, stale=stale, between=between
    )


def _admit(asked: HydrateRequest, written: Generation, memory: PreservedMemory, worker: str) -> Admitted:
    directory, pack, manifest_sha256 = asked.place or (written.directory, written.pack_path, written.manifest_sha256)
    admitted = admit(
        directory, pack=pack, manifest_sha256=manifest_sha256, memory=memory, worker=worker, verify=asked.verify
    )
    if manifest_sha256 != written.manifest_sha256:
        raise AdmissionError(
            f"the generation in {directory} ({manifest_sha256}) is not the one that this process released "
            f"({written.manifest_sha256}): its residual is of another moment; name the process's own"
        )
    return admitted


def _admit_recovery(asked: HydrateRequest, written: Generation, memory: PreservedMemory, worker: str) -> Recoverable:
    directory = written.directory if asked.directory is None else Path(asked.directory)
    digest = asked.recovery_sha256 or written.recovery_sha256
    if digest is None:
        raise AdmissionError(
            f"nothing of how the weights were loaded was recorded, so that they cannot come from the checkpoint: "
            f"{written.replay.reason}; bring them from the pack"
        )
    admitted = admit_recovery(directory, manifest_sha256=digest, memory=memory, worker=worker)
    if digest != written.recovery_sha256:
        raise AdmissionError(
            f"the generation in {directory} ({digest}) is not the one that this process released "
            f"({written.recovery_sha256}): its residual is of another moment; name the process's own"
        )
    return admitted
