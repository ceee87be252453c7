"""What becomes of the weights when a user asks SGLang itself to release its memory.

The one rule: what was taken away in one way comes back in the same way; ``discard`` brings nothing back, and that is
SGLang's own behaviour: whoever asks for it loads the weights again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coldsnap.engines.settings import setting
from coldsnap.engines.sglang.memory import KV_CACHE, WEIGHTS
from coldsnap.engines.sglang.worker import CHUNK_BYTES, QUEUE_DEPTH, Resident
from coldsnap.errors import AdmissionError

__all__ = ["Live"]

_TRANSFER = {"chunk_bytes": CHUNK_BYTES, "queue_depth": QUEUE_DEPTH}


class Live:
    """The backing of released weights, of the way that ``COLDSNAP_LIVE_BACKING`` names; a capture has files instead.

    Args:
        resident: Whose memory.
        identify: Describes the worker.
        environ: Defaults to the process's own environment.

    Raises:
        AdmissionError: The settings contradict each other.
    """

    def __init__(
        self,
        resident: Resident,
        identify: Callable[[], Mapping[str, Any]],
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._resident = resident
        self._identify = identify
        self._environ = environ
        self._copies: dict[int, bytearray] = {}
        self._check()

    def _check(self) -> None:
        for name, known in (("MODE", ("off", "capture")), ("LIVE_BACKING", ("discard", "disk", "cpu"))):
            if (found := self._setting(name)) not in known:
                raise AdmissionError(f"COLDSNAP_{name} is {found!r}, expected one of {', '.join(known)}")
        if self._setting("MODE") == "capture":
            self._root("ARTIFACT_DIR")
            self._root("PROCESS_ARTIFACT_ROOT")

    def release(self, tags: Sequence[str]) -> None:
        """Keep the weights, where they are to be kept, before SGLang takes them away.

        Args:
            tags: What is taken away.

        Raises:
            AdmissionError: No directory was named for them, or it has no room.
        """
        backing = self._setting("LIVE_BACKING")
        if self._setting("MODE") == "capture":
            self._capture(tags)
        elif backing == "disk":
            root = self._root("RUNTIME_DIR") / "live"
            self._memory().release(self._release_request(tags, root / self._resident.name, root / "store"))
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

    def _capture(self, tags: Sequence[str]) -> None:
        from coldsnap.engines.sglang import semantic  # noqa: PLC0415  for captures alone

        root, name = self._root("PROCESS_ARTIFACT_ROOT"), self._resident.name
        storages = semantic.describe(self._resident.models)
        asked = self._release_request(tags, root / "hydration" / name / "generation", root / "store")
        generation = self._memory().release(asked)
        semantic.write(
            storages,
            identity=self._identify(),
            generation=generation,
            artifact_dir=self._root("ARTIFACT_DIR"),
            process_root=root,
        )

    def _root(self, name: str) -> Path:
        root = self._setting(name)
        if not os.path.isabs(root):
            raise AdmissionError(
                f"a release writes weights to files, and COLDSNAP_{name} is {root!r}: launch with the absolute path of "
                "a directory on a disk, or with COLDSNAP_LIVE_BACKING cpu or discard"
            )
        return Path(root)

    def _release_request(self, tags: Sequence[str], directory: Path, store: Path) -> Mapping[str, Any]:
        return {
            "worker": self._resident.name,
            "directory": str(directory),
            "store": str(store),
            "capture_id": f"sleep-{os.getpid()}",
            "discard": [KV_CACHE] if KV_CACHE in tags else [],
            "export_model_payload": self._setting("EXPORT_MODEL_PAYLOAD") == "1",
            **_TRANSFER,
        }

    def _verify_mode(self) -> str:
        return "preverified" if self._setting("ARTIFACT_PREVERIFIED") == "1" else "inline"

    def _setting(self, name: str) -> str:
        return setting(f"COLDSNAP_{name}", self._environ)
