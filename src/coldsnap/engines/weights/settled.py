"""What a load left behind, as those see it who take it out of a process.

The one rule: nothing is imported for it, so that a worker can name it before its engine imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from coldsnap.engines.weights.copies import Placed
from coldsnap.engines.weights.split import Written

__all__ = ["Settled"]


class Settled(Protocol):
    """What a load wrote, at its final addresses."""

    @property
    def written(self) -> Iterable[Written]:
        """Stretches that are exactly known."""

    @property
    def kept(self) -> Mapping[str, int]:
        """Reason → bytes of the destinations that were left out."""

    @property
    def copies(self) -> Iterable[Placed]:
        """The copies that wrote the stretches, in order."""

    @property
    def derived(self) -> Mapping[str, int]:
        """Parameters and buffers that no copy explains → bytes."""
