"""A qualification's figures for people: a table, and a plot.

The one rule: nothing is left out. What did not run is a line that says why.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import composing  # type: ignore[import-not-found]  # beside this script


def table(result: Mapping[str, Any]) -> str:
    """Return the figures as a table."""
    work = result["work"]
    lines = ["", result["machine"], f"artifact and store on {work['filesystem']}: {work['path']}", ""]
    for name, row in result["rows"].items():
        seconds = row["seconds"]
        lines.append(
            f"{name:<48} {statistics.median(seconds):8.2f} s  median of {len(seconds)}"
            + (f", {min(seconds):.2f} to {max(seconds):.2f}" if len(seconds) > 1 else "")
            + (f"; {row['note']}" if row["note"] else "")
        )
    lines += [f"{name:<48} not run: {reason}" for name, reason in result["not_run"].items()]
    for one in result["requests"]:
        lines.append(f"{'requests, ' + one['when']:<48} {one['first_s']:.3f} s first, {one['tenth_s']:.3f} s tenth")
        lines.append(f"{'tokens/s, ' + one['when']:<48} {_rate(one['rate'], result['rate_ratios'].get(one['when']))}")
    if beside := result.get("beside"):
        lines.append(f"{'tokens/s, original, asked in turns':<48} {_rate(beside['original'])}")
        lines.append(f"{'tokens/s, its clone beside it':<48} {_rate(beside['clone'], beside['ratio'])}")
    lines += [f"{'undo after ' + step:<48} {one['workload']}" for step, one in result.get("undone", {}).items()]
    lines += [f"{name:<48} {size / 1e6:10.1f} MB" for name, size in result.get("sizes", {}).items()]
    lines += composing.lines(result["composition"]) if "composition" in result else []
    if "still_cached" in result:
        lines.append(
            f"{'stayed in the page cache, most, cold restores':<48} {max(result['still_cached']) / 1e6:10.1f} MB"
        )
    if second := result.get("second_capture"):
        lines.append(f"{'new pack bytes of the second capture':<48} {second['new_pack_bytes']} of {second['packs']}")
    for name in ("speedup", "over_by_hand"):
        if result.get(name):
            lines.append(f"{name:<48} {result[name]:8.1f} x")
    for name in ("restore", "hydrate"):
        if result.get("recovery", {}).get(name):
            lines.append(f"{f'{name} by recovery, over one out of packs':<48} {result['recovery'][name]:8.2f} x")
    digests = result["digests"]
    wrong = sum(len(names) for names in digests["different"].values())
    lines.append(f"{'tensors compared':<48} {digests['tensors'] * digests['comparisons']:8d}    different: {wrong}")
    exact = result["exact"]
    lines.append(f"{'answers compared':<48} {exact['answers']:8d}    different: {exact['different']}")
    return "\n".join(lines)


def _rate(rate: Mapping[str, Any], ratio: float | None = None) -> str:
    """Say one rate in a line."""
    text = f"{rate['tokens_per_s']:8.1f} median of {len(rate['rounds'])}, {min(rate['rounds']):.1f} to "
    text += f"{max(rate['rounds']):.1f} by the {rate['clock']}'s clock, warm-up {len(rate['warm_up'])}"
    text += "" if rate["settled"] else ", which had not settled"
    return text if ratio is None else f"{text}; ratio {ratio:.3f}"


def plot(path: Path, result: Mapping[str, Any]) -> None:
    """Draw the rows as bars, and the hot restores' steps."""
    from matplotlib.figure import Figure

    rows = {name: statistics.median(row["seconds"]) for name, row in result["rows"].items()}
    figure = Figure(figsize=(9, 0.35 * (len(rows) + len(result["split"])) + 2), layout="constrained")
    upper, lower = figure.subplots(2)
    upper.barh(list(rows), list(rows.values()))
    upper.set_xscale("log")
    for number, split in enumerate(result["split"]):
        left = 0.0
        for step, seconds in split.items():
            lower.barh(number, seconds, left=left, label=step if number == 0 else None)
            left += seconds
    for axes in (upper, lower):
        axes.invert_yaxis()
        axes.set_xlabel("seconds")
    if result["split"]:
        lower.legend(ncols=4, fontsize="x-small")
        lower.set_title("steps of the hot restores (some run side by side)")
    figure.savefig(path)
