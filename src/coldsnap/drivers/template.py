"""The proof that a template is free of accelerators, and that it stands still.

The one rule: unknown counts as present. A process that cannot be looked at, or a template that says nothing of itself,
is refused like one that holds a device.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from coldsnap.artifact import canonical
from coldsnap.artifact.private import read_small
from coldsnap.drivers.base import Process, TreeKeeper
from coldsnap.errors import AdmissionError, EngineError, FormatError, StepTimeout
from coldsnap.keeper.start import Phase
from coldsnap.keeper.template import KIND, READY, accelerators

__all__ = ["ProvenTemplate", "await_template", "prove_template"]

LOOKS, BETWEEN_S = 10, 0.05
PATIENCE_S = 10.0
POLL_S = 0.01
READY_BYTES = 64 << 10
_DEVICE_MAPPED = re.compile(r"/dev/nvidia\d+ is mapped")


@frozen(kw_only=True)
class ProvenTemplate:
    """A template that may be dumped.

    Attributes:
        phase: Where it stopped.
        pids: Its processes, the root first.
        looks: How often it was seen to stand still, one after the other.
        driver: What of an accelerator's driver it holds without a context; always empty before ``exec``.
        seconds: How long all of it took, s.
    """

    phase: Phase
    pids: tuple[int, ...]
    looks: int
    driver: tuple[str, ...]
    seconds: float


def await_template(keeper: TreeKeeper, *, timeout_s: float, ended: Callable[[], str | None]) -> Mapping[str, Any]:
    """Wait until a template says that it stands still; return what it said.

    Args:
        keeper: Of the tree.
        timeout_s: Deadline, s.
        ended: Looked at between two polls: how it ended, None while it lives.

    Raises:
        EngineError: It ended.
        FormatError: What it said is not what a template says.
        StepTimeout: It said nothing.
    """
    deadline = time.monotonic() + timeout_s
    path = Path(keeper.rank_dir, READY)
    while not path.exists():
        if (how := ended()) is not None:
            raise EngineError(f"the template ended before it stood still: {how}")
        if time.monotonic() > deadline:
            raise StepTimeout(f"the template did not stand still within {timeout_s:g} s", seconds=timeout_s)
        time.sleep(POLL_S)
    said = canonical.decode(read_small(path, max_bytes=READY_BYTES), path=str(path), max_bytes=READY_BYTES, exact=False)
    if set(said) != {"format", "kind", "pid", "phase", "accelerators"} or said["kind"] != KIND or said["format"] != 1:
        raise FormatError(
            f"expected what a template says of itself, found {said!r}"[:500], path=str(path), rule="json.5"
        )
    return said


def prove_template(keeper: TreeKeeper, phase: Phase, said: Mapping[str, Any]) -> ProvenTemplate:
    """Look at every process until the tree has stood still, and refuse whatever has to do with an accelerator.

    Args:
        keeper: Of the tree.
        phase: Where the template is to have stopped.
        said: What it said of itself.

    Raises:
        AdmissionError: It holds a device, a library of a driver or a context, or something could not be decided.
    """
    began = time.monotonic()
    pids, held = _still(keeper, began + PATIENCE_S)
    found = {f"process {pid}: {what}" for pid, each in held.items() for what in each}
    own = said["accelerators"]
    if said["phase"] != phase or type(own) is not list or said["pid"] not in pids:
        what = f"phase {said['phase']!r}, process {said['pid']!r}, accelerators {own!r}"[:300]
        raise AdmissionError(f"the template cannot be taken: what it says of itself does not fit its tree ({what})")
    found |= {f"process {said['pid']}, by its own account: {what}" for what in own}
    if phase == "imported":
        found = {what for what in found if _DEVICE_MAPPED.search(what) or " cannot be " in what}
    if found:
        raise AdmissionError(
            "the template is not proven to be free of accelerators, so no other machine or driver could take it up; it "
            "was stopped:",
            sorted(found),
        )
    driver = tuple(sorted({what for each in held.values() for what in each}))
    return ProvenTemplate(phase=phase, pids=pids, looks=LOOKS, driver=driver, seconds=time.monotonic() - began)


def _still(keeper: TreeKeeper, deadline: float) -> tuple[tuple[int, ...], Mapping[int, Sequence[str]]]:
    """Look until ten looks in a row have shown the same processes, none a zombie; return them and what they hold."""
    before: tuple[int, ...] = ()
    count, held = 0, dict[int, Sequence[str]]()
    while count < LOOKS:
        processes = keeper.tree()
        pids = tuple(process.pid for process in processes)
        zombies = [process.pid for process in processes if process.state in "ZX"]
        now = {process.pid: _held_by(keeper.proc_fd, process) for process in processes}
        count = count + 1 if pids and pids == before and not zombies and now == held else 1
        before, held = pids, now
        if time.monotonic() > deadline:
            raise AdmissionError(
                f"the template does not stand still: after {PATIENCE_S:g} s its processes are {list(pids)}, of them "
                f"zombies {zombies}; what it starts before it waits cannot be captured"
            )
        time.sleep(BETWEEN_S)
    return before, held


def _held_by(proc_fd: int, process: Process) -> Sequence[str]:
    """Return what of an accelerator a process holds; what cannot be read is said to be so, and counts."""
    path = f"/proc/self/fd/{proc_fd}/{process.pid}"
    try:
        links = []
        for name in os.listdir(f"{path}/fd"):
            try:
                links.append(os.readlink(f"{path}/fd/{name}"))
            except FileNotFoundError:
                continue  # closed since it was listed
        maps = Path(path, "maps").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return [f"its descriptors and mappings cannot be read ({error.strerror})"]
    if not maps and process.state not in "ZX":
        return ["its mappings cannot be read (they are empty)"]
    return accelerators(links, maps)
