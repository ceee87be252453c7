"""What a load left behind, written before the engine does anything to it: the generation of a fresh start.

The one rule: between the last copy of the load and the first byte written here nothing runs, so that what is written is
what a load leaves, whatever the engine makes of it afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coldsnap.artifact.bootstrap import BootstrapIndex
from coldsnap.artifact.canonical import sha256_of
from coldsnap.artifact.store import Store
from coldsnap.engines.weights.generation import Generation, Writing, write_generation
from coldsnap.engines.weights.layout import Layout
from coldsnap.engines.weights.load_record import LoadRecord
from coldsnap.engines.weights.requests import ReleaseRequest
from coldsnap.engines.weights.split import Split, split
from coldsnap.errors import ContractError
from coldsnap.transfer.native import NativeLibrary

__all__ = ["export"]

Reply = Mapping[str, Any]


def export(model: Any, record: LoadRecord, asked: ReleaseRequest) -> Reply:
    """Write what a load left, and return what was written.

    Args:
        model: What was loaded; nothing has been done to it since.
        record: What the load was seen to copy.
        asked: Where to write, and how.

    Raises:
        ContractError: The load was not seen to copy anything, or a tensor has no memory.
        AdmissionError: There is not enough room; nothing was written.
        NativeError: The residual could not be written.
        OSError: Another file could not be written.
    """
    settled = record.settle(model, compare=False)
    names = {one.semantic for one in settled.written} | set(settled.unsupported)
    layout = Layout.of(model, names)
    # What is not persistent is the engine's to compute at a start, too; it is in no allocation.
    known = {one.name for one in layout.tensors}
    derived = {name: size for name, size in settled.derived.items() if name in known}
    divided = split(layout.allocations, settled.written, settled.kept, copies=settled.copies, derived=derived)
    if not divided.model.extents:
        raise ContractError(
            f"the load of {type(model).__name__} was not seen to copy a byte: kept {dict(divided.kept)}"
        )
    index = BootstrapIndex(capture_id=asked.capture_id, worker=asked.worker, tensors=layout.tensors).encode()
    library = None
    if asked.capture_backend != "python":
        library = NativeLibrary.load(asked.native_library, sha256=asked.native_sha256)
    written = write_generation(
        divided,
        memory=layout.memory,
        store=Store(asked.store, lanes=library),
        directory=Path(asked.directory),
        identity=asked.identity,
        discarded={},
        writing=Writing(
            library=library,
            backend=asked.capture_backend,
            tuning=asked.tuning,
            reuse=asked.reuse_blob,
            reserve_bytes=asked.reserve_bytes,
            recording=asked.recording,
        ),
        index=index,
    )
    if library is not None:
        library.release()  # the process may become an image, and its ring held weights
    return _reply(written, divided, sha256_of(index))


def _reply(written: Generation, divided: Split, index_sha256: str) -> Reply:
    pack = written.pack
    return {
        "task": "export",
        "worker": written.worker,
        "manifest_sha256": written.manifest_sha256,
        "index_sha256": index_sha256,
        "pack": pack and {"bytes": pack.bytes, "sha256": pack.sha256, "new_bytes": written.new_pack_bytes},
        "residual": {"bytes": written.residual.bytes, "sha256": written.residual.sha256},
        "coverage": str(written.coverage),
        "kept": dict(divided.kept),
        "seconds": dict(written.seconds),
        "backend": written.receipt.effective,
        "recovery": written.recorded(),
    }
