"""The proof that weights are out of a process image.

The one rule: a capture whose image still holds weights is refused, because such an image only looks small. A trace is
no copy: a row of an embedding that the last question asked for, a scale of a few hundred bytes in a freed block. It is
short, and there are few; both are shown before it is passed, and it is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

from coldsnap.artifact.store import Store
from coldsnap.drivers.page_owner import owner_of
from coldsnap.errors import IntegrityError
from coldsnap.releasing import manifest_of
from coldsnap.session import Session
from coldsnap.transfer.native import NativeLibrary
from coldsnap.transfer.samples import Found, draw, equal_around, search

__all__ = ["LookedFor", "look", "require_outside"]

SAMPLES, MORE = 100, 1024
TRACES = 2
"""Of all samples: more of them are a part of the weights of which nobody knows how large it is."""
TRACE_BYTES = 64 << 10
"""What is equal to the pack over so many bytes is no row and no scale."""
TOLD = 3


@frozen
class LookedFor:
    """What was looked for in an image.

    Attributes:
        samples: How many.
        traces: How many were found, none of them a part of anything large.
    """

    samples: int = 0
    traces: int = 0

    def __add__(self, other: LookedFor) -> LookedFor:
        return LookedFor(self.samples + other.samples, self.traces + other.traces)

    def __str__(self) -> str:
        if not self.traces:
            return f"{self.samples} samples of the weights are not in the image"
        return (
            f"{self.traces} of {self.samples} samples of the weights are in the image, each a trace of less than "
            f"{TRACE_BYTES >> 10} KiB"
        )


def require_outside(session: Session, store: str, paths: list[Path]) -> LookedFor:
    """Look for samples of the weights in what the dump has written.

    Args:
        session: The capture's.
        store: The root of the store.
        paths: Every file of the capsule.

    Raises:
        IntegrityError: The weights, or a part of them, did not leave.
    """
    looked_for = LookedFor()
    for worker, one in session.released.items():
        extents = [(entry.offset, entry.size) for entry in manifest_of(one).index]
        pack, seed = Store(store).path(one.pack_sha256), session.name_capture()
        looked_for += look(worker, pack, extents, paths, seed=seed, library=session.library)
    return looked_for


def look(
    worker: str,
    pack: Path,
    extents: Sequence[tuple[int, int]],
    paths: Sequence[Path],
    *,
    seed: str,
    library: NativeLibrary | None = None,
) -> LookedFor:
    """Look for samples of one pack in files.

    Args:
        worker: Whose pack it is, for the error.
        pack: The file.
        extents: Offset and size of the weights in it, bytes.
        paths: Where is looked.
        seed: The same seed draws the same samples.
        library: What searches; None: that of this installation.

    Raises:
        IntegrityError: More than traces were found.
    """
    looked_for, found = 0, list[Found]()
    for count in (SAMPLES, MORE):
        samples = draw(pack, extents, count, seed=f"{seed} {count}")
        looked_for += len(samples)
        found += search(paths, samples, library=library)
        _require_traces(worker, pack, looked_for, found)
        if not found:
            break
    return LookedFor(looked_for, _different(found))


def _require_traces(worker: str, pack: Path, looked_for: int, found: Sequence[Found]) -> None:
    parts = found if _different(found) > TRACES else [one for one in found if _is_part(one, pack)]
    if not parts:
        return
    first = parts[0]
    places = ", ".join(owner_of(one.path, one.offset) for one in parts[:TOLD])
    raise IntegrityError(
        f"weights of {worker} are still in the process image: {_different(found)} of {looked_for} samples were found: "
        f"{places}; something in the engine keeps a copy of what it loaded",
        path=str(first.path),
        expected="an image without weights",
        actual=f"bytes {first.sample.offset} to {first.sample.offset + len(first.sample.data)} of the pack",
    )


def _different(found: Sequence[Found]) -> int:
    return len({one.sample.offset for one in found})


def _is_part(one: Found, pack: Path) -> bool:
    return equal_around(one, pack, TRACE_BYTES) >= TRACE_BYTES
