"""What an artifact is made of: files by kind, process memory by kind of mapping, weights by where they went.

The one rule: it reads the artifact as it lies there, and starts nothing.

    python examples/composing.py ARTIFACT

Keys: ``files`` (bytes by kind: images, volatile, residual, manifests, packs, …), ``without_packs``, ``pages``
(``compression``; ``raw_bytes`` that CRIU wrote; ``zero_bytes`` left out of them; ``stored_bytes``), ``memory`` (bytes
of pages by process, by kind: heap, stack, anonymous, private of a file, shared), ``largest`` (the largest anonymous
mappings, as process and bytes), ``zeros_left`` (zero pages that are still in files of pages; ``null`` where these are
compressed) and ``weights`` (by worker: ``model``, ``residual`` and ``vacant`` bytes).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import coldsnap as cs
from coldsnap.drivers.dump import opened_directory
from coldsnap.drivers.images import parse_entry, read_messages
from coldsnap.drivers.pagemap import MM_MAGIC, PAGE_BYTES, PREFIX, PRESENT, Pagemap

KINDS = ((1 << 5, "heap"), (1 << 1, "stack"), (1 << 6, "private of a file"), (1 << 9, "anonymous"))
"""CRIU's marks of a mapping, the telling ones first."""
LARGEST = 12
READ_BYTES = 4 << 20


def composition(artifact: cs.Artifact) -> dict[str, Any]:
    """Return what an artifact is made of."""
    files = dict(artifact.size_bytes)
    memory: dict[str, Counter[str]] = {}
    largest: list[tuple[int, str]] = []
    pages: Counter[str] = Counter()
    zeros: int | None = 0
    for unit in artifact.descriptor.capsule.units:
        stored = unit.pages
        pages.update(raw_bytes=stored.raw_bytes, zero_bytes=stored.zero_bytes, stored_bytes=stored.stored_bytes)
        directory = artifact.path / unit.images
        with opened_directory(directory) as images_fd:
            for name in sorted(path.name for path in directory.glob(f"{PREFIX}*.img")):
                process = name.removeprefix(PREFIX).removesuffix(".img")
                memory[process] = Counter()
                for kind, size in _mappings(images_fd, Pagemap.read(images_fd, name)):
                    memory[process][kind] += size
                    largest += [(size, process)] if kind in ("anonymous", "heap") else []
        left = zeros_in(directory)
        zeros = None if zeros is None or left is None else zeros + left
    compressions = {unit.pages.compression for unit in artifact.descriptor.capsule.units}
    return {
        "files": files,
        "without_packs": sum(size for kind, size in files.items() if kind != "packs"),
        "pages": {"compression": " ".join(sorted(compressions)), **pages},
        "memory": {process: dict(kinds) for process, kinds in memory.items()},
        "largest": [[process, size] for size, process in sorted(largest, reverse=True)[:LARGEST]],
        "zeros_left": zeros,
        "weights": _weights(artifact.path),
    }


def _mappings(images_fd: int, pagemap: Pagemap) -> Iterator[tuple[str, int]]:
    """Yield the kind of every mapping, and the bytes of pages that the image has of it."""
    if pagemap.mm_name is None:
        yield "shared", pagemap.pages * PAGE_BYTES
        return
    runs = [(one.address, one.address + one.pages * PAGE_BYTES) for one in pagemap.entries if one.flags & PRESENT]
    starts = [start for start, _ in runs]
    for data in read_messages(images_fd, pagemap.mm_name, MM_MAGIC):
        for vma in parse_entry("mm_entry", data, pagemap.mm_name).vmas:
            size, at = 0, max(0, bisect_right(starts, vma.start) - 1)
            while at < len(runs) and runs[at][0] < vma.end:
                size += max(0, min(vma.end, runs[at][1]) - max(vma.start, runs[at][0]))
                at += 1
            if size:
                yield next((kind for mark, kind in KINDS if vma.status & mark), "other"), size


def zeros_in(images: Path) -> int | None:
    """Return the bytes of zero pages in a directory's files of pages; ``None`` when these are compressed."""
    zero, found = bytes(PAGE_BYTES), 0
    if any(images.glob("pages-*.blocks")):
        return None
    for path in images.glob("pages-*.img"):
        with path.open("rb") as file:
            while data := file.read(READ_BYTES):
                found += sum(data[at : at + PAGE_BYTES] == zero for at in range(0, len(data), PAGE_BYTES)) * PAGE_BYTES
    return found


def _weights(path: Path) -> dict[str, dict[str, int]]:
    """Return what the manifest of each worker gives its pack, its residual, and nobody."""
    found = {}
    for manifest in sorted(path.glob("weights/*/native-manifest.json")):
        told = json.loads(manifest.read_text())
        found[manifest.parent.name] = {
            kind: sum(extent["size"] for extent in told.get(f"{kind}_extents") or ())
            for kind in ("model", "residual", "vacant")
        }
    return found


def lines(composed: Mapping[str, Any]) -> list[str]:
    """Return it as lines of a table."""
    found = [f"{'artifact without packs':<48} {composed['without_packs'] / 1e6:10.1f} MB"]
    pages = composed["pages"]
    text = ", ".join(f"{pages[f'{name}_bytes'] / 1e6:,.1f} MB {name}" for name in ("raw", "zero", "stored"))
    left = "" if composed["zeros_left"] is None else f"; zero pages left in: {composed['zeros_left'] / 1e6:,.1f} MB"
    ratio = f"; raw / stored {pages['raw_bytes'] / pages['stored_bytes']:.2f}" if pages["stored_bytes"] else ""
    found.append(f"{'  pages (' + pages['compression'] + ')':<48} {text}{ratio}{left}")
    for process, kinds in composed["memory"].items():
        each = ", ".join(f"{kind} {size / 1e6:,.1f}" for kind, size in sorted(kinds.items(), key=lambda one: -one[1]))
        found.append(f"{'  memory of process ' + process + ', MB':<48} {each}")
    for worker, kinds in composed["weights"].items():
        each = ", ".join(f"{kind} {size / 1e6:,.1f}" for kind, size in kinds.items())
        found.append(f"{'  weights of ' + worker + ', MB':<48} {each}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print what an artifact is made of."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact")
    parser.add_argument("--json", action="store_true", help="all keys")
    options = parser.parse_args(argv)
    composed = composition(cs.Artifact.open(os.path.abspath(options.artifact)))
    print(json.dumps(composed, indent=1) if options.json else "\n".join(lines(composed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
