"""What every step of a plan has: an id, what it waits for, and the phase in which people read it.

The one rule: phases only group; the order of a plan is in ``after`` alone.
"""

from __future__ import annotations

from typing import Literal

from attrs import frozen

__all__ = ["BaseStep", "Phase"]

Phase = Literal[
    "ADMIT",
    "STAGE",
    "TEMPLATE",
    "THAW",
    "LAUNCH",
    "RECONNECT",
    "HYDRATE",
    "ACCEPT",
    "QUIESCE",
    "DUMP",
    "SEAL",
    "PUBLISH",
    "SETTLE",
]


@frozen(kw_only=True)
class BaseStep:
    """What every step has.

    Attributes:
        id: Unique in its plan; receipts, spans and fault points use it.
        after: The ids of the steps that must have ended before.
    """

    id: str
    after: tuple[str, ...] = ()
