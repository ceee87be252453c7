"""Both ends of every parameter and buffer: taken before a release, compared after a recovery, for qualification.

The one rule: digests are kept and never bytes, because an image must hold no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Self, TypeAlias

from attrs import field, frozen

from coldsnap.errors import AdmissionError, IntegrityError

__all__ = ["Ends", "Samples"]

Ends: TypeAlias = Callable[[int], Mapping[str, str]]
"""Takes a number of bytes, and returns digests by name."""


@frozen(kw_only=True)
class Samples:
    """Digests of the ends, as they were.

    Attributes:
        bytes: How many at each end; 0: none were taken.
        digests: By name.
    """

    bytes: int = 0
    digests: Mapping[str, str] = field(factory=dict)

    @classmethod
    def of(cls, ends: Ends | None, most_bytes: int) -> Self:
        """Take them.

        Raises:
            AdmissionError: They are wanted of an engine that has none.
        """
        if not most_bytes:
            return cls()
        if ends is None:
            raise AdmissionError("this engine cannot sample its parameters: leave verify_model_bytes at 0")
        return cls(bytes=most_bytes, digests=ends(most_bytes))

    def require(self, most_bytes: int) -> None:
        """Refuse to compare what was not taken.

        Raises:
            AdmissionError: Another number of bytes was taken.
        """
        if most_bytes and most_bytes != self.bytes:
            raise AdmissionError(
                f"weights.recovery.verify_model_bytes is {most_bytes}, and {self.bytes} bytes at each end were sampled "
                "when the memory was released: ask for as many, or for 0"
            )

    def compare(self, ends: Ends | None) -> None:
        """Compare with what is there now.

        Raises:
            IntegrityError: With the names of the tensors that are others.
        """
        found = ends(self.bytes) if ends is not None else {}
        wrong = sorted(name for name in {*found, *self.digests} if found.get(name) != self.digests.get(name))
        if wrong:
            raise IntegrityError(
                f"{len(wrong)} parameters and buffers are not what they were before the release: {', '.join(wrong)}",
                path="the memory of this worker",
                expected=f"the ends of {len(self.digests)} tensors",
                actual=f"{len(wrong)} others",
            )
