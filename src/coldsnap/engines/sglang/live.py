"""What becomes of the weights when a user asks SGLang itself to release its memory.

The one rule: what was taken away in one way comes back in the same way; ``discard`` brings nothing back, and that is
SGLang's own behaviour: whoever asks for it loads the weights again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from coldsnap.engines.settings import setting
from coldsnap.engines.sglang.memory import KV_CACHE, WEIGHTS
from coldsnap.engines.sglang.worker import CHUNK_BYTES, QUEUE_DEPTH, Resident
from coldsnap.errors import AdmissionError

__all__ = ["Live"]

_TRANSFER = {"chunk_bytes": CHUNK_BYTES, "queue_depth": QUEUE_DEPTH}


class Live:
    """The backing of released weights, of the way that ``COLDSNAP_LIVE_BACKING`` names.

    Args:
        resident: Whose memory.
        environ: Defaults to the process's own environment.
    """

    def __init__(self, resident: Resident, environ: Mapping[str, str] | None = None) -> None:
        self._resident = resident
        self._environ = environ
        self._copies: dict[int, bytearray] = {}

    def release(self, tags: Sequence[str]) -> None:
        """Keep the weights, where they are to be kept, before SGLang takes them away.

        Args:
            tags: What is taken away.

        Raises:
            AdmissionError: No directory was named for them, or it has no room.
        """
        backing = self._setting("LIVE_BACKING")
        if backing == "disk":
            self._memory().release(self._release_request(tags))
        elif backing == "cpu":
            self._copy()

    def resume(self, tags: Sequence[str]) -> None:
        """Bring back what is kept, of some tags.

        Args:
            tags: What SGLang is asked for.
        """
        status = self._memory().memory_status({})
        if wanted := [tag for tag in status["asleep"] if tag in tags]:
            self._memory().hydrate({"tags": wanted, "verify_mode": self._verify_mode(), **_TRANSFER})
        elif WEIGHTS in tags and self._copies:
            self._put_back()

    def _memory(self) -> Any:
        if self._resident.memory is None:
            raise AdmissionError("the worker is still loading its model")
        return self._resident.memory

    def _copy(self) -> None:
        memory = self._resident.allocations()
        self._copies = {}
        for region in memory.regions(WEIGHTS):
            self._copies[region.address] = bytearray(region.size_bytes)
            memory.copy_to_host(region.address, memoryview(self._copies[region.address]))

    def _put_back(self) -> None:
        memory = self._resident.allocations()
        memory.remap(memory.regions(WEIGHTS))
        for address, data in self._copies.items():
            memory.copy_from_host(address, memoryview(data))
        memory.synchronize()
        self._copies = {}

    def _release_request(self, tags: Sequence[str]) -> Mapping[str, Any]:
        root = self._setting("RUNTIME_DIR")
        if not os.path.isabs(root):
            raise AdmissionError(
                f"a release writes weights to files, and COLDSNAP_RUNTIME_DIR is {root!r}: launch with the absolute "
                "path of a directory on a disk, or with COLDSNAP_LIVE_BACKING cpu or discard"
            )
        name = self._resident.name
        return {
            "worker": name,
            "directory": os.path.join(root, "live", name),
            "store": os.path.join(root, "live", "store"),
            "capture_id": f"sleep-{os.getpid()}",
            "discard": [KV_CACHE] if KV_CACHE in tags else [],
            "export_model_payload": self._setting("EXPORT_MODEL_PAYLOAD") == "1",
            **_TRANSFER,
        }

    def _verify_mode(self) -> str:
        return "preverified" if self._setting("ARTIFACT_PREVERIFIED") == "1" else "inline"

    def _setting(self, name: str) -> str:
        return setting(f"COLDSNAP_{name}", self._environ)
