"""vLLM's own sleep and wake-up, with weights in files instead of host memory.

vLLM asks a backend by name; ``coldsnap_disk`` is this one, and takes the place of the default where the override is
set (vLLM has no argument that names another). Level 1 writes the worker's generation and gives the backing away; the
wake-up hydrates. Everything else (level 2, which throws weights away; the tags that only vLLM knows) is left to vLLM.

The one rule: what was put to sleep here is woken here, and what vLLM put to sleep is woken by vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from vllm.device_allocator.sleep_mode_backend import CuMemBackend

from coldsnap.engines.settings import setting
from coldsnap.engines.vllm.worker import Resident, resident
from coldsnap.errors import AdmissionError

__all__ = ["DiskSleepBackend", "hydrate_request", "release_request"]


class DiskSleepBackend(CuMemBackend):  # type: ignore[misc]  # vLLM is not there where types are checked
    """Weights in files while they sleep.

    The classmethods that vLLM asks it by are those of its own backend, but for what is said here.
    """

    resident: Resident = resident

    def suspend(self, level: int = 1) -> None:
        """Give the memory away, level 1 by writing it to files first.

        Args:
            level: 1, or vLLM's own 2.

        Raises:
            AdmissionError: No directory was named for the files, or it has no room. Nothing was given away.
        """
        if level != 1 or self.resident.memory is None:
            self.resident.settle()
            super().suspend(level)
            return
        self.resident.operations()["release"](release_request(self.resident.rank))
        self._state = "SUSPENDED"

    def resume(self, tags: list[str] | None = None) -> None:
        """Bring the memory back.

        Args:
            tags: What of it; all when not given.
        """
        operations = self.resident.operations()
        asleep = operations["memory"]({}).get("asleep", ())
        if not asleep:
            super().resume(tags)
            return
        self._state = "RESUMING"
        wanted = [tag for tag in asleep if tags is None or tag in tags]
        if wanted:
            operations["hydrate"](hydrate_request(wanted))
        left = operations["memory"]({})["asleep"]
        self._state = "SUSPENDED" if left else "RUNNING"

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        """Say that compiled code stays: the process does."""
        return True

    @classmethod
    def preserves_graphs_with_communicators(cls) -> bool:
        """Say that CUDA graphs stay valid: neither addresses nor communicators change."""
        return True


def release_request(rank: int, environ: Mapping[str, str] | None = None) -> Mapping[str, Any]:
    """Write what the process was launched with as the request that a live sleep makes.

    Args:
        rank: The worker's number.
        environ: Defaults to the process's own environment.

    Raises:
        AdmissionError: No directory was named.
    """
    root = setting("COLDSNAP_DISK_SLEEP_DIR", environ)
    if not os.path.isabs(root):
        raise AdmissionError(
            f"a sleep of level 1 writes weights to files, and COLDSNAP_DISK_SLEEP_DIR is {root!r}: name a directory by "
            "its absolute path in the engine's env=, or sleep at level 2"
        )
    return {
        "worker": f"worker-{rank}",
        "directory": os.path.join(root, f"worker-{rank}"),
        "store": os.path.join(root, "store"),
        "capture_id": f"sleep-{os.getpid()}",
        "model": _model(environ),
        "discard": [name for name in setting("COLDSNAP_DISCARD_REGIONS", environ).split(",") if name],
        "backend": setting("COLDSNAP_CAPTURE_BACKEND", environ),
        "write_mode": setting("COLDSNAP_HIBERNATE_WRITE_MODE", environ),
        "reuse_blob": setting("COLDSNAP_HIBERNATE_REUSE_BLOB", environ) == "1",
        "export_model_payload": setting("COLDSNAP_EXPORT_MODEL_PAYLOAD", environ) == "1",
        **_transfer(environ),
    }


def hydrate_request(tags: list[str], environ: Mapping[str, str] | None = None) -> Mapping[str, Any]:
    """Write what the process was launched with as the request that a live wake-up makes.

    Args:
        tags: What to bring.
        environ: Defaults to the process's own environment.
    """
    return {
        "tags": tags,
        "backend": setting("COLDSNAP_HYDRATION_BACKEND", environ),
        "read_mode": setting("COLDSNAP_HIBERNATE_READ_MODE", environ),
        "verify_mode": setting("COLDSNAP_HIBERNATE_VERIFY_MODE", environ),
        **_transfer(environ),
    }


def _transfer(environ: Mapping[str, str] | None) -> Mapping[str, Any]:
    return {
        "queue_depth": int(setting("COLDSNAP_HYDRATION_QUEUE_DEPTH", environ)),
        "native_library": setting("COLDSNAP_HYDRATION_NATIVE_LIBRARY", environ) or None,
        "native_sha256": setting("COLDSNAP_HYDRATION_NATIVE_SHA256", environ) or None,
    }


def _model(environ: Mapping[str, str] | None) -> Mapping[str, Any] | None:
    identity = {
        "model_id": setting("COLDSNAP_MODEL_ID", environ),
        "revision": setting("COLDSNAP_MODEL_REVISION", environ),
    }
    if setting("COLDSNAP_RECOVERY_WEIGHT_SOURCE", environ) != "safetensors" or not all(identity.values()):
        return None
    return {**identity, "metadata_sha256": setting("COLDSNAP_MODEL_METADATA_SHA256", environ) or None}
