"""The checkpoint of an artifact: compared before anything starts, read ahead, and named to the workers.

The one rule: every worker recovers or none does; and what is recovered is what the descriptor names, to the revision.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coldsnap.artifact.manifest import RecoveryManifest, read_document
from coldsnap.artifact.payloads import WorkerWeights
from coldsnap.artifact.replay import SourceFile
from coldsnap.errors import IntegrityError, UnsupportedError
from coldsnap.moving import FillingStep
from coldsnap.session import Session
from coldsnap.transfer.checkpoint import require_files

__all__ = ["admit_checkpoint", "loading_of", "recovery_manifest", "recovery_places"]


def admit_checkpoint(session: Session) -> int:
    """Compare every file of the checkpoint with what the capture recorded; return their bytes.

    From here on the session recovers.

    Raises:
        IntegrityError: A file is missing or another one, or a manifest is about another revision.
        UnsupportedError: A worker's copies were not recorded.
    """
    opened = session.need(session.artifact, "an artifact")
    source = session.need(opened.descriptor.weights.recovery, "an artifact with a checkpoint")
    files: dict[str, SourceFile] = {}
    for one in opened.descriptor.weights.workers:
        manifest = recovery_manifest(session, one)
        found = manifest.model_source
        if (found.model_id, found.revision) != (source.model_id, source.revision):
            raise IntegrityError(
                f"the recovery manifest of {one.worker} is about another model (rule manifest.6)",
                path=str(opened.path),
                expected=f"{source.model_id} at {source.revision}",
                actual=f"{found.model_id} at {found.revision}",
            )
        if not manifest.copies:
            raise UnsupportedError(
                f"{opened.path} lists no copies of its load, as none did before they were recorded",
                field="weights.mode",
                works='"native", or an artifact that is captured anew',
            )
        files |= {file.path: file for file in manifest.files}
    total = require_files(files.values())
    session.checkpoint = tuple(files)
    return total


def recovery_places(session: Session) -> Mapping[str, Mapping[str, Any]]:
    """Return, by worker, what says where its generation is."""
    opened = session.need(session.artifact, "an artifact")
    return {
        one.worker: {
            "provider": "recovery",
            "directory": os.path.dirname(opened.path / one.native_manifest.path),
            "manifest_sha256": one.native_manifest.sha256,
            "recovery_sha256": session.need(one.recovery_manifest, "an artifact with a checkpoint").sha256,
        }
        for one in opened.descriptor.weights.workers
    }


def loading_of(step: FillingStep) -> Mapping[str, Any]:
    """Return how the checkpoint is read, as a worker is told."""
    return {
        "loader": {
            "backend": step.loader_backend,
            "chunk_bytes": step.loader_chunk_bytes,
            "staging_bytes": step.staging_bytes,
            "queue_depth": step.loader_queue_depth,
            "verify_bytes": step.verify_bytes,
            "verify_model_bytes": step.verify_model_bytes,
        }
    }


def recovery_manifest(session: Session, one: WorkerWeights) -> RecoveryManifest:
    """Return how one worker loaded its checkpoint."""
    opened = session.need(session.artifact, "an artifact")
    file = session.need(one.recovery_manifest, "an artifact with a checkpoint")
    return read_document(RecoveryManifest, Path(opened.path, file.path), sha256=file.sha256)
