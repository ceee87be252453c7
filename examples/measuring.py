"""What a qualification measures of a machine and of an engine, one function each.

The one rule: a figure is of the engine, never of this client.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

import coldsnap as cs

PROMPT = "Once upon a time there was a small house"


def steady_rate(url: str, model: str, tokens: int) -> float:
    """Return the tokens/s of one long answer: two lengths, so that neither prefill nor the request itself is in it."""

    def seconds(length: int) -> float:
        body = {"model": model, "prompt": PROMPT, "max_tokens": length, "temperature": 0, "ignore_eos": True}
        begin = time.monotonic()
        # One reply at the end: a stream would measure this client too.
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=300, headers={"Connection": "close"})
        response.raise_for_status()
        return time.monotonic() - begin

    few = max(1, tokens // 8)
    return (tokens - few) / max(seconds(tokens) - seconds(few), 1e-9)


def receipts_of(report: cs.Report) -> dict[str, Any]:
    """Return what was done by step, without what a doctor only notes."""
    return {
        one.step: {"effective": one.effective, "reason": one.reason, "bytes": one.bytes}
        | {name: value for name, value in one.details.items() if not name.startswith(("note ", "spoils "))}
        for one in report.receipts
    }


def evict(paths: Sequence[Path]) -> None:
    """Drop files from the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # dirty pages stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def differences(expected: Mapping[str, Mapping[str, str]], found: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the tensors, as ``rank name``, that are not the same on both sides; ranks keep their names."""
    return [
        f"{rank} {name}"
        for rank in sorted({*expected, *found})
        for name in sorted({*expected.get(rank, ()), *found.get(rank, ())})
        if expected.get(rank, {}).get(name) != found.get(rank, {}).get(name)
    ]


def machine() -> str:
    """Return the machine in a line."""
    host = cs.probe().host("local")
    gpus = ", ".join(gpu.name for gpu in host.gpus) or "no GPU"
    memory = f"{host.memory.total_bytes / 2**30:.0f} GiB"
    return f"{host.cpu.model}, {host.cpu.cores} cores, {memory}, {gpus}, kernel {platform.release()}"
