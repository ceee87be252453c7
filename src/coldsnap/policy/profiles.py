"""Named sets of values for a purpose, between the engine's defaults and the user's.

The one rule: a profile only changes what a user could write leaf by leaf; it is not a mode of the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

__all__ = ["PROFILES", "ProfileName"]

ProfileName = Literal["default", "qualification"]

PROFILES: Mapping[ProfileName, Mapping[str, Any]] = {
    "default": {},
    # 64 bytes at both ends of every tensor find silent corruption by the source or a broadcast before the engine
    # computes with it, at a cost that a qualification run can afford.
    "qualification": {
        "weights.recovery.verify_bytes": 64,
        "weights.recovery.verify_model_bytes": 64,
    },
}
