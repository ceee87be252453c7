"""Restores out of the checkpoint, beside those out of packs: as many, in the same form, held to the same answers.

The one rule: what came out of the checkpoint has every tensor and every token of what was captured, or it is a
difference that is counted.

Key that it adds to the JSON of ``qualifying.py``: ``recovery`` (``split`` of each: step to s, ``restored``: receipts of
the last; ``restore`` and ``hydrate``: their medians over those of hot restores out of packs, ``within``: whether a
restore keeps to 1.5 times of one out of packs).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import coldsnap as cs
from measuring import receipts_of  # type: ignore[import-not-found]  # beside this script

if TYPE_CHECKING:
    from qualifying import Qualification  # type: ignore[import-not-found]

HOT, RECOVERY = "restore, hot", "restore by recovery, hot"
RECOVERY_OVER_NATIVE = 1.5
"""How much longer a restore out of the checkpoint may take than one out of packs, both hot."""


def recovered(qualification: Qualification) -> None:
    """Restore out of the checkpoint, compare and stop, several times; then set it against restores out of packs."""
    artifact, splits = qualification.captured(), list[Mapping[str, float]]()
    policy = qualification.policy.evolve(**{"weights.mode": "recovery"})
    for number in range(qualification.options.recovery):
        qualification.require_time(f" after {number} of {qualification.options.recovery}")
        report = qualification.execute(cs.Restore(artifact, placement=qualification.place), policy)
        with report.serving as engine:
            qualification.row(RECOVERY, report.answer_s or 0.0)
            splits.append({span.name: span.seconds for span in report.timeline.spans})
            qualification.compare(qualification.asked(engine))
            qualification.compare_digests(engine, f"{RECOVERY} {number + 1}")
        rows, native = qualification.result["rows"], qualification.result["split"]
        told = over_native(rows[RECOVERY]["seconds"], rows.get(HOT, {}).get("seconds"), splits, native)
        qualification.result["recovery"] = {"split": splits, "restored": receipts_of(report), **told}
        qualification.save()


def over_native(
    recoveries: Sequence[float],
    native: Sequence[float] | None,
    recovery_splits: Sequence[Mapping[str, float]],
    native_splits: Sequence[Mapping[str, float]],
) -> dict[str, Any]:
    """Set restores out of the checkpoint against those out of packs.

    Args:
        recoveries: What each took, s.
        native: The same out of packs; None: there was none.
        recovery_splits: Of each: step to s.
        native_splits: The same out of packs.
    """
    splits = (recovery_splits, native_splits)
    filled = [statistics.median([one["hydrate"] for one in each if "hydrate" in one] or [0.0]) for each in splits]
    restore = statistics.median(recoveries) / statistics.median(native) if native else None
    return {
        "restore": restore,
        "hydrate": filled[0] / filled[1] if all(filled) else None,
        "within": restore is not None and restore <= RECOVERY_OVER_NATIVE,
    }
