"""One worker's memory: awake, asleep, and how it gets from one to the other.

The one rule: an allocation counts as awake only after everything has arrived, was verified and synchronised. Until
then it is asleep, whatever is mapped; a failed hydrate is repeated as a whole, and nothing is mapped twice. A failure
before the first allocation is unmapped changes nothing.

An engine gives its allocator (:class:`~coldsnap.transfer.memory.PreservedMemory`), the split of what its load wrote and
its hooks, and adds :meth:`WorkerMemory.operations` to those of its rank. The split's allocations are the regions'
``address``, ``size_bytes`` and ``tag``::

    worker = WorkerMemory(memory, split=lambda: split(allocations, written), hooks=Hooks(before_release=…))
    Rank("worker", path, engine=…, versions=…, operations=worker.operations())     # release, hydrate, memory

Requests and replies: ``docs/weights.md``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from coldsnap.artifact.durable import FaultPoint, unharmed
from coldsnap.artifact.store import Store
from coldsnap.engines.rank import Busy, Operation
from coldsnap.engines.weights.ends import Ends, Samples
from coldsnap.engines.weights.filling import filling
from coldsnap.engines.weights.generation import Generation, Writing, write_generation
from coldsnap.engines.weights.hooks import Hooks
from coldsnap.engines.weights.materialize import Materializer
from coldsnap.engines.weights.native import WEIGHTS, matching_regions
from coldsnap.engines.weights.requests import HydrateRequest, MaterializeRequest, ReleaseRequest, read_request
from coldsnap.engines.weights.split import Split
from coldsnap.engines.weights.waking import Fill, Waking, mapped_bytes
from coldsnap.errors import AdmissionError
from coldsnap.transfer.heap import trim_heap
from coldsnap.transfer.memory import PreservedMemory, Region
from coldsnap.transfer.native import NativeLibrary, packaged

__all__ = ["Hooks", "WorkerMemory"]

Reply = Mapping[str, Any]


@frozen(kw_only=True)
class Asleep:
    """What a release gave away: the tags that can be hydrated, with their regions."""

    generation: Generation
    regions: Mapping[str, tuple[Region, ...]]
    samples: Samples
    reply: Reply
    native_library: str | None
    native_sha256: str | None
    python: bool


class WorkerMemory:
    """The memory of one worker, and its control operations.

    Args:
        memory: The engine's allocator.
        split: What is the model's; asked at each release.
        ends: Digests of both ends of every parameter and buffer, by name, for a number of bytes; None: it has none.
        hooks: What the engine does around it.
        at: Fault point.
    """

    def __init__(
        self,
        memory: PreservedMemory,
        *,
        split: Callable[[], Split],
        ends: Ends | None = None,
        hooks: Hooks | None = None,
        at: FaultPoint = unharmed,
    ) -> None:
        self._memory = memory
        self._split = split
        self._ends = ends
        self._hooks = hooks or Hooks()
        self._at = at
        self._lock = threading.Lock()
        self._libraries: dict[tuple[str | None, str | None], NativeLibrary] = {}
        self._worker = ""
        self._error = ""
        self._last: Asleep | None = None
        self._asleep: frozenset[str] = frozenset()
        self._materializer = Materializer(memory, at=at, ended=self._leave_no_copy)

    @property
    def state(self) -> str:
        """``awake``, ``sleeping`` (some of it, at least), or ``failed`` (the same, and the last attempt failed)."""
        return "failed" if self._error else "sleeping" if self._asleep else "awake"

    def operations(self) -> Mapping[str, Operation]:
        """Return what a rank answers."""
        return {
            "release": self.release,
            "hydrate": self.hydrate,
            "memory": self.memory_status,
            "materialize": self.materialize,
        }

    def memory_status(self, _request: Mapping[str, Any]) -> Reply:
        """Say what is mapped and what is asleep."""
        with self._lock:
            return {
                "state": self.state,
                "worker": self._worker,
                "regions": self._sizes(),
                "asleep": sorted(self._asleep),
                "generation": self._last.generation.name if self._last else "",
                "error": self._error,
                "materialization": self._materializer.reply(),
            }

    def _sizes(self) -> dict[str, dict[str, int]]:
        sizes: dict[str, dict[str, int]] = {}
        for region in self._memory.regions():
            size = sizes.setdefault(region.tag, {"bytes": 0, "mapped_bytes": 0})
            size["bytes"] += region.size_bytes
            size["mapped_bytes"] += region.mapped_bytes * self._memory.is_mapped(region)
        return sizes

    # Awake to asleep

    def release(self, request: Mapping[str, Any]) -> Reply:
        """Write the generation, then give the backing away.

        Raises:
            Busy: It is asleep already, elsewhere or half; or failed.
            AdmissionError: There is not enough room, or the split is not of this memory.
            ColdSnapError: The generation could not be written; nothing was given away.
        """
        asked = read_request(ReleaseRequest, request)
        with self._lock:
            if self._asleep:
                return self._released_already(asked)
            self._materializer.wait()  # it reads what would be given away
            return self._release(asked)

    def _released_already(self, asked: ReleaseRequest) -> Reply:
        last = self._last
        whole = last is not None and self._asleep == frozenset(last.regions) and not self._error
        if last is None or not whole or str(last.generation.directory) != asked.directory:
            where = f", into {last.generation.directory}" if last else ""
            raise Busy(f"{', '.join(sorted(self._asleep))} of this worker sleeps already{where}; hydrate it first")
        return last.reply

    def _release(self, asked: ReleaseRequest) -> Reply:
        library = self._library(asked.native_library, asked.native_sha256, needed=asked.backend != "python")
        try:
            self._hooks.before_release()
            regions, split = self._divide(asked)
            samples = Samples.of(self._ends, asked.verify_model_bytes)
            generation = self._write(asked, split, regions, library)
            return self._give_away(asked, split, regions, generation, samples)
        finally:
            self._leave_no_copy()

    def _divide(self, asked: ReleaseRequest) -> tuple[dict[str, tuple[Region, ...]], Split]:
        """Return what is given away, by tag, and the split of what is preserved."""
        self._memory.synchronize()
        split = self._split()
        both = {one.region for one in split.allocations} & {*asked.discard}
        if both or WEIGHTS in asked.discard:
            raise AdmissionError(f"{', '.join(sorted(both)) or WEIGHTS} cannot be both preserved and discarded")
        preserved = matching_regions(split.allocations, self._memory, what="the engine's split")
        if not preserved:
            raise AdmissionError("this worker's memory provider has no weights: load the model through it")
        discarded = {tag: self._memory.regions(tag) for tag in asked.discard}
        return {WEIGHTS: preserved, **{tag: found for tag, found in discarded.items() if found}}, split

    def _write(
        self,
        asked: ReleaseRequest,
        split: Split,
        regions: Mapping[str, Sequence[Region]],
        library: NativeLibrary | None,
    ) -> Generation:
        return write_generation(
            split,
            memory=self._memory,
            store=Store(asked.store, at=self._at, lanes=library),
            directory=Path(asked.directory),
            identity=asked.identity,
            discarded={tag: mapped_bytes(found) for tag, found in regions.items() if tag != WEIGHTS},
            writing=Writing(
                library=library,
                backend=asked.capture_backend,
                tuning=asked.tuning,
                export_model_payload=asked.export_model_payload,
                reuse=asked.reuse_blob,
                reserve_bytes=asked.reserve_bytes,
                recording=asked.recording,
            ),
            at=self._at,
        )

    def _give_away(
        self,
        asked: ReleaseRequest,
        split: Split,
        regions: Mapping[str, tuple[Region, ...]],
        generation: Generation,
        samples: Samples,
    ) -> Reply:
        began = time.monotonic()
        every = [region for found in regions.values() for region in found]
        self._worker = asked.worker
        try:
            self._at("memory:release")
            self._memory.release(every)
            self._memory.synchronize()
            self._at("memory:released")
            self._hooks.after_release()
        except BaseException as error:
            if not all(self._memory.is_mapped(region) for region in every):
                self._sleep(asked, regions, generation, samples, {}, error=_sentence(error))
            raise
        reply = _release_reply(generation, split, regions, time.monotonic() - began)
        self._sleep(asked, regions, generation, samples, reply)
        return reply

    def _sleep(
        self,
        asked: ReleaseRequest,
        regions: Mapping[str, tuple[Region, ...]],
        generation: Generation,
        samples: Samples,
        reply: Reply,
        *,
        error: str = "",
    ) -> None:
        self._last = Asleep(
            generation=generation,
            regions=regions,
            samples=samples,
            reply=reply,
            native_library=asked.native_library,
            native_sha256=asked.native_sha256,
            python=asked.backend == "python",
        )
        self._asleep = frozenset(regions)
        self._error = error

    # Asleep to awake

    def hydrate(self, request: Mapping[str, Any]) -> Reply:
        """Map what is asleep again, and fill it.

        Raises:
            AdmissionError: A tag, or the generation, is not of this memory.
            ArtifactError: Manifest, pack or residual are not those captured.
            NativeError: A transfer failed.
        """
        asked = read_request(HydrateRequest, request)
        with self._lock:
            tags = self._tags(asked)
            if not tags or self._last is None:
                return {"state": self.state, "bytes": {}, "mapped": 0, "seconds": {}, "receipt": None, "receipts": {}}
            try:
                reply = self._hydrate(asked, self._last, tags)
            except BaseException as error:
                self._error = _sentence(error)
                raise
            finally:
                self._leave_no_copy()
            self._asleep -= {*tags}
            self._error = ""
            return {"state": self.state, **reply}

    def _tags(self, asked: HydrateRequest) -> tuple[str, ...]:
        """Return what is asked for and asleep; weights first, because a discarded region needs nothing but room."""
        known = {WEIGHTS, *(region.tag for region in self._memory.regions())}
        unknown = {*(asked.tags or ())} - known
        if unknown:
            raise AdmissionError(f"no region {', '.join(sorted(unknown))} here; there are {', '.join(sorted(known))}")
        wanted = self._asleep if asked.tags is None else self._asleep & {*asked.tags}
        return tuple(sorted(wanted, key=lambda tag: (tag != WEIGHTS, tag)))

    def _hydrate(self, asked: HydrateRequest, last: Asleep, tags: Sequence[str]) -> Reply:
        self._hooks.before_hydrate(tags)
        waking = Waking(self._memory, self._at)
        if WEIGHTS in tags:
            last.samples.require(asked.compared_bytes)
            waking.weights(last.regions[WEIGHTS], self._filling(asked, last))
        for tag in tags:
            if tag != WEIGHTS:
                waking.discarded(tag, last.regions[tag])
        self._memory.synchronize()
        if WEIGHTS in tags and asked.compared_bytes:
            last.samples.compare(self._ends)
        self._at("hydrate:commit")
        self._hooks.after_hydrate(tags)
        return waking.reply()

    def _filling(self, asked: HydrateRequest, last: Asleep) -> Fill:
        path, sha256 = asked.native_library, asked.native_sha256
        if path is None and sha256 is None:
            path, sha256 = last.native_library, last.native_sha256
        return filling(
            asked,
            last.generation,
            memory=self._memory,
            worker=self._worker,
            python=last.python,
            library=lambda: self._library(path, sha256, needed=True),
        )

    # Both ways

    def materialize(self, request: Mapping[str, Any]) -> Reply:
        """Write the pack of a generation out of memory that is awake; begin, and wait as long as the caller says.

        Raises:
            Busy: Some of it sleeps, or another pack is being written.
            ArtifactError: The manifest is not the one that was named.
            AdmissionError: It is not of this memory, or the store has no room.
        """
        asked = read_request(MaterializeRequest, request)
        with self._lock:
            if self._asleep:
                raise Busy(f"{', '.join(sorted(self._asleep))} of this worker sleeps; wake the engine first")
            named = asked.native_library is not None or asked.native_sha256 is not None
            library = self._library(asked.native_library, asked.native_sha256, needed=True) if named else packaged()
            self._materializer.start(asked, library)
        self._materializer.wait(asked.wait_s)
        return self._materializer.reply()

    def settle(self) -> None:
        """Wait for the end of a pack that is being written, before somebody else takes the memory away."""
        self._materializer.wait()

    def _library(self, path: str | None, sha256: str | None, *, needed: bool) -> NativeLibrary | None:
        if not needed:
            return None
        key = (path, sha256)
        if key not in self._libraries:
            self._libraries[key] = NativeLibrary.load(path, sha256=sha256)
        return self._libraries[key]

    def _leave_no_copy(self) -> None:
        for library in self._libraries.values():
            library.release()
        trim_heap()


def _release_reply(
    generation: Generation, split: Split, regions: Mapping[str, Sequence[Region]], seconds: float
) -> Reply:
    pack = generation.pack
    sizes = {tag: mapped_bytes(found) for tag, found in regions.items()}
    return {
        "state": "sleeping",
        "worker": generation.worker,
        "generation": generation.name,
        "manifest_sha256": generation.manifest_sha256,
        "pack": pack and {"bytes": pack.bytes, "sha256": pack.sha256, "new_bytes": generation.new_pack_bytes},
        "residual": {"bytes": generation.residual.bytes, "sha256": generation.residual.sha256},
        "released": sizes,
        "discarded": {tag: size for tag, size in sizes.items() if tag != WEIGHTS},
        "coverage": str(generation.coverage),
        "kept": dict(split.kept),
        "seconds": {"write": sum(generation.seconds.values()), **generation.seconds, "release": seconds},
        "backend": generation.receipt.effective,
        "recovery": generation.recorded(),
    }


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
