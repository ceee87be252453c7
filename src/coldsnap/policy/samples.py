"""Every leaf with every legal value: what a test walks to prove that no value is silently ignored.

The one rule: a sample is valid by itself with its companions, so whatever refuses it refuses the value and not the way
it was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from coldsnap.policy import Policy, leaves

__all__ = ["LegalValue", "every_leaf_and_legal_value"]

_REVISION = "89abcdef" * 5

# What else must be set, and to what, for a value to be valid; the rules between leaves, seen from the other side.
_COMPANIONS: Mapping[tuple[str, Any], Mapping[str, Any]] = {
    ("weights.recovery.enabled", False): {"weights.mode": "native"},
    ("process.shape_calibration", "enabled"): {"graphs.asynchronous": True},
    ("io.hydration_backend", "gds"): {"io.verify_mode": "preverified"},
}
_COMPANIONS_OF_ANY: Mapping[str, Mapping[str, Any]] = {
    "weights.native.repository": {"weights.native.revision": _REVISION},
    "weights.native.revision": {"weights.native.repository": "example/packs"},
    "weights.native.files_by_worker": {
        "weights.native.repository": "example/packs",
        "weights.native.revision": _REVISION,
    },
}


class LegalValue(NamedTuple):
    """A leaf, a legal value of it, and the least that must be set beside it.

    Attributes:
        path: The leaf.
        value: The value.
        companions: ``{path: value}`` of other leaves.
    """

    path: str
    value: Any
    companions: Mapping[str, Any]

    @property
    def policy(self) -> Policy:
        """The policy with the companions and the value."""
        return Policy().evolve(**{**self.companions, self.path: self.value})


def every_leaf_and_legal_value() -> Iterator[LegalValue]:
    """Iterate over all values of enumerations and booleans, ends and default of ranges, a sample of open types."""
    for row in leaves():
        for value in row.legal:
            needed = _COMPANIONS.get((row.path, value), _COMPANIONS_OF_ANY.get(row.path, {}))
            yield LegalValue(row.path, value, {} if value == row.default else needed)
