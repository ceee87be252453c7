#!/usr/bin/env python3
"""Measure how fast memory becomes a durable file on this machine, every way, and calibrate.

    python examples/qualify_capture.py                                     # 512 MiB of host memory
    python examples/qualify_capture.py --device 0 --bytes 8GB --directory /data --directory /dev/shm

Every capture ends with fdatasync; its time is in the rate, and beside it. The limits are a plain copy from the device
(or memcpy), and what the same disk takes from a writer that does nothing else, fdatasync included. ``of_slower`` is our
rate over the slower of the two. ``--profile`` writes the best setting as a policy.

Keys of the JSON: ``machine``, ``limits``, ``places`` (``filesystem``, ``raw_write``, ``rows``, ``of_slower``).
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

from attrs import asdict

from coldsnap import Policy
from coldsnap.errors import ColdSnapError
from coldsnap.host.mounts import filesystem_of
from coldsnap.policy import IO
from coldsnap.transfer.backend import CaptureReceipt, Tuning
from coldsnap.transfer.capture import CaptureBackendName, capture, packed
from coldsnap.transfer.memory import HostMemory, MemoryProvider
from coldsnap.transfer.native import NativeLibrary
from measured import (  # type: ignore[import-not-found]  # beside this script
    MIB,
    Rate,
    common_arguments,
    draw,
    link_rates,
    machine,
    memcpy_rate,
    memory_of,
    shown,
    table,
    timed,
)

EXTENT_BYTES = 64 * MIB
VERIFICATIONS: tuple[Literal["none", "crc32"], ...] = ("none", "crc32")


def raw_write_rate(path: Path, size_bytes: int, *, direct: bool, repeat: int) -> float:
    """Write blocks of random bytes, preallocated, and fdatasync: what the disk takes. GB/s."""
    rates = []
    for threads, block in ((1, 16 * MIB), (4, 4 * MIB), (8, 4 * MIB)):
        seconds = timed(_raw_writer(path, size_bytes, threads, block, direct=direct), repeat)
        rates.append(Rate.of(size_bytes - size_bytes % block, seconds).best)
    path.unlink()
    return float(max(rates))


def _raw_writer(path: Path, size_bytes: int, threads: int, block: int, *, direct: bool) -> Callable[[], None]:
    buffer = mmap.mmap(-1, block)
    buffer.write(os.urandom(block))
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0)
    offsets = range(0, size_bytes - size_bytes % block, block)

    def action() -> None:
        fd = os.open(path, flags, 0o600)
        try:
            os.posix_fallocate(fd, 0, max(block, size_bytes))
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(lambda offset: os.pwritev(fd, [buffer], offset), offsets))
            os.fdatasync(fd)
        finally:
            os.close(fd)

    return action


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


def measure(
    directory: Path, memory: MemoryProvider, library: NativeLibrary, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Run every setting in one directory."""
    region = memory.allocate(options.bytes, tag="weights")
    memory.copy_from_host(region.address, memoryview(os.urandom(min(options.bytes, EXTENT_BYTES))))
    parts = [
        (region.address + at, min(EXTENT_BYTES, options.bytes - at)) for at in range(0, options.bytes, EXTENT_BYTES)
    ]
    path, rows = directory / "coldsnap-qualify.pack", []
    for (backend, tuning), verification in itertools.product(settings(options), VERIFICATIONS):
        sources = packed(parts, verification=verification)
        receipts: list[CaptureReceipt] = []

        def action(
            backend: Any = backend, sources: Any = sources, tuning: Any = tuning, receipts: Any = receipts
        ) -> None:
            receipts.append(
                capture(
                    path,
                    sources,
                    memory=memory,
                    library=library,
                    backend=backend,
                    read_back=options.read_back,
                    tuning=tuning,
                )
            )

        row: dict[str, Any] = {"backend": backend, "verification": verification} | asdict(tuning)
        try:
            row |= asdict(Rate.of(options.bytes, timed(action, options.repeat)))
            row |= {"effective": receipts[-1].effective, "used_threads": receipts[-1].threads}
            row["stages_ns"] = asdict(receipts[-1].times)
        except ColdSnapError as error:
            row["unavailable"] = str(error)
        rows.append(row)
        print(
            "   ",
            backend,
            shown(tuning.chunk_bytes),
            tuning.queue_depth,
            verification,
            row.get("best"),
            file=sys.stderr,
        )
        path.unlink(missing_ok=True)
    memory.release([region])
    return rows


def qualify(
    directory: Path, memory: MemoryProvider, library: NativeLibrary, options: argparse.Namespace, link: float
) -> dict[str, Any]:
    """Measure one directory."""
    filesystem = filesystem_of(directory)
    print(f"{directory}: {filesystem.type}", file=sys.stderr)
    rows = measure(directory, memory, library, options)
    path = directory / "coldsnap-qualify.raw"
    raw = raw_write_rate(path, options.bytes, direct=filesystem.kind == "local", repeat=options.repeat)
    rates = [row["best"] for row in rows if "best" in row and row["verification"] == "none"]
    return {
        "directory": str(directory),
        "filesystem": filesystem.type,
        "raw_write": raw,
        "rows": rows,
        "of_slower": max(rates) / min(raw, link) if rates else None,
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
        lines += ["", f"{place['directory']} ({place['filesystem']}): raw write {place['raw_write']:.1f} GB/s"]
        lines.append(table(cells, titles))
        lines += [f"{row['backend']}: {row['unavailable']}" for row in place["rows"] if "unavailable" in row]
        lines += [f"of_slower: {place['of_slower']:.2f}"] if place["of_slower"] else []
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
