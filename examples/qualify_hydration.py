#!/usr/bin/env python3
"""Measure how fast bytes come from a file to their final addresses on this machine, every way, and calibrate.

    python examples/qualify_hydration.py                                   # 512 MiB into host memory
    python examples/qualify_hydration.py --device 0 --bytes 8GB --directory /dev/shm --directory /data --compare

For each directory: the file cold (its pages dropped from the page cache) and hot; all backends, chunk by depth;
verified and not. Beside them their limits, of the same minute: a plain page-locked copy (device) or memcpy (host), and
what the disk gives to a reader that does nothing else. ``--compare`` runs InstantTensor, fastsafetensors, the Run:ai
streamer and safetensors on the same file; one that is missing fails the run. ``--profile`` writes the best setting as a
policy.

Keys of the JSON: ``machine``; ``limits`` (``host_to_device`` and ``device_to_host``, or ``memcpy``); ``host_ratio``
(from the page cache of a disk into host memory: our rate over that of memcpy with as many threads); ``places``, one for
each directory (``filesystem``, ``raw_direct``, ``rows``, ``rivals``, ``host``, ``checks``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from attrs import asdict, evolve

from coldsnap.errors import ColdSnapError
from coldsnap.host.mounts import filesystem_of
from coldsnap.transfer.backend import BackendName, FileExtent, HydrationReceipt, Tuning
from coldsnap.transfer.hydrate import hydrate, opened
from coldsnap.transfer.memory import HostMemory, MemoryProvider, Region
from coldsnap.transfer.native import NativeLibrary
from hydration_report import calibrated, checks, plot, report  # type: ignore[import-not-found]  # beside this script
from measured import (  # type: ignore[import-not-found]  # beside this script
    MIB,
    Rate,
    common_arguments,
    evict,
    in_turns,
    link_rates,
    machine,
    make_safetensors,
    memcpy_rate,
    memory_of,
    raw_rates,
    raw_readers,
    shown,
    size,
    timed,
    warm,
)


class Place:
    """One directory: a file in it, and where it goes."""

    def __init__(
        self, directory: Path, options: argparse.Namespace, library: NativeLibrary, memory: MemoryProvider
    ) -> None:
        self.path = directory / "coldsnap-qualify.safetensors"
        self.tensors = make_safetensors(self.path, options.bytes, reuse=options.keep)
        self.options = options
        self.filesystem = filesystem_of(self.path)
        self.library, self.memory = library, memory
        self.region: Region = memory.allocate(options.bytes, tag="weights")
        self.extents = self._extents()

    def _extents(self) -> list[FileExtent]:
        found = []
        address = self.region.address
        with self.path.open("rb") as stream:
            for _, offset, length in self.tensors:
                crc = None
                if "crc32" in self.options.verifications:
                    stream.seek(offset)
                    crc = self.library.crc32(memoryview(bytearray(stream.read(length))))
                found.append(FileExtent(file_offset=offset, address=address, length=length, crc32=crc))
                address += length
        return found

    def upto(self, size_bytes: int, *, verified: bool) -> list[FileExtent]:
        """Return the first extents that hold so many bytes."""
        kept, held = [], 0
        for extent in self.extents:
            if held < size_bytes:
                kept.append(extent if verified else evolve(extent, crc32=None))
                held += extent.length
        return kept

    def make_hot(self) -> None:
        """Bring the file into the page cache, unless it is there."""
        size_bytes = self.path.stat().st_size
        with opened(self.path) as fd:
            held = sum(self.library.resident_pages(fd, 0, size_bytes, 64 * MIB))
        if held * 4096 < size_bytes:
            warm(self.path)

    def check(self) -> None:
        """Compare what arrived with the file, at the ends of every extent."""
        for extent in (self.extents[0], self.extents[-1]):
            found = memoryview(bytearray(min(MIB, extent.length)))
            self.memory.copy_to_host(extent.address, found)
            with self.path.open("rb") as stream:
                stream.seek(extent.file_offset)
                if stream.read(len(found)) != found:
                    raise SystemExit(f"{self.path}: other bytes arrived than the file has")

    def close(self) -> None:
        """Give the memory back and remove the file, unless it is to be kept."""
        self.memory.release([self.region])
        if not self.options.keep:
            self.path.unlink()


def settings(options: argparse.Namespace) -> Iterator[tuple[BackendName, Tuning]]:
    """Return every backend, access, chunk, depth, slice and number of threads to try."""
    for backend in options.backends:
        if backend == "python":
            yield backend, Tuning()
            continue
        accesses = options.accesses if backend == "buffered" else ["auto"]
        tried = itertools.product(accesses, options.chunks, options.depths, options.slices, options.threads)
        for access, chunk, depth, slice_bytes, threads in tried:
            if slice_bytes <= chunk:
                yield (
                    backend,
                    Tuning(
                        chunk_bytes=chunk, queue_depth=depth, slice_bytes=slice_bytes, threads=threads, access=access
                    ),
                )


class Trial:
    """One setting on one place: what it is, its turns, and what they gave."""

    def __init__(
        self, place: Place, row: dict[str, Any], backend: BackendName, tuning: Tuning, size_bytes: int
    ) -> None:
        self.place, self.backend, self.tuning = place, backend, tuning
        self.row = {**row, "backend": backend, **asdict(tuning)}
        self.extents = place.upto(size_bytes, verified=row["verification"] != "none")
        self.before = (lambda: evict(place.path)) if row["cache"] == "cold" else place.make_hot
        self.seconds: list[float] = []
        self.receipt: HydrationReceipt | None = None

    def __call__(self) -> None:
        """Take a turn, unless an earlier one found that this setting is not to be had here."""
        if "unavailable" in self.row:
            return
        try:
            self.seconds += timed(self._hydrate, 1, self.before)
        except ColdSnapError as error:
            self.row["unavailable"] = str(error)

    def _hydrate(self) -> None:
        self.receipt = hydrate(
            self.place.path,
            self.extents,
            memory=self.place.memory,
            library=self.place.library,
            backend=self.backend,
            preverified=self.backend == "gds",
            tuning=self.tuning,
        )

    def result(self) -> dict[str, Any]:
        """Return the row, after what arrived last was compared with the file."""
        if (receipt := self.receipt) is None:
            return self.row
        self.place.check()
        return {
            **self.row,
            **asdict(Rate.of(receipt.bytes, self.seconds)),
            "effective": receipt.effective,
            "used_access": receipt.access,
            "used_threads": receipt.threads,
            "used_slice_bytes": receipt.slice_bytes,
            "ring_bytes": receipt.ring_bytes,
            "stages_ns": asdict(receipt.times),
        }


def trials(place: Place, options: argparse.Namespace, cache: str) -> list[Trial]:
    """Return everything that is tried on one place with a cold or a hot page cache."""
    size_bytes = min(options.bytes, options.cold_bytes) if cache == "cold" else options.bytes
    return [
        Trial(place, {"cache": cache, "verification": verification}, backend, tuning, size_bytes)
        for backend, tuning in settings(options)
        if cache == "hot" or (tuning.access != "register" and backend != "python")
        for verification in options.verifications
        if verification != "crc32" or backend != "gds"
    ]


def measure_hot(place: Place, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every setting out of the page cache, one after the other: each keeps its ring and the caches warm."""
    rows = []
    for trial in trials(place, options, "hot"):
        in_turns([trial], options.repeat)
        rows.append(trial.result())
        progress(rows[-1])
    return rows


def measure_cold(place: Place, options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run every setting and the raw readers from the disk, in turns; return their rows and the raw rates."""
    tried = trials(place, options, "cold")
    readers = raw_readers(place.path, min(options.bytes, options.cold_bytes))
    evict(place.path)  # of the raw readers' first turn; the others take their pages out of the cache themselves
    in_turns([*readers, *tried], options.repeat)
    rows = [trial.result() for trial in tried]
    for row in rows:
        progress(row)
    return rows, raw_rates(readers)


def progress(row: dict[str, Any]) -> None:
    """Say what was measured, as it comes."""
    rate = f"{row['best']:6.1f} GB/s" if "best" in row else f"unavailable: {row['unavailable'][:90]}"
    chunk = f"{shown(row['chunk_bytes'])}x{row['queue_depth']}/{shown(row['slice_bytes'])}/{row['threads']}t"
    words = (row["cache"], row["backend"], row["access"], chunk, row["verification"], rate)
    print("   ", " ".join(f"{word:<9}" for word in words), file=sys.stderr, flush=True)


def compare(place: Place, options: argparse.Namespace, cache: str) -> list[dict[str, Any]]:
    """Run the other loaders on the same file."""
    import torch

    from rivals import RIVALS  # type: ignore[import-not-found]  # beside this script

    device = f"cuda:{options.device}"
    before = (lambda: evict(place.path)) if cache == "cold" else place.make_hot
    rows = []
    for name, (_, load) in RIVALS.items():

        def action(load: Any = load) -> None:
            kept = load(place.path, device)
            torch.cuda.synchronize()
            del kept

        row: dict[str, Any] = {"cache": cache, "rival": name}
        try:
            repeat = 1 if cache == "cold" else options.repeat
            row |= asdict(Rate.of(options.bytes, timed(action, repeat, before)))
        except Exception as error:  # noqa: BLE001  a rival that breaks is a result
            row["failed"] = f"{type(error).__name__}: {error}"
        torch.cuda.empty_cache()
        rows.append(row)
        print("   ", cache, name, row.get("best", row.get("failed")), file=sys.stderr, flush=True)
    return rows


def host_ratio(place: Place, library: NativeLibrary, options: argparse.Namespace) -> dict[str, Any]:
    """Hold a transfer into host memory, hot, against memcpy with as many threads; they take turns."""
    threads = options.threads[0] or machine(None)["processors"]
    memory = HostMemory()
    extents = place.upto(options.bytes, verified=False)
    region = memory.allocate(options.bytes, tag="ratio")
    shift = region.address - place.region.address
    extents = [evolve(extent, address=extent.address + shift) for extent in extents]
    tuning = Tuning(threads=threads)
    place.make_hot()
    action = partial(hydrate, place.path, extents, memory=memory, library=library, tuning=tuning)
    action()  # the destination's pages are there from now on, as memcpy's are
    ours, limits = [], []
    for _ in range(options.repeat + 6):
        ours += timed(action, 1)
        limits.append(memcpy_rate(library, memory, options.bytes, threads, 1))
    memory.close()
    rate, limit = Rate.of(options.bytes, ours), max(one.best for one in limits)
    return {"ratio": rate.best / limit, "hydrate": asdict(rate), "memcpy": limit, "threads": threads}


def qualify(
    directory: Path, library: NativeLibrary, memory: MemoryProvider, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure one place."""
    place = Place(directory, options, library, memory)
    try:
        print(f"{directory}: {place.filesystem.type}", file=sys.stderr, flush=True)
        result: dict[str, Any] = {
            "directory": str(directory),
            "filesystem": place.filesystem.type,
            "kind": place.filesystem.kind,
            "raw_direct": None,
            "rows": [],
            "rivals": [],
        }
        result["host"] = (
            None if options.skip_host or "hot" not in options.caches else host_ratio(place, library, options)
        )
        if "cold" in options.caches and place.filesystem.kind != "memory":  # pages of a memory filesystem stay
            result["rows"], result["raw_direct"] = measure_cold(place, options)
            result["rivals"] += compare(place, options, "cold") if options.compare else []
        if "hot" in options.caches:
            result["rows"] += measure_hot(place, options)
            result["rivals"] += compare(place, options, "hot") if options.compare else []
        return result
    finally:
        place.close()


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_arguments(parser)
    words = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--backends", type=words, default=["auto", "buffered", "direct", "gds", "python"])
    parser.add_argument("--accesses", type=words, default=["read", "map"], help="of buffered: read, map, register")
    parser.add_argument("--caches", type=words, default=["cold", "hot"])
    parser.add_argument("--verifications", type=words, default=["none", "crc32"])
    parser.add_argument("--cold-bytes", type=size, default=512 * MIB, help="how much to move with a cold cache")
    parser.add_argument("--compare", action="store_true", help="run the other loaders, too; needs a device")
    parser.add_argument("--keep", action="store_true", help="keep the file, and use one of the right size again")
    parser.add_argument("--skip-host", action="store_true", help="leave host_ratio out")
    parser.add_argument("--shown", type=int, default=12, help="rows of the table")
    options = parser.parse_args(argv)
    if options.device is None:
        options.backends = [backend for backend in options.backends if backend != "gds"]
    return options


def limits(options: argparse.Namespace, library: NativeLibrary) -> dict[str, float]:
    """Measure what no transfer can be faster than."""
    if options.device is not None:
        return dict(link_rates(options.device, options.bytes, options.repeat))
    threads = options.threads[0] or machine(None)["processors"]
    memory = HostMemory()
    try:
        return {"memcpy": memcpy_rate(library, memory, options.bytes, threads, options.repeat).best}
    finally:
        memory.close()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything."""
    library = NativeLibrary.load(options.library)
    result: dict[str, Any] = {"machine": machine(options.device), "bytes": options.bytes, "shown": options.shown}
    result["limits"] = limits(options, library)
    memory = memory_of(options.device)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            directories = options.directory or [Path(temporary)]
            result["places"] = [qualify(directory, library, memory, options) for directory in directories]
    finally:
        memory.close()
        library.release()
    limit = result["limits"]["memcpy" if options.device is None else "host_to_device"]
    for place in result["places"]:
        place["checks"] = checks(place, limit)
    # A memory filesystem has 4 KiB pages unless told otherwise; the kernel gives them more slowly than memcpy copies.
    on_disk = [place for place in result["places"] if place["kind"] != "memory"] or result["places"]
    ratios = [place["host"]["ratio"] for place in on_disk if place["host"]]
    result["host_ratio"] = min(ratios, default=None)
    return result


def comparison_lacks(options: argparse.Namespace) -> list[str]:
    """Return what the comparison needs and does not have."""
    from rivals import missing  # beside this script

    return missing() if options.device is not None else ["--device"]


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    options = arguments(argv)
    if options.compare and (lacking := comparison_lacks(options)):
        print("--compare lacks", *lacking, sep="\n  ", file=sys.stderr)
        return 2
    result = run(options)
    print(report(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    policy = calibrated(result["places"])
    if options.profile and policy is not None:
        policy.save(options.profile)
    if options.plot:
        plot(options.plot, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
