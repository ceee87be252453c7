"""The rules between leaves, and the check of a whole policy.

The one rule: a check goes on to the end; it returns every problem of every leaf and of every pair of leaves. A rule is
left out only where a leaf it reads is itself illegal, since its message would mislead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from attrs import frozen

from coldsnap.policy.leaf import Leaf
from coldsnap.policy.limits import found

__all__ = ["Problem", "broken_rules", "problems"]

Problem = tuple[str, str]


@frozen
class Rule:
    """A check that reads the leaves at ``reads`` in that order, and yields ``(path, message)``."""

    reads: tuple[str, ...]
    check: Callable[..., Iterator[Problem]]


_RULES: list[Rule] = []


def _reads(*paths: str) -> Callable[[Callable[..., Iterator[Problem]]], Callable[..., Iterator[Problem]]]:
    def register(check: Callable[..., Iterator[Problem]]) -> Callable[..., Iterator[Problem]]:
        _RULES.append(Rule(paths, check))
        return check

    return register


@_reads("weights.mode", "weights.recovery.enabled")
def _recovering_modes_need_recovery(mode: str, enabled: bool) -> Iterator[Problem]:
    if mode in ("auto", "recovery", "cache-only-auto") and not enabled:
        why = f'expected true because weights.mode is "{mode}"; found false'
        yield "weights.recovery.enabled", f'{why}; enable it, or set weights.mode to "native" or "image"'


@_reads("weights.native.repository", "weights.native.revision", "weights.native.files_by_worker")
def _packs_need_repository_and_revision(
    repository: str | None, revision: str | None, files: Mapping[str, str]
) -> Iterator[Problem]:
    if repository is not None and revision is None:
        yield "weights.native.revision", "required because weights.native.repository is set; give the commit, 40 hex"
    if repository is None and revision is not None:
        yield "weights.native.repository", "required because weights.native.revision is set; give owner/name"
    if repository is None and files:
        yield "weights.native.repository", "required because weights.native.files_by_worker is set; give owner/name"


@_reads("process.shape_calibration", "graphs.asynchronous")
def _calibration_needs_asynchronous_graphs(calibration: str, asynchronous: bool) -> Iterator[Problem]:
    if calibration == "enabled" and not asynchronous:
        why = 'expected "auto" or "disabled" because graphs.asynchronous is false; found "enabled"'
        yield "process.shape_calibration", f"{why}; set graphs.asynchronous to true, or calibration to auto"


@_reads("process.cache_seed", "process.cache_paths")
def _no_paths_without_seeding(seed: bool, paths: tuple[str, ...]) -> Iterator[Problem]:
    if paths and not seed:
        why = f"expected [] because process.cache_seed is false; {found(paths)}"
        yield "process.cache_paths", f"{why}; drop them, or seed"


@_reads("io.hydration_backend", "io.verify_mode")
def _gds_needs_preverified(backend: str, verify: str) -> Iterator[Problem]:
    # cuFile writes into GPU memory without passing the host, so nothing could be digested on the way.
    if backend == "gds" and verify != "preverified":
        why = f'expected "preverified" because io.hydration_backend is "gds"; found "{verify}"'
        yield "io.verify_mode", f"{why}; set it, or take another backend"


def broken_rules(values: Mapping[str, Any], illegal: Iterable[str] = ()) -> list[Problem]:
    """Return what every rule says about these values.

    Args:
        values: ``{path: value}`` of every leaf that is legal.
        illegal: Paths of the others.

    Returns:
        ``($.path, message)`` in the order of the rules.
    """
    skip = frozenset(illegal)
    applicable = (rule for rule in _RULES if skip.isdisjoint(rule.reads))
    return [
        (f"$.{path}", message)
        for rule in applicable
        for path, message in rule.check(*(values[path] for path in rule.reads))
    ]


def problems(leaves: Iterable[Leaf], values: Mapping[str, Any]) -> list[Problem]:
    """Return everything that is wrong with a whole policy.

    Args:
        leaves: Every leaf.
        values: ``{path: frozen value}`` of every leaf.
    """
    wrong = {
        row.path: problem
        for row in leaves
        if not (values[row.path] is None and row.default is None) and (problem := row.problem(values[row.path]))
    }
    return [(f"$.{path}", message) for path, message in wrong.items()] + broken_rules(values, wrong)
