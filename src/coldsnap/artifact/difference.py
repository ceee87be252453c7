"""What two artifacts share and in what they differ.

The one rule: files are compared by their digests, sections by their fields; nothing is read but the descriptors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import frozen

from coldsnap.artifact import record
from coldsnap.artifact.canonical import Json
from coldsnap.artifact.committed import Artifact

__all__ = ["Difference", "Shares", "diff"]

# What differs between any two captures says nothing about them.
_PROVENANCE = ("$.capture_id", "$.created_unix_ns", "$.plan_digest")
_BYTES = ("$.capsule.units[", "$.weights.workers[", "$.cache_seeds[")


@frozen(kw_only=True)
class Shares:
    """Bytes of one kind of file.

    Attributes:
        shared: In both, by content.
        left: In the first only.
        right: In the second only.
    """

    shared: int
    left: int
    right: int


@frozen(kw_only=True)
class Difference:
    """The outcome of :func:`diff`.

    Attributes:
        same: The artifacts are the same one.
        fields: ``(place, left, right)`` of every field that differs, without provenance and file lists; None: absent.
        bytes: Kind of file → what is shared.
    """

    same: bool
    fields: tuple[tuple[str, Json, Json], ...]
    bytes: Mapping[str, Shares]

    def __str__(self) -> str:
        """Say it in lines."""
        lines = [f"{place}: {left!r} → {right!r}" for place, left, right in self.fields]
        for kind, one in self.bytes.items():
            lines.append(f"{kind}: {one.shared:,} bytes shared, {one.left:,} only left, {one.right:,} only right")
        return "\n".join(lines or ["no difference"])


def diff(left: Artifact, right: Artifact) -> Difference:
    """Compare two artifacts by what their descriptors say."""
    one = dict(_leaves(record.write(left.descriptor), "$"))
    two = dict(_leaves(record.write(right.descriptor), "$"))
    fields = tuple(
        (place, one.get(place), two.get(place))
        for place in sorted(one.keys() | two.keys())
        if one.get(place) != two.get(place) and place not in _PROVENANCE and not _is_file(place)
    )
    mine, theirs = _contents(left), _contents(right)
    shares = {kind: _shares(mine.get(kind, {}), theirs.get(kind, {})) for kind in sorted(mine.keys() | theirs.keys())}
    return Difference(same=left.digest == right.digest, fields=fields, bytes=shares)


def _is_file(place: str) -> bool:
    return place.startswith(_BYTES) and (".files[" in place or place.startswith("$.weights.workers["))


def _leaves(value: Json, place: str) -> Iterator[tuple[str, Json]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{place}.{name}")
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{place}[{index}]")
    else:
        yield place, value


def _contents(artifact: Artifact) -> dict[str, dict[str, int]]:
    contents: dict[str, dict[str, int]] = {}
    for kind, sha256, size in artifact.contents():
        contents.setdefault(kind, {})[sha256] = size
    return contents


def _shares(left: Mapping[str, int], right: Mapping[str, int]) -> Shares:
    return Shares(
        shared=sum(left[key] for key in left.keys() & right.keys()),
        left=sum(left[key] for key in left.keys() - right.keys()),
        right=sum(right[key] for key in right.keys() - left.keys()),
    )
