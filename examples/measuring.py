"""What a qualification measures of a machine and of an engine, one function each.

The one rule: a figure is of the engine, never of this client.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from attrs import frozen

import coldsnap as cs
from coldsnap.errors import EngineError
from coldsnap.transfer.native import packaged

PROMPT = "Once upon a time there was a small house"
DECODE = "vllm:request_decode_time_seconds"
AGREED = 0.02
"""Rounds of a warm-up agree within this share of their median."""
COUNTED_S = 5.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class NotRun(Exception):
    """A part cannot run here; the message is its reason."""


@frozen(kw_only=True)
class Rate:
    """Steady tokens/s of one long answer at a time.

    Attributes:
        rounds: Each round's, after the warm-up.
        warm_up: Those of the rounds before, in order.
        settled: Whether the warm-up ended because the rounds agreed, not because there were enough of them.
        clock: Whose seconds they are: ``engine``, from its first token to its last, or ``client``.
    """

    rounds: tuple[float, ...]
    warm_up: tuple[float, ...]
    settled: bool
    clock: str

    @property
    def median(self) -> float:
        """Return what stands for all rounds."""
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """Return the distance of the slowest round from the fastest, as a share of the median."""
        return (max(self.rounds) - min(self.rounds)) / self.median

    def told(self) -> dict[str, Any]:
        """Return the keys of the JSON."""
        return {
            "tokens_per_s": self.median,
            "spread": self.spread,
            "rounds": list(self.rounds),
            "warm_up": list(self.warm_up),
            "settled": self.settled,
            "clock": self.clock,
        }


def steady_rates(urls: Sequence[str], model: str, tokens: int, *, rounds: int, warm_up: int) -> list[Rate]:
    """Measure rounds of one long answer each, after a warm-up that ends when three in a row agree.

    Several engines take turns, so that what else the machine does falls on all of them.

    Args:
        urls: Of the serving engines, which have nothing else to do.
        model: Its name.
        tokens: Of each answer.
        rounds: That count.
        warm_up: The most that do not.
    """
    before: list[list[float]] = [[] for _ in urls]
    while len(before[0]) < warm_up and not all(map(_agree, before)):
        for url, one in zip(urls, before, strict=True):
            one.append(_rate(url, model, tokens)[0])
    counted: list[list[tuple[float, str]]] = [[] for _ in urls]
    for number in range(rounds):
        order = list(zip(urls, counted, strict=True))
        for url, each in reversed(order) if number % 2 else order:
            each.append(_rate(url, model, tokens))
    return [
        Rate(rounds=tuple(rate for rate, _ in two), warm_up=tuple(one), settled=_agree(one), clock=two[0][1])
        for one, two in zip(before, counted, strict=True)
    ]


def _agree(rates: Sequence[float]) -> bool:
    last = rates[-3:]
    return len(last) == 3 and max(last) - min(last) <= AGREED * statistics.median(last)


def _rate(url: str, model: str, tokens: int) -> tuple[float, str]:
    """Return the tokens/s of one long answer, and whose clock that is."""
    before = decode_seconds(url)
    few, few_s = (1, 0.0) if before else _answered(url, model, max(1, tokens // 8))
    many, many_s = _answered(url, model, tokens)
    if before is None:
        # Two lengths, so that neither prefill nor the request itself is in it.
        return (many - few) / max(many_s - few_s, 1e-9), "client"
    # An answer is counted when the engine has told its front end, which may be after the client has it.
    deadline = time.monotonic() + COUNTED_S
    while (after := decode_seconds(url)) is None or after[0] == before[0]:
        if time.monotonic() > deadline:
            raise EngineError(f"{url} answered, and {COUNTED_S:g} s later its metrics do not count that answer")
        time.sleep(0.01)
    return (many - 1) / (after[1] - before[1]), "engine"


def _answered(url: str, model: str, tokens: int) -> tuple[int, float]:
    """Ask for an answer of so many tokens; return how many there were, and the client's seconds."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    begin = time.monotonic()
    # One reply at the end: a stream would measure this client too.
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=300, headers={"Connection": "close"})
    seconds = time.monotonic() - begin
    usage = response.raise_for_status().json().get("usage") or {}
    return int(usage.get("completion_tokens", tokens)), seconds


def decode_seconds(url: str) -> tuple[int, float] | None:
    """Return how many answers vLLM has counted, and the s from the first to the last token of all of them.

    The engine core takes both times as the tokens come out of a step. ``None``: this engine counts none.
    """
    response = httpx.get(f"{url}/metrics", timeout=30, headers={"Connection": "close"}, follow_redirects=True)
    found = {"count": 0.0, "sum": 0.0}
    if response.status_code != httpx.codes.OK or f"{DECODE}_count" not in response.text:
        return None
    for line in response.text.splitlines():
        for kind in found:
            if line.startswith((f"{DECODE}_{kind}{{", f"{DECODE}_{kind} ")):
                found[kind] += float(line.rsplit(" ", 1)[1])
    return int(found["count"]), found["sum"]


def receipts_of(report: cs.Report) -> dict[str, Any]:
    """Return what was done by step, without what a doctor only notes."""
    return {
        one.step: {"effective": one.effective, "reason": one.reason, "bytes": one.bytes}
        | {name: value for name, value in one.details.items() if not name.startswith(("note ", "spoils "))}
        for one in report.receipts
    }


def evict(paths: Sequence[Path]) -> int:
    """Drop files from the page cache; return the bytes that it keeps nevertheless, as somebody maps them."""
    kept, library = 0, packaged()
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # dirty pages stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if library is not None and (size := os.fstat(fd).st_size):
                kept += PAGE_BYTES * sum(library.resident_pages(fd, 0, size, size))
        finally:
            os.close(fd)
    return kept


def differences(expected: Mapping[str, Mapping[str, str]], found: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the tensors, as ``rank name``, that are not the same on both sides; ranks keep their names."""
    return [
        f"{rank} {name}"
        for rank in sorted({*expected, *found})
        for name in sorted({*expected.get(rank, ()), *found.get(rank, ())})
        if expected.get(rank, {}).get(name) != found.get(rank, {}).get(name)
    ]


def in_order(digests: Mapping[str, Mapping[str, str]]) -> dict[str, Mapping[str, str]]:
    """Return digests by role and order in it: an engine that is started anew has other process ids than the first."""
    ranks = sorted(digests, key=lambda rank: (rank.partition(".")[0], int(rank.partition(".")[2] or 0)))
    seen: dict[str, int] = {}
    ordered: dict[str, Mapping[str, str]] = {}
    for rank in ranks:
        role = rank.partition(".")[0]
        ordered[f"{role} {seen.setdefault(role, 0)}"] = digests[rank]
        seen[role] += 1
    return ordered


def machine() -> str:
    """Return the machine in a line."""
    host = cs.probe().host("local")
    gpus = ", ".join(gpu.name for gpu in host.gpus) or "no GPU"
    memory = f"{host.memory.total_bytes / 2**30:.0f} GiB"
    return f"{host.cpu.model}, {host.cpu.cores} cores, {memory}, {gpus}, kernel {platform.release()}"
