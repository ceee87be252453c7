"""What a scheduler's models mean, storage by storage, and from what they can be replayed: documents of a capture.

The bytes themselves are in the pack and the residual of the worker's generation; here is what they are.

The one rule: a buffer that torch calls non-persistent is in none of it: SGLang computes it for the shape at hand.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from coldsnap.artifact import canonical
from coldsnap.artifact.durable import write_file_durably
from coldsnap.engines.sglang.identity import digest_of

__all__ = ["MANIFEST", "describe", "write"]

MANIFEST = "manifest.json"
_CHUNK_BYTES = 64 << 20


def describe(models: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the storages of models, in the order of their first name.

    Args:
        models: By role.
    """
    found: dict[tuple[int, int, str], dict[str, Any]] = {}
    for role, model in models.items():
        for name, tensor in _persistent(model):
            storage = tensor.untyped_storage()
            key = (storage.data_ptr(), storage.nbytes(), str(storage.device))
            entry = found.setdefault(key, {"nbytes": storage.nbytes(), "refs": [], **_digests(storage)})
            entry["refs"].append(_reference(name if role == "target" else f"{role}:{name}", tensor))
    return sorted(found.values(), key=lambda entry: str(entry["refs"][0]["name"]))


def _persistent(model: Any) -> Iterator[tuple[str, Any]]:
    for name, tensor in model.named_parameters(remove_duplicate=False):
        yield f"parameter:{name}", tensor
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:  # noqa: SLF001  torch has no other list
                yield f"buffer:{prefix}{'.' if prefix else ''}{name}", tensor


def _reference(name: str, tensor: Any) -> dict[str, Any]:
    width = tensor.element_size()
    return {
        "name": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "storage_offset_bytes": tensor.storage_offset() * width,
        "nbytes": tensor.numel() * width,
    }


def _digests(storage: Any) -> dict[str, Any]:
    import torch  # noqa: PLC0415  only the engine's environment has it

    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    sha256, crc32 = hashlib.sha256(), 0
    for piece in whole.split(_CHUNK_BYTES):
        data = piece.cpu().numpy().data
        sha256.update(data)
        crc32 = zlib.crc32(data, crc32)
    return {"sha256": f"sha256:{sha256.hexdigest()}", "crc32": crc32}


def write(
    storages: list[dict[str, Any]],
    *,
    identity: Mapping[str, Any],
    generation: Mapping[str, Any],
    artifact_dir: Path,
    process_root: Path,
) -> Path:
    """Write what was described, and the plan of its replay, durably.

    Args:
        storages: Of :func:`describe`, before the memory went.
        identity: Of the worker.
        generation: The reply to its release.
        artifact_dir: Root of the semantic layout.
        process_root: Root of the process artifact and of hydration.

    Returns:
        The manifest's path.
    """
    worker, digest = str(generation["worker"]), digest_of(identity)
    directory = artifact_dir / "semantic" / "workers" / worker / canonical.hex_of(digest)
    bytes_of = {"pack": generation["pack"], "residual": generation["residual"]}
    manifest = {
        "format": 1,
        "kind": "coldsnap-sglang-semantic",
        "identity": dict(identity),
        "identity_sha256": digest,
        "native_manifest_sha256": generation["manifest_sha256"],
        **bytes_of,
        "storages": storages,
    }
    plan = {
        "format": 1,
        "kind": "coldsnap-sglang-replay-plan",
        "engine": "sglang",
        "worker_id": worker,
        "weight_source": "safetensors",
        "model_id": identity["model_path"],
        "model_revision": identity["model_revision"],
        "components": [{"artifact": str(directory / MANIFEST), "identity_sha256": digest, **bytes_of}],
    }
    for place, document in ((directory, manifest), (process_root / "hydration" / worker, plan)):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file_durably(place / MANIFEST, canonical.encode(document))
    return directory / MANIFEST
