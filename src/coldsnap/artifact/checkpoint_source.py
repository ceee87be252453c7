"""The extents of a pack, out of the files of the checkpoint that was once loaded; no engine, no torch.

The one rule: bytes are moved as they are. A copy that converts, or that goes through a model's memory in too many
pieces, is refused by the name of its tensor; whether what was read is the pack says its digest alone.
"""

from __future__ import annotations

import heapq
import itertools
import mmap
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Self

from attrs import frozen

from coldsnap.artifact.extents import Extent
from coldsnap.artifact.manifest import NativeManifest, RecoveryManifest
from coldsnap.artifact.replay import Elements, ReplayCopy
from coldsnap.errors import IntegrityError, UnsupportedError

__all__ = ["MOST_RUNS", "CheckpointSource", "CheckpointSources", "require_tensors"]

MOST_RUNS = 262_144
"""Most pieces that the copies of one worker may come to: each is a request to the kernel, and some bytes here."""

_READ_BYTES = 8 << 20


@frozen
class _Run:
    """Bytes of an allocation, and where they come from; of two that share bytes the one with the higher number won."""

    begin: int
    end: int
    number: int
    file: int
    file_offset: int

    def part(self, begin: int, end: int) -> _Run:
        return _Run(begin, end, self.number, self.file, self.file_offset + begin - self.begin)


@frozen(kw_only=True)
class CheckpointSource:
    """One extent; see :class:`coldsnap.artifact.pack.Source`."""

    files: Sequence[int]
    runs: Sequence[_Run]
    size: int
    buffer: mmap.mmap

    def pieces(self) -> Iterator[memoryview]:
        """Yield all bytes in order; a piece is valid until the next one is asked for, of this source or another.

        Raises:
            IntegrityError: A file has become shorter.
        """
        for run in self.runs:
            for at in range(run.begin, run.end, _READ_BYTES):
                size = min(_READ_BYTES, run.end - at)
                with memoryview(self.buffer) as whole, whole[:size] as view:
                    self._read(view, run.file, run.file_offset + at - run.begin)
                    yield view

    def _read(self, view: memoryview, file: int, offset: int) -> None:
        done = 0
        while done < len(view):
            with view[done:] as rest:
                got = os.preadv(self.files[file], [rest], offset + done)
            if not got:
                raise IntegrityError(
                    "a file of the checkpoint ends before its tensors do (rule manifest.6)",
                    path=os.readlink(f"/proc/self/fd/{self.files[file]}"),
                    expected=f"{len(view)} bytes at {offset}",
                    actual=f"{done} bytes",
                )
            done += got


class CheckpointSources:
    """The sources of one worker's pack; a context manager that closes their files.

    They are to be read one after the other: they share one buffer.

    Args:
        native: Which extents.
        recovery: Which copies wrote them; of the same memory.

    Raises:
        UnsupportedError: A copy is no plain move of bytes, or there are too many pieces; the tensor is named.
        OSError: A file cannot be opened.
    """

    def __init__(self, native: NativeManifest, recovery: RecoveryManifest) -> None:
        self._native = native
        self._runs = _topmost_runs(recovery)
        self._stack = ExitStack()
        self._files: list[int] = []
        try:
            for file in recovery.files:
                # Links are followed: a snapshot of the hub consists of them.
                fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
                self._stack.callback(os.close, fd)
                self._files.append(fd)
        except BaseException:
            self._stack.close()
            raise
        self._buffer = mmap.mmap(-1, _READ_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def sources(self) -> list[CheckpointSource]:
        """Return one source for each extent of the pack, in their order.

        Raises:
            UnsupportedError: An extent has bytes that no copy wrote.
        """
        return [self._source(one.extent) for one in self._native.model_extents]

    def _source(self, extent: Extent) -> CheckpointSource:
        runs, at = [], extent.offset
        for run in self._runs.get(extent.allocation, ()):
            if run.end <= extent.offset or extent.end <= run.begin:
                continue
            part = run.part(max(run.begin, extent.offset), min(run.end, extent.end))
            if part.begin != at:
                break
            runs.append(part)
            at = part.end
        if at != extent.end:
            raise _refused(f"no copy is known that wrote byte {at:#x} of allocation {extent.allocation}")
        return CheckpointSource(files=self._files, runs=runs, size=extent.size, buffer=self._buffer)


def require_tensors(recovery: RecoveryManifest) -> None:
    """Compare every tensor that was copied as it is with its checksum; for when a pack did not come out.

    Raises:
        IntegrityError: One is another; it is named.
    """
    for copy in recovery.copies:
        path = recovery.files[copy.file].path
        if copy.crc32 is None:
            continue
        with open(path, "rb") as stream:
            stream.seek(copy.file_offset + copy.source.offset)
            found, left = 0, copy.source.span
            while left and (data := stream.read(min(left, _READ_BYTES))):
                found, left = zlib.crc32(data, found), left - len(data)
        if found != copy.crc32:
            raise IntegrityError(
                f"the tensor {copy.tensor} is not the one that was loaded at capture (rule manifest.6)",
                path=path,
                expected=f"CRC-32 {copy.crc32:08x}",
                actual=f"CRC-32 {found:08x}",
            )


def _topmost_runs(recovery: RecoveryManifest) -> dict[int, list[_Run]]:
    """Return what the copies leave in each allocation, ascending and disjoint."""
    runs: defaultdict[int, list[_Run]] = defaultdict(list)
    count = 0
    for number, copy in enumerate(recovery.copies):
        if copy.source.dtype != copy.target.dtype:
            raise _refused(f"the load of {copy.tensor} converts {copy.source.dtype} to {copy.target.dtype}")
        for run in _runs_of(copy, number):
            count += 1
            if count > MOST_RUNS:
                raise _refused(f"the load of {copy.tensor} and those before it move bytes in over {MOST_RUNS} pieces")
            runs[copy.allocation].append(run)
    return {allocation: _topmost(some) for allocation, some in runs.items()}


def _runs_of(copy: ReplayCopy, number: int) -> Iterator[_Run]:
    """Yield the stretches of a copy that are unbroken at both ends."""
    shape, source, target, width = copy.source.shape, copy.source, copy.target, copy.source.width
    inner, run = len(shape), 1
    while inner and (shape[inner - 1] == 1 or source.stride[inner - 1] == target.stride[inner - 1] == run):
        inner -= 1
        run *= shape[inner]
    for index in itertools.product(*(range(size) for size in shape[:inner])):
        begin = target.offset + _at(target, index) * width
        offset = copy.file_offset + source.offset + _at(source, index) * width
        yield _Run(begin, begin + run * width, number, copy.file, offset)


def _at(elements: Elements, index: tuple[int, ...]) -> int:
    return sum(number * step for number, step in zip(index, elements.stride, strict=False))


def _topmost(runs: list[_Run]) -> list[_Run]:
    """Return disjoint runs of the same bytes: where several wrote, the last one counts."""
    runs.sort(key=lambda run: run.begin)
    if all(before.end <= after.begin for before, after in itertools.pairwise(runs)):
        return runs
    borders = sorted({edge for run in runs for edge in (run.begin, run.end)})
    found: list[_Run] = []
    above: list[tuple[int, int]] = []
    coming = 0
    for begin, end in itertools.pairwise(borders):
        while coming < len(runs) and runs[coming].begin <= begin:
            heapq.heappush(above, (-runs[coming].number, coming))
            coming += 1
        while above and runs[above[0][1]].end <= begin:
            heapq.heappop(above)
        if above:
            found.append(runs[above[0][1]].part(begin, end))
    return found


def _refused(why: str) -> UnsupportedError:
    return UnsupportedError(
        f"the pack cannot be made of the checkpoint without an engine: {why}",
        field="artifact",
        works="restoring by recovery with weights.native.materialize, or Materialize of an engine restored so",
    )
