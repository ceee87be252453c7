#!/usr/bin/env python3
"""Measure the store on this machine: hashing, verification by extents, writing, re-admission.

    python examples/qualify_store.py [--bytes 1073741824] [--directory DIR] [--library FILE] [--json FILE]

Everything is measured in the page cache of one filesystem, the best of 8 runs (writing) or 24 (reading), each figure
next to its own yardstick of the same minute, which takes turns with it:

| key | what | yardstick |
| --- | --- | --- |
| ``file_digest_ratio`` | SHA-256 of a pack, one thread | hashlib over the same bytes in memory, one thread |
| ``extent_verify_ratio`` | all extents of a pack verified, two threads | the same |
| ``write_ratio`` | a pack written from memory, hashed twice, durable | ``cp`` of the same bytes, ``sync`` of the copy |
| ``readmit_ms`` | the slowest admission of an unchanged pack among three sizes, ms | |

Both writers find their bytes in memory (``cp`` in the page cache), write to the same empty place of the same disk after
a ``sync`` that left it idle, and are done when the file is on it. Hashing is what a pack costs more than a copy.

The native library hashes two streams a core; ``lanes`` says how many it did, and 0 that there was none: then two
threads of hashlib and zlib are measured, and not the product as it is installed. Rates are bytes per second.
``readmit_ms_by_bytes`` shows that re-admission does not depend on the size.
"""

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from coldsnap.artifact.cores import available_cores
from coldsnap.artifact.hashing import sha256_fd
from coldsnap.artifact.lanes import Lanes
from coldsnap.artifact.pack import Bytes, Pack, verify_extents
from coldsnap.artifact.payloads import PayloadObject
from coldsnap.artifact.store import Store
from coldsnap.transfer.native import NativeLibrary, packaged

EXTENTS = 64
RUNS = 8


def timed(work: Callable[[], object]) -> float:
    """Return how long one run takes, s."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def fastest(
    works: dict[str, Callable[[], object]], *, runs: int, before: Callable[[], object] = list
) -> dict[str, float]:
    """Return the shortest run of each, s.

    They take turns, so that a neighbour on the machine slows the yardstick as much as what is measured by it.

    Args:
        works: What to run, by name.
        runs: How often each.
        before: Called before each run, not timed.
    """
    shortest = dict.fromkeys(works, float("inf"))
    for _ in range(runs):
        for name, work in works.items():
            before()
            shortest[name] = min(shortest[name], timed(work))
    return shortest


def made_of(size: int) -> list[Bytes]:
    """Return extents of uneven sizes that add up to about ``size`` bytes, and whose contents differ."""
    generator = random.Random(size)
    block = generator.randbytes(1 << 20)
    extents = []
    for index in range(EXTENTS):
        count = max(int(size / EXTENTS * generator.uniform(0.5, 1.5)), 16)
        data = bytearray(block * (count // len(block) + 1))[:count]
        data[:8] = index.to_bytes(8, "big")
        extents.append(Bytes(data))
    return extents


def copy(source: Path, target: Path) -> None:
    """Copy a file as durably as the store writes one."""
    subprocess.run(["cp", "--reflink=never", source, target], check=True)
    subprocess.run(["sync", target], check=True)


def writing(directory: Path, extents: list[Bytes], lanes: Lanes | None) -> dict[str, float]:
    """Measure writing a pack and copying one."""
    original = directory / "original"
    pack = Store(directory / "first").write(extents)
    Store(directory / "first").path(pack.sha256).rename(original)

    def clean() -> None:
        shutil.rmtree(directory / "store", ignore_errors=True)
        (directory / "copy").unlink(missing_ok=True)
        os.sync()

    works: dict[str, Callable[[], object]] = {
        "write_s": partial(Store(directory / "store", lanes=lanes).write, extents),
        "copy_s": partial(copy, original, directory / "copy"),
    }
    seconds = fastest(works, runs=RUNS, before=clean)
    clean()
    original.unlink()
    return seconds


def reading(directory: Path, pack: Pack, lanes: Lanes | None) -> dict[str, float]:
    """Measure hashing a pack, verifying its extents, and hashlib over the same bytes in memory."""
    path = Store(directory).path(pack.sha256)
    with path.open("rb") as stream:
        verify = partial(
            verify_extents, stream.fileno(), pack.bytes, pack.entries, path=str(path), threads=2, lanes=lanes
        )
        verify()  # what was written past the page cache comes into it as it does in real life
        data = path.read_bytes()
        works: dict[str, Callable[[], object]] = {
            "hashlib_s": lambda: hashlib.sha256(data).digest(),
            "file_digest_s": partial(sha256_fd, stream.fileno(), pack.bytes),
            "extent_verify_s": verify,
        }
        return fastest(works, runs=3 * RUNS)


def readmission(directory: Path, size: int) -> tuple[int, float]:
    """Return the size of a pack, and how long the admission of it takes when it is unchanged, s."""
    store = Store(directory)
    pack = store.write(made_of(size))
    name = str(store.path(pack.sha256).relative_to(store.root))
    payload = PayloadObject(worker="0", path=name, bytes=pack.bytes, sha256=pack.sha256)
    store.admit(payload)
    return pack.bytes, fastest({"again": partial(store.admit, payload)}, runs=50)["again"]


def main() -> None:
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=1 << 28, help="size of the pack")
    parser.add_argument("--directory", type=Path, help="where to work; default: a temporary directory")
    parser.add_argument("--library", type=Path, help="libcoldsnap_io.so; default: that of this installation, if any")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()

    lanes = NativeLibrary.load(options.library) if options.library else packaged()
    with tempfile.TemporaryDirectory(prefix="coldsnap-qualify-", dir=options.directory) as name:
        directory = Path(name)
        extents = made_of(options.bytes)
        one = writing(directory, extents, lanes)
        pack = Store(directory / "kept").write(extents)
        del extents
        one |= reading(directory / "kept", pack, lanes)
        readmit = dict(readmission(directory / "kept", size) for size in (1 << 16, 1 << 24, options.bytes))
    figures = {
        "file_digest_ratio": one["hashlib_s"] / one["file_digest_s"],
        "extent_verify_ratio": one["hashlib_s"] / one["extent_verify_s"],
        "write_ratio": one["copy_s"] / one["write_s"],
        "readmit_ms": max(readmit.values()) * 1e3,
        "readmit_ms_by_bytes": {size: seconds * 1e3 for size, seconds in readmit.items()},
        "hashlib_rate": pack.bytes / one["hashlib_s"],
        "write_rate": pack.bytes / one["write_s"],
        "copy_rate": pack.bytes / one["copy_s"],
        "pack_bytes": pack.bytes,
        "lanes": lanes.sha256_lanes if lanes else 0,
        "cores": available_cores(),
        "machine": f"{platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}",
    }
    for key, value in figures.items():
        print(f"{key:22} {value:,.3f}" if isinstance(value, float) else f"{key:22} {value}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
