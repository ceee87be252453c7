"""What the figures of a hydration qualification say: against limits and rivals, as a table, a picture, a policy.

Used by ``qualify_hydration.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coldsnap import Policy
from coldsnap.policy import IO
from measured import draw, shown, table  # type: ignore[import-not-found]  # beside this script


def best_of(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any] | None:
    """Return the fastest row with these values."""
    fitting = [row for row in rows if "best" in row and all(row[name] == value for name, value in wanted.items())]
    return max(fitting, key=lambda row: row["median"], default=None)


def checks(place: dict[str, Any], limit: float) -> dict[str, Any]:
    """Say how the figures stand against their limits and rivals."""
    result: dict[str, Any] = {}
    hot, verified = (
        best_of(place["rows"], cache="hot", verification="none"),
        best_of(place["rows"], cache="hot", verification="crc32"),
    )
    cold = best_of(place["rows"], cache="cold", verification="none")
    if hot and verified:
        result |= {"hot": hot["best"], "hot_of_limit": hot["best"] / limit, "hot_crc32": verified["best"]}
    if cold and place["raw_direct"]:
        raw = place["raw_direct"]
        result |= {"cold": cold["best"], "cold_of_raw": cold["best"] / raw["best"]}
        result["cold_median_of_raw_median"] = cold["median"] / raw["median"]
    rivals = [row for row in place["rivals"] if row["cache"] == "hot" and "best" in row]
    if hot and rivals:
        fastest = max(rivals, key=lambda row: row["best"])
        result |= {"fastest_rival": fastest["rival"], "over_fastest_rival": hot["best"] / fastest["best"]}
    return result


def calibrated(places: list[dict[str, Any]]) -> Policy | None:
    """Return the fastest setting as a policy: cold where a disk was measured, since hot ones differ less."""
    rows = [row for place in places for row in place["rows"] if row["backend"] in ("auto", "direct", "buffered")]
    chosen = best_of(rows, cache="cold", verification="crc32") or best_of(rows, cache="hot", verification="crc32")
    if chosen is None:
        return None
    return Policy(
        io=IO(
            hydration_backend=chosen["backend"],
            chunk_bytes=chosen["chunk_bytes"],
            queue_depth=chosen["queue_depth"],
        )
    )


TITLES = ["cache", "backend", "access", "chunk", "depth", "threads", "slice", "verified", "best", "median"]


def _cells(row: dict[str, Any]) -> list[object]:
    chunk, slice_bytes = shown(row["chunk_bytes"]), shown(row["used_slice_bytes"])
    how = [
        row["cache"],
        row["backend"],
        row["used_access"],
        chunk,
        row["queue_depth"],
        row["used_threads"],
        slice_bytes,
    ]
    return [*how, row["verification"], row["best"], row["median"]]


def report(result: dict[str, Any]) -> str:
    """Write the table."""
    lines = [f"limits, GB/s: {', '.join(f'{name} {rate:.1f}' for name, rate in result['limits'].items())}"]
    for place in result["places"]:
        lines += ["", f"{place['directory']} ({place['filesystem']})"]
        ordered = sorted((row for row in place["rows"] if "best" in row), key=lambda row: -row["best"])
        lines.append(table([_cells(row) for row in ordered[: result["shown"]]], TITLES))
        absent = {row["backend"]: row["unavailable"] for row in place["rows"] if "unavailable" in row}
        lines += [f"{backend}: {why}" for backend, why in absent.items()]
        rivals = [[row["cache"], row["rival"], row.get("best", row.get("failed"))] for row in place["rivals"]]
        lines += [table(rivals, ["cache", "rival", "best"])] if rivals else []
        found = place["checks"].items()
        lines += [f"{name}: {value:.2f}" if isinstance(value, float) else f"{name}: {value}" for name, value in found]
    if result["host_ratio"] is not None:
        lines += ["", f"host_ratio: {result['host_ratio']:.2f}"]
    return "\n".join(lines)


def plot(path: Path, result: dict[str, Any]) -> None:
    """Draw every unverified rate, and the rivals'."""
    series = []
    for place in result["places"]:
        for row in place["rows"]:
            if "best" in row and row["verification"] == "none":
                setting = f"{shown(row['chunk_bytes'])}x{row['queue_depth']}"
                words = (place["filesystem"], row["cache"], row["backend"], row["used_access"], setting)
                series.append((" ".join(words), row["best"]))
        rivals = [row for row in place["rivals"] if "best" in row]
        series += [(f"{place['filesystem']} {row['cache']} {row['rival']}", row["best"]) for row in rivals]
    draw(path, "hydration", series, result["limits"].items())
