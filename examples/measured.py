"""What the transfer qualifications share: files to move, a warm or a cold page cache, limits, tables.

Every rate is in GB/s, 10^9 bytes a second; the best of the repeats, with the median beside it in the JSON.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import statistics
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from attrs import asdict, field, frozen

from coldsnap.transfer.memory import HostMemory, MemoryProvider, Region
from coldsnap.transfer.native import ABI, NativeLibrary
from coldsnap.transfer.prefetch import prefetch

MIB = 1 << 20
TENSOR_BYTES = 64 * MIB


def size(text: str) -> int:
    """Read ``512MiB``, ``8GB`` or a plain number of bytes."""
    units = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
    for unit, factor in units.items():
        if text.endswith(unit):
            return int(float(text[: -len(unit)]) * factor)
    return int(text)


def sizes(text: str) -> list[int]:
    """Read a list of sizes, comma by comma."""
    return [size(one) for one in text.split(",")]


def numbers(text: str) -> list[int]:
    """Read a list of numbers, comma by comma."""
    return [int(one) for one in text.split(",")]


def shown(size_bytes: int) -> str:
    """Write a size as people say it."""
    for unit, factor in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if size_bytes >= factor and not size_bytes % factor:
            return f"{size_bytes // factor}{unit}"
    return str(size_bytes)


@frozen(kw_only=True)
class Rate:
    """How fast something was.

    Attributes:
        best: The best repeat, GB/s.
        median: The median, GB/s.
        first: The first repeat, GB/s: it pays for what later ones find ready.
    """

    best: float
    median: float
    first: float

    @classmethod
    def of(cls, size_bytes: int, seconds: Sequence[float]) -> Rate:
        """Build it from the durations of the repeats, s."""
        rates = [size_bytes / one / 1e9 for one in seconds]
        return cls(best=max(rates), median=statistics.median(rates), first=rates[0])


def timed(action: Callable[[], object], repeat: int, before: Callable[[], object] = lambda: None) -> list[float]:
    """Run an action several times; return the durations, s."""
    seconds = []
    for _ in range(repeat):
        before()
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return seconds


def make_safetensors(path: Path, size_bytes: int, *, reuse: bool = False) -> list[tuple[str, int, int]]:
    """Write random tensors of bfloat16; return ``(name, offset, length)`` of each.

    The blocks are one random block and a number, so that making them is not what one waits for.

    Args:
        path: The file.
        size_bytes: Bytes of all tensors.
        reuse: Keep a file that has the right size.
    """
    lengths = [min(TENSOR_BYTES, size_bytes - at) for at in range(0, size_bytes, TENSOR_BYTES)]
    header: dict[str, Any] = {}
    for index, length in enumerate(lengths):
        start = TENSOR_BYTES * index
        header[f"layer.{index}"] = {"dtype": "BF16", "shape": [length // 2], "data_offsets": [start, start + length]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    if not (reuse and path.exists() and path.stat().st_size == 8 + len(text) + size_bytes):
        _write_blocks(path, struct.pack("<Q", len(text)) + text, lengths)
    return [(f"layer.{i}", 8 + len(text) + TENSOR_BYTES * i, length) for i, length in enumerate(lengths)]


def _write_blocks(path: Path, head: bytes, lengths: list[int]) -> None:
    block = bytearray(os.urandom(TENSOR_BYTES))
    with path.open("wb", buffering=0) as stream:
        stream.write(head)
        for index, length in enumerate(lengths):
            block[:8] = struct.pack("<Q", index)
            left = memoryview(block)[:length]
            while left:
                left = left[stream.write(left) :]
        os.fsync(stream.fileno())


def evict(path: Path) -> None:
    """Drop a file's pages from the page cache; no privilege is needed, nothing else is touched."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def warm(path: Path) -> None:
    """Bring a file into the page cache."""
    prefetch(path).wait()


def in_turns(actions: Sequence[Callable[[], object]], repeat: int) -> None:
    """Let every action have a turn in each round, and another one begin each round.

    A disk that is shared, or that allows a burst, is not the same for the first and the last of a row of measurements:
    what is compared must be measured in between each other.
    """
    for turn in range(repeat):
        first = turn * len(actions) // repeat
        for action in (*actions[first:], *actions[:first]):
            action()


@frozen(kw_only=True)
class RawReader:
    """Reads with O_DIRECT into aligned memory and does nothing else: what the disk gives.

    Attributes:
        path: The file.
        threads: How many read.
        block_bytes: Bytes of one read.
        size_bytes: How much is read.
        seconds: Of each turn, s.
    """

    path: Path
    threads: int
    block_bytes: int
    size_bytes: int
    seconds: list[float] = field(factory=list)

    def __call__(self) -> None:
        """Take a turn."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        try:
            self.seconds.extend(timed(_raw_reader(fd, self.size_bytes, self.threads, self.block_bytes), 1))
        finally:
            os.close(fd)


def raw_readers(path: Path, size_bytes: int) -> list[RawReader]:
    """Return readers with several numbers of threads and sizes of blocks."""
    shapes = ((1, 16 * MIB), (4, 4 * MIB), (8, 4 * MIB), (16, MIB), (16, 2 * MIB), (16, 16 * MIB))
    return [RawReader(path=path, threads=one, block_bytes=block, size_bytes=size_bytes) for one, block in shapes]


class Raw(Protocol):
    """A reader or writer that does nothing else."""

    threads: int
    block_bytes: int
    size_bytes: int
    seconds: list[float]


def raw_rates(tried: Sequence[Raw]) -> dict[str, Any]:
    """Return the best rate, the best median, and the rates of every one."""
    rates = [(one, Rate.of(one.size_bytes, one.seconds)) for one in tried]
    rows = [{"threads": one.threads, "block_bytes": one.block_bytes, **asdict(rate)} for one, rate in rates]
    return {"best": max(row["best"] for row in rows), "median": max(row["median"] for row in rows), "rows": rows}


def _raw_reader(fd: int, size_bytes: int, threads: int, block: int) -> Callable[[], object]:
    offsets = range(0, size_bytes - size_bytes % block or size_bytes, block)

    def read(share: range) -> None:
        with mmap.mmap(-1, max(block, 2 * MIB), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as whole:
            # A request into scattered 4 KiB pages has as many segments, and devices take few of them at a time.
            whole.madvise(mmap.MADV_HUGEPAGE)
            buffer = memoryview(whole)[:block]
            for offset in share:
                os.preadv(fd, [buffer], offset)
            buffer.release()

    def action() -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, [offsets[index::threads] for index in range(threads)]))

    return action


def memcpy_rate(library: NativeLibrary, memory: HostMemory, size_bytes: int, threads: int, repeat: int) -> Rate:
    """Copy between two places in memory: the limit of a transfer into host memory."""
    source, target = _limit_regions(library, memory, size_bytes, threads)
    action = lambda: library.memcpy(target.address, source.address, size_bytes, threads)  # noqa: E731
    return Rate.of(size_bytes, timed(action, repeat))


def _limit_regions(library: NativeLibrary, memory: HostMemory, size_bytes: int, threads: int) -> tuple[Region, Region]:
    regions = memory.regions("limit")
    if not regions:
        regions = tuple(memory.allocate(size_bytes, tag="limit") for _ in range(2))
        # Touch both: a source of untouched pages would be one page of zeros, read from the cache.
        library.memcpy(regions[1].address, regions[0].address, size_bytes, threads)
        library.memcpy(regions[0].address, regions[1].address, size_bytes, threads)
    return regions[0], regions[1]


def link_rates(device: int, size_bytes: int, repeat: int) -> dict[str, float]:
    """Copy page-locked host memory to the device and back, and nothing else: the limit of the link."""
    from cuda.bindings import driver

    def call(name: str, *arguments: Any) -> Any:
        status, *values = getattr(driver, name)(*arguments)
        if int(status):
            raise RuntimeError(f"{name}: {status.name}")
        return values[0] if values else None

    block = min(size_bytes, 256 * MIB)
    call("cuInit", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", device)))
    pinned, target = call("cuMemHostAlloc", block, 0), call("cuMemAlloc", block)
    stream = call("cuStreamCreate", 1)

    def copy(name: str, to: Any, source: Any) -> None:
        for _ in range(max(1, size_bytes // block)):
            call(name, to, source, block, stream)
        call("cuStreamSynchronize", stream)

    moved = block * max(1, size_bytes // block)
    try:
        up = timed(lambda: copy("cuMemcpyHtoDAsync", target, pinned), repeat + 1)[1:]
        down = timed(lambda: copy("cuMemcpyDtoHAsync", pinned, target), repeat + 1)[1:]
    finally:
        call("cuStreamDestroy", stream)
        call("cuMemFree", target)
        call("cuMemFreeHost", pinned)
    return {"host_to_device": Rate.of(moved, up).best, "device_to_host": Rate.of(moved, down).best}


def memory_of(device: int | None) -> MemoryProvider:
    """Return the provider of a device's memory, or of this process's."""
    if device is None:
        return HostMemory()
    from coldsnap.transfer.cuda_memory import CudaMemory

    return CudaMemory(device)


def machine(device: int | None) -> dict[str, Any]:
    """Describe the machine, for the record."""
    facts: dict[str, Any] = {
        "native_abi": ABI,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "processors": len(os.sched_getaffinity(0)),
        "device": None,
    }
    if device is not None:
        from cuda.bindings import driver

        driver.cuInit(0)
        facts["device"] = driver.cuDeviceGetName(128, driver.cuDeviceGet(device)[1])[1].rstrip(b"\0").decode()
        facts["cuda_driver"] = int(driver.cuDriverGetVersion()[1])
    return facts


def table(rows: Sequence[Sequence[object]], titles: Sequence[str]) -> str:
    """Lay rows out in columns."""
    text = [[f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(titles), *text]) for i in range(len(titles))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in [titles, *text]]
    return "\n".join(line.rstrip() for line in lines)


def common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that both qualifications have."""
    parser.add_argument("--bytes", type=size, default=512 * MIB, help="how much to move, for example 8GB")
    parser.add_argument("--directory", type=Path, action="append", help="where to put the file; may be repeated")
    parser.add_argument("--device", type=int, help="CUDA ordinal; without it final addresses are in host memory")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--chunks", type=sizes, default=[256 << 10, MIB, 4 * MIB, 64 * MIB], help="chunk_bytes to try")
    parser.add_argument("--depths", type=numbers, default=[4, 16, 48], help="queue_depth to try")
    parser.add_argument("--threads", type=numbers, default=[0], help="threads to try; 0: chosen by the library")
    parser.add_argument("--slices", type=sizes, default=[0], help="slice_bytes to try; 0: chosen by the library")
    parser.add_argument("--library", type=Path, help="the native library, when not the packaged one")
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--plot", type=Path, help="draw the rates there (needs matplotlib)")
    parser.add_argument("--profile", type=Path, help="write the calibrated setting there, as a policy")


def draw(path: Path, title: str, series: Iterable[tuple[str, float]], limits: Iterable[tuple[str, float]]) -> None:
    """Draw rates as bars and limits as lines."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    names, rates = zip(*series, strict=True)
    figure, axes = plt.subplots(figsize=(9, 0.3 * len(names) + 1.5), layout="constrained")
    axes.barh(names, rates)
    axes.invert_yaxis()
    for number, (name, limit) in enumerate(limits):
        axes.axvline(limit, linestyle="--", color=f"C{number + 1}", label=f"{name} {limit:.1f}")
    axes.set_xlabel("GB/s")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path)
    plt.close(figure)
