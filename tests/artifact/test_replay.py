"""The copies of a recovery manifest write exactly the model's bytes, or the manifest is not read."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from memory import captured

from coldsnap.artifact.manifest import RecoveryManifest, decode, encode
from coldsnap.artifact.record import Broken
from coldsnap.artifact.replay import Elements, ReplayCopy, SourceFile
from coldsnap.artifact.store import Store
from coldsnap.errors import FormatError

FILE = SourceFile(path="/model/a.safetensors", bytes=1 << 20, header_sha256="sha256:" + "0" * 64)


def dense(size: int, offset: int = 0) -> Elements:
    return Elements(dtype="U8", offset=offset, shape=(size,), stride=(1,))


@pytest.fixture(name="manifest")
def _manifest(tmp_path: Path) -> RecoveryManifest:
    """A recovery manifest with one plain copy for each extent."""
    _, manifest, _ = captured(tmp_path, Store(tmp_path / "store"))
    copies = tuple(
        ReplayCopy(
            file=0,
            tensor=f"t{number}",
            file_offset=8 + 10_000 * number,
            length=one.size,
            source=dense(one.size),
            name=f"p{number}",
            allocation=one.allocation,
            target=dense(one.size, one.offset),
            crc32=7,
        )
        for number, one in enumerate(manifest.model_extents)
    )
    extents = tuple(evolve(one, crc32=7) for one in manifest.model_extents)
    return evolve(manifest, model_extents=extents, files=(FILE,), copies=copies)


def test_copies_survive_their_file(manifest: RecoveryManifest) -> None:
    assert decode(RecoveryManifest, encode(manifest), path="here") == manifest


def test_a_manifest_of_before_copies_were_recorded_is_still_read(tmp_path: Path) -> None:
    _, manifest, _ = captured(tmp_path, Store(tmp_path / "store"))

    assert decode(RecoveryManifest, encode(manifest), path="here").copies == ()


def test_copies_that_leave_a_byte_out_or_write_another_are_refused(manifest: RecoveryManifest) -> None:
    first, *others = manifest.copies
    target = first.target
    wrong = (
        (first,),  # what the others write is missing
        (evolve(first, target=evolve(target, offset=target.offset + 1)), *others),
        (evolve(first, file=1), *others),
        (evolve(first, file_offset=FILE.bytes - first.length + 1), *others),
    )
    for copies in wrong:
        data = encode(evolve_unchecked(manifest, copies))
        with pytest.raises(FormatError, match=r"manifest\.10"):
            decode(RecoveryManifest, data, path="here")
    with pytest.raises(Broken, match="no checksum"):
        evolve(manifest, model_extents=tuple(evolve(one, crc32=None) for one in manifest.model_extents))


def evolve_unchecked(manifest: RecoveryManifest, copies: tuple[ReplayCopy, ...]) -> RecoveryManifest:
    made = evolve(manifest)
    object.__setattr__(made, "copies", copies)
    return made


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": dense(9)}, "changes the shape"),
        ({"source": dense(10, offset=1)}, "reads beyond the tensor"),
        ({"source": Elements(dtype="U8", offset=0, shape=(10,), stride=(0,))}, "not plain"),
        ({"target": Elements(dtype="I8", offset=0, shape=(10,), stride=(1,))}, "not plain"),
    ],
)
def test_a_copy_that_cannot_be_is_refused(change: dict[str, Elements], message: str) -> None:
    fields = {"source": dense(10), "target": dense(10), **change}
    with pytest.raises(Broken, match=message):
        ReplayCopy(file=0, tensor="t", file_offset=8, length=10, name="p", allocation=0, crc32=1, **fields)


@pytest.mark.parametrize(("shape", "stride"), [((2,), ()), ((0,), (1,)), ((2,), (-1,))])
def test_elements_that_are_no_view_are_refused(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    with pytest.raises(Broken, match="are no view"):
        Elements(dtype="F32", offset=0, shape=shape, stride=stride)


@given(
    shape=st.lists(st.integers(1, 5), max_size=3).map(tuple),
    step=st.lists(st.integers(0, 40), min_size=3, max_size=3),
    width=st.sampled_from(["U8", "BF16", "F32"]),
)
def test_the_runs_of_a_view_are_the_bytes_of_its_elements(shape: tuple[int, ...], step: list[int], width: str) -> None:
    view = Elements(dtype=width, offset=3, shape=shape, stride=tuple(step[: len(shape)]))
    places = [()]
    for size in shape:
        places = [(*place, number) for place in places for number in range(size)]
    expected = set[int]()
    for place in places:
        at = 3 + view.width * sum(number * one for number, one in zip(place, view.stride, strict=True))
        expected |= set(range(at, at + view.width))

    assert {byte for begin, end in view.runs() for byte in range(begin, end)} == expected
    assert max(expected) + 1 == view.end
    assert not view.in_order or expected == set(range(3, 3 + view.bytes))
