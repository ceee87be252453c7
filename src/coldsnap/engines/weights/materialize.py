"""The pack of a worker that runs, written again out of its memory while it serves.

The one rule: nothing waits for it but what would take the memory away, and it takes the processor only when nobody else
wants it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import define, frozen

from coldsnap.artifact.durable import FaultPoint
from coldsnap.artifact.manifest import NativeManifest, read_document
from coldsnap.artifact.rebuild import rebuild_pack
from coldsnap.artifact.store import Store
from coldsnap.engines.rank import Busy
from coldsnap.engines.weights.generation import NATIVE_MANIFEST
from coldsnap.engines.weights.native import matching_regions
from coldsnap.engines.weights.requests import MaterializeRequest
from coldsnap.engines.weights.room import require_room
from coldsnap.engines.weights.source import Staging
from coldsnap.errors import AdmissionError, ColdSnapError
from coldsnap.transfer.memory import PreservedMemory
from coldsnap.transfer.native import NativeLibrary

__all__ = ["Materializer"]

State = Literal["none", "scheduled", "writing", "verifying", "ready", "failed"]
NICE = 10


@define
class _Writing:
    """One pack on its way, and how it is going."""

    manifest: NativeManifest
    store: Path
    library: NativeLibrary | None
    state: State = "scheduled"
    new_bytes: int = 0
    seconds: float = 0.0
    error: str = ""

    def reply(self) -> Mapping[str, Any]:
        pack = self.manifest.pack
        return {
            "state": self.state,
            "sha256": pack.sha256,
            "bytes": pack.bytes,
            "new_bytes": self.new_bytes,
            "seconds": self.seconds,
            "error": self.error,
        }


_NOTHING: Mapping[str, Any] = {
    "state": "none",
    "sha256": "",
    "bytes": 0,
    "new_bytes": 0,
    "seconds": 0.0,
    "error": "",
}


@frozen(eq=False)
class _Thread:
    writing: _Writing
    thread: threading.Thread


class Materializer:
    """What writes packs of one worker, one at a time.

    Args:
        memory: Who holds the bytes.
        at: Fault point.
        ended: Called by the writing thread at its end; leaves no copy of a byte behind.
    """

    def __init__(self, memory: PreservedMemory, *, at: FaultPoint, ended: Callable[[], None]) -> None:
        self._memory = memory
        self._at = at
        self._ended = ended
        self._last: _Thread | None = None

    def start(self, asked: MaterializeRequest, library: NativeLibrary | None) -> None:
        """Begin to write a pack; nothing is begun while the same one is being written.

        Args:
            asked: Which, and where to.
            library: Who hashes faster than Python's own.

        Raises:
            Busy: Another one is being written.
            IntegrityError: The manifest is not the one that was named.
            AdmissionError: It is not of this memory or has no pack, or the store has no room.
        """
        manifest = read_document(NativeManifest, Path(asked.directory) / NATIVE_MANIFEST, sha256=asked.manifest_sha256)
        if (last := self._last) is not None and last.thread.is_alive():
            if (last.writing.manifest.pack, last.writing.store) != (manifest.pack, Path(asked.store)):
                raise Busy(f"the pack {last.writing.manifest.pack.sha256} is being written already; wait for its end")
            return
        self._admit(asked, manifest)
        writing = _Writing(manifest, Path(asked.store), library)
        thread = threading.Thread(target=self._run, args=(writing,), name="coldsnap-materialize", daemon=True)
        self._last = _Thread(writing, thread)
        thread.start()

    def _admit(self, asked: MaterializeRequest, manifest: NativeManifest) -> None:
        if manifest.worker != asked.worker:
            raise AdmissionError(
                f"the manifest in {asked.directory} is worker {manifest.worker}'s, this is worker {asked.worker}"
            )
        if not manifest.model_extents:
            raise AdmissionError(f"the manifest in {asked.directory} has no pack: its residual holds everything")
        matching_regions(
            manifest.allocations, self._memory, what=f"worker {manifest.worker} in capture {manifest.capture_id}"
        )
        store = Store(asked.store)
        if not os.path.lexists(store.path(manifest.pack.sha256)):
            what = f"the pack of worker {manifest.worker}"
            require_room([(store.root, manifest.pack.bytes)], reserve_bytes=asked.reserve_bytes, what=what)

    def _run(self, writing: _Writing) -> None:
        began = time.monotonic()
        # Of this thread alone, and of those that it starts: Linux keeps the value for each thread.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        try:
            self._write(writing)
        except (ColdSnapError, OSError, RuntimeError) as error:
            writing.error = f"{type(error).__name__}: {error}"
        finally:
            self._ended()
            writing.seconds = time.monotonic() - began
            writing.state = "failed" if writing.error or writing.state != "ready" else "ready"

    def _write(self, writing: _Writing) -> None:
        manifest = writing.manifest

        def phase(name: str) -> None:
            writing.state = "writing" if name == "writing" else "verifying"
            self._at(f"materialize:{name}")

        with Staging(self._memory) as staging:
            sources = [
                staging.source(manifest.allocations[one.allocation].address + one.offset, one.size)
                for one in manifest.model_extents
            ]
            rebuilt = rebuild_pack(
                Store(writing.store, at=self._at, lanes=writing.library),
                sources,
                manifest.index,
                sha256=manifest.pack.sha256,
                size=manifest.pack.bytes,
                phase=phase,
            )
        writing.new_bytes = rebuilt.new_bytes
        writing.state = "ready"

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end of what is being written, None: however long it takes."""
        if self._last is not None:
            self._last.thread.join(timeout_s)

    def reply(self) -> Mapping[str, Any]:
        """Return how the last one is going."""
        return _NOTHING if self._last is None else self._last.writing.reply()
