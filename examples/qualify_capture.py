#!/usr/bin/env python3
"""Measure how fast memory becomes a durable file on this machine, every way, and calibrate.

    python examples/qualify_capture.py                                     # 512 MiB of host memory
    python examples/qualify_capture.py --device 0 --bytes 8GB --directory /data --directory /dev/shm

Every capture ends with fdatasync; its time is in the rate, and beside it. The limits are a plain copy from the device
(or memcpy), and what the same disk takes from a writer that does nothing else, fdatasync included. ``of_slower`` is our
rate over the slower of the two. ``--profile`` writes the best setting as a policy.

Settings and raw writers take turns, so that a disk which slows down in between is unfair to none.

Keys of the JSON: ``machine``, ``limits``, ``places`` (``filesystem``, ``raw_write``, ``rows``, ``of_slower``: best over
best, ``median_of_slower``: median over median).
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from attrs import asdict, field, frozen

from coldsnap import Policy
from coldsnap.errors import ColdSnapError
from coldsnap.host.mounts import filesystem_of
from coldsnap.policy import IO
from coldsnap.transfer.backend import CaptureReceipt, Tuning
from coldsnap.transfer.capture import CaptureBackendName, capture, packed
from coldsnap.transfer.memory import HostMemory, MemoryProvider, Region
from coldsnap.transfer.native import NativeLibrary
from measured import (  # type: ignore[import-not-found]  # beside this script
    MIB,
    Rate,
    common_arguments,
    draw,
    in_turns,
    link_rates,
    machine,
    memcpy_rate,
    memory_of,
    raw_rates,
    shown,
    table,
    timed,
)

EXTENT_BYTES = 64 * MIB
VERIFICATIONS: tuple[Literal["none", "crc32"], ...] = ("none", "crc32")


@frozen(kw_only=True)
class RawWriter:
    """Writes blocks of random bytes into a preallocated file, and fdatasync: what the disk takes.

    Attributes:
        path: The file, removed after each turn.
        threads: How many write.
        block_bytes: Bytes of one write.
        size_bytes: How much is written.
        direct: Around the page cache.
        seconds: Of each turn, s.
    """

    path: Path
    threads: int
    block_bytes: int
    size_bytes: int
    direct: bool
    seconds: list[float] = field(factory=list)

    def __call__(self) -> None:
        """Take a turn."""
        with mmap.mmap(-1, self.block_bytes) as buffer:
            buffer.write(os.urandom(self.block_bytes))
            self.seconds.extend(timed(lambda: self._write(buffer), 1))
        self.path.unlink()

    def _write(self, buffer: mmap.mmap) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if self.direct else 0)
        fd = os.open(self.path, flags, 0o600)
        try:
            os.posix_fallocate(fd, 0, self.size_bytes)
            with ThreadPoolExecutor(self.threads) as pool:
                list(pool.map(lambda at: os.pwritev(fd, [buffer], at), range(0, self.size_bytes, self.block_bytes)))
            os.fdatasync(fd)
        finally:
            os.close(fd)


def raw_writers(directory: Path, size_bytes: int, *, direct: bool) -> list[RawWriter]:
    """Return writers with several numbers of threads and sizes of blocks."""
    path = directory / "coldsnap-qualify.raw"
    shapes = ((1, 16 * MIB), (4, 4 * MIB), (8, 4 * MIB), (16, 2 * MIB))
    return [
        RawWriter(
            path=path, threads=one, block_bytes=block, size_bytes=max(block, size_bytes // block * block), direct=direct
        )
        for one, block in shapes
    ]


def settings(options: argparse.Namespace) -> Iterator[tuple[CaptureBackendName, Tuning]]:
    """Return every backend, chunk, depth, slice and number of threads to try."""
    for backend in options.backends:
        if backend == "python":
            yield backend, Tuning()
            continue
        for chunk, depth, part, threads in itertools.product(
            options.chunks, options.depths, options.slices, options.threads
        ):
            if part <= chunk:
                yield backend, Tuning(chunk_bytes=chunk, queue_depth=depth, slice_bytes=part, threads=threads)


class Trial:
    """One setting in one directory: what it is, its turns, and what they gave."""

    def __init__(
        self, path: Path, parts: list[tuple[int, int]], memory: MemoryProvider, library: NativeLibrary, **row: Any
    ) -> None:
        self.path, self.memory, self.library = path, memory, library
        self.sources = packed(parts, verification=row["verification"])
        self.tuning: Tuning = row.pop("tuning")
        self.row = row | asdict(self.tuning)
        self.read_back: bool = self.row.pop("read_back")
        self.seconds: list[float] = []
        self.receipt: CaptureReceipt | None = None

    def __call__(self) -> None:
        """Take a turn, unless an earlier one found that this setting is not to be had here."""
        if "unavailable" in self.row:
            return
        try:
            self.seconds += timed(self._capture, 1)
        except ColdSnapError as error:
            self.row["unavailable"] = str(error)
        self.path.unlink(missing_ok=True)

    def _capture(self) -> None:
        how = {"backend": self.row["backend"], "read_back": self.read_back, "tuning": self.tuning}
        self.receipt = capture(self.path, self.sources, memory=self.memory, library=self.library, **how)

    def result(self) -> dict[str, Any]:
        """Return the row."""
        if (receipt := self.receipt) is None:
            return self.row
        moved = sum(source.length for source in self.sources)
        return {
            **self.row,
            **asdict(Rate.of(moved, self.seconds)),
            "effective": receipt.effective,
            "used_threads": receipt.threads,
            "stages_ns": asdict(receipt.times),
        }


def trials(
    directory: Path, region: Region, memory: MemoryProvider, library: NativeLibrary, options: argparse.Namespace
) -> list[Trial]:
    """Return everything that is tried in one directory."""
    parts = [
        (region.address + at, min(EXTENT_BYTES, options.bytes - at)) for at in range(0, options.bytes, EXTENT_BYTES)
    ]
    path = directory / "coldsnap-qualify.pack"
    return [
        Trial(
            path,
            parts,
            memory,
            library,
            backend=backend,
            verification=verification,
            tuning=tuning,
            read_back=options.read_back,
        )
        for (backend, tuning), verification in itertools.product(settings(options), VERIFICATIONS)
    ]


def qualify(
    directory: Path, memory: MemoryProvider, library: NativeLibrary, options: argparse.Namespace, link: float
) -> dict[str, Any]:
    """Measure one directory: every setting and the raw writers, in turns."""
    filesystem = filesystem_of(directory)
    print(f"{directory}: {filesystem.type}", file=sys.stderr)
    region = memory.allocate(options.bytes, tag="weights")
    memory.copy_from_host(region.address, memoryview(os.urandom(min(options.bytes, EXTENT_BYTES))))
    tried = trials(directory, region, memory, library, options)
    writers = raw_writers(directory, options.bytes, direct=filesystem.kind == "local")
    in_turns([*writers, *tried], options.repeat)
    memory.release([region])
    rows, raw = [trial.result() for trial in tried], raw_rates(writers)
    for row in rows:
        chunk = f"{shown(row['chunk_bytes'])}x{row['queue_depth']}"
        print("   ", row["backend"], chunk, row["verification"], row.get("best"), file=sys.stderr)
    unverified = [row for row in rows if "best" in row and row["verification"] == "none"]
    best, median = (max((row[name] for row in unverified), default=None) for name in ("best", "median"))
    return {
        "directory": str(directory),
        "filesystem": filesystem.type,
        "raw_write": raw,
        "rows": rows,
        "of_slower": best and best / min(raw["best"], link),
        "median_of_slower": median and median / min(raw["median"], link),
    }


def calibrated(places: list[dict[str, Any]]) -> Policy | None:
    """Return the fastest setting as a policy."""
    rows = [row for place in places for row in place["rows"] if "best" in row and row["backend"] != "python"]
    if not rows:
        return None
    best = max(rows, key=lambda row: row["median"])
    io = IO(capture_backend=best["backend"], chunk_bytes=best["chunk_bytes"], queue_depth=best["queue_depth"])
    return Policy(io=io)


def report(result: dict[str, Any]) -> str:
    """Write the table."""
    lines = [f"limits, GB/s: {', '.join(f'{name} {rate:.1f}' for name, rate in result['limits'].items())}"]
    titles = ["backend", "effective", "chunk", "depth", "threads", "verified", "best", "median"]
    for place in result["places"]:
        measured = sorted((row for row in place["rows"] if "best" in row), key=lambda row: -row["best"])
        cells = [
            [
                *(row["backend"], row["effective"], shown(row["chunk_bytes"]), row["queue_depth"], row["used_threads"]),
                *(row["verification"], row["best"], row["median"]),
            ]
            for row in measured[:12]
        ]
        lines += ["", f"{place['directory']} ({place['filesystem']}): raw write {place['raw_write']['best']:.1f} GB/s"]
        lines.append(table(cells, titles))
        lines += [f"{row['backend']}: {row['unavailable']}" for row in place["rows"] if "unavailable" in row]
        lines += [f"{name}: {place[name]:.2f}" for name in ("of_slower", "median_of_slower") if place[name]]
    return "\n".join(lines)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_arguments(parser)
    words: Callable[[str], list[str]] = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--backends", type=words, default=["auto", "buffered", "direct", "python"])
    parser.add_argument("--read-back", action="store_true", help="compare the durable file, too")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    options = arguments(argv)
    library = NativeLibrary.load(options.library)
    result: dict[str, Any] = {"machine": machine(options.device), "bytes": options.bytes}
    if options.device is None:
        host = HostMemory()
        threads = result["machine"]["processors"]
        result["limits"] = {"memcpy": memcpy_rate(library, host, options.bytes, threads, options.repeat).best}
        host.close()
    else:
        result["limits"] = link_rates(options.device, options.bytes, options.repeat)
    link = result["limits"]["memcpy" if options.device is None else "device_to_host"]
    memory = memory_of(options.device)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            places = [qualify(one, memory, library, options, link) for one in options.directory or [Path(temporary)]]
    finally:
        memory.close()
        library.release()
    result["places"] = places
    print(report(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    policy = calibrated(places)
    if options.profile and policy is not None:
        policy.save(options.profile)
    if options.plot:
        series = [
            (f"{place['filesystem']} {row['backend']} {shown(row['chunk_bytes'])}x{row['queue_depth']}", row["best"])
            for place in places
            for row in place["rows"]
            if "best" in row and row["verification"] == "none"
        ]
        draw(options.plot, "capture", series, result["limits"].items())
    return 0


if __name__ == "__main__":
    sys.exit(main())
