"""A manifest that can be read is complete, and the two files it speaks of give back every byte."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings
from memory import Memory, captured, maps, model_map

from coldsnap.artifact import canonical
from coldsnap.artifact.extents import Extent, ExtentMap
from coldsnap.artifact.manifest import (
    HibernateState,
    NativeManifest,
    RecoveryManifest,
    decode,
    encode,
    read_document,
)
from coldsnap.artifact.residual import check_piece
from coldsnap.artifact.store import Store
from coldsnap.errors import ArtifactError, CoverageError, FormatError, IntegrityError


@pytest.fixture(name="capture")
def _capture(tmp_path: Path) -> tuple[NativeManifest, RecoveryManifest, Memory]:
    return captured(tmp_path, Store(tmp_path / "store"))


def hydrated(directory: Path, store: Store, manifest: NativeManifest) -> list[bytearray]:
    memory = [bytearray(b"\xa5" * allocation.size) for allocation in manifest.allocations]
    pack = store.path(manifest.pack.sha256).read_bytes()
    for one in manifest.model_extents:
        memory[one.allocation][one.offset : one.offset + one.size] = pack[one.pack_offset : one.pack_offset + one.size]
    fd = os.open(directory / "weights.blob", os.O_RDONLY)
    for piece in manifest.residual_extents:
        memory[piece.allocation][piece.offset : piece.offset + piece.size] = check_piece(fd, piece, path="blob")
    os.close(fd)
    return memory


@settings(deadline=None, max_examples=25)
@given(model=maps().filter(lambda mapped: mapped.extents))
def test_pack_and_residual_give_back_every_byte(tmp_path_factory, model: ExtentMap) -> None:
    directory = tmp_path_factory.mktemp("capture")
    store = Store(directory / "store")

    native, _, memory = captured(directory, store, model=model)

    assert memory.bytes == hydrated(directory, store, native)


def test_recovery_and_native_share_their_pieces(tmp_path: Path) -> None:
    model = model_map()
    loader = ExtentMap.of(
        model.allocations, [*model.extents[1:], Extent(allocation=0, offset=100, size=4_000)]
    )  # the loader writes less than the pack holds, and at other borders

    native, recovery, memory = captured(tmp_path, Store(tmp_path / "store"), model=model, recovery=loader)
    recovery.require_same_memory(native)

    stored = {piece.file_offset: piece for piece in (*native.residual_extents, *recovery.residual_extents)}
    assert sum(piece.size for piece in stored.values()) < sum(
        piece.size for manifest in (native, recovery) for piece in manifest.residual_extents
    )
    blob = (tmp_path / "weights.blob").read_bytes()
    for piece in stored.values():
        expected = memory.bytes[piece.allocation][piece.offset : piece.offset + piece.size]
        assert expected == blob[piece.file_offset : piece.file_offset + piece.size]


def test_a_document_survives_its_file(capture, tmp_path: Path) -> None:
    native, recovery, _ = capture
    state = HibernateState(
        worker="0",
        capture_id="capture-0001",
        pid=600,
        generation="600-1",
        discarded={"kv_cache": 1},
        phases_ns={"a": 2},
    )
    for document in (native, recovery, state):
        path = tmp_path / "document.json"
        path.write_bytes(encode(document))
        path.chmod(0o600)

        assert document == read_document(type(document), path, sha256=canonical.sha256_of(encode(document)))


@pytest.mark.parametrize("which", [0, 1])
def test_every_flip_and_every_truncation_of_a_manifest_is_refused(capture, tmp_path: Path, which: int) -> None:
    document = capture[which]
    data = encode(document)
    path = tmp_path / "manifest.json"
    path.touch(mode=0o600)
    digest = canonical.sha256_of(data)

    path.write_bytes(data)
    assert document == read_document(type(document), path, sha256=digest)
    fd = os.open(path, os.O_WRONLY)
    for offset in range(len(data)):
        os.pwrite(fd, bytes([data[offset] ^ 1]), offset)
        with pytest.raises(IntegrityError, match=r"rule evidence\.5"):
            read_document(type(document), path, sha256=digest)
        os.pwrite(fd, data[offset : offset + 1], offset)
    for size in reversed(range(len(data))):
        os.truncate(fd, size)
        with pytest.raises(IntegrityError, match=r"rule evidence\.5"):
            read_document(type(document), path, sha256=digest)
    os.close(fd)


def test_every_truncation_of_a_manifest_is_refused_even_without_its_digest(capture) -> None:
    data = encode(capture[0])

    for size in range(0, len(data), 7):
        with pytest.raises(ArtifactError):
            decode(NativeManifest, data[:size], path="x")


@pytest.mark.parametrize("offset", [0, 3, 4_999, 5_000, 8_191, 12_000])
def test_a_flip_of_the_residual_is_refused_by_its_piece(capture, tmp_path: Path, offset: int) -> None:
    native = capture[0]
    path = tmp_path / "weights.blob"
    data = bytearray(path.read_bytes())
    piece = next(
        (one for one in native.residual_extents if one.file_offset <= offset < one.file_offset + one.size), None
    )
    data[offset] ^= 1
    path.write_bytes(data)

    fd = os.open(path, os.O_RDONLY)
    for one in native.residual_extents:
        if one is piece:
            with pytest.raises(IntegrityError, match=r"rule manifest\.4"):
                check_piece(fd, one, path="blob")
        else:
            check_piece(fd, one, path="blob")
    os.close(fd)


def changed(native: NativeManifest, **changes: object) -> NativeManifest:
    return decode(NativeManifest, encode_unchecked(native, **changes), path="x")


def encode_unchecked(native: NativeManifest, **changes: object) -> bytes:
    value = canonical.decode(encode(native), path="x", max_bytes=1 << 20)
    return canonical.encode({**value, **changes})


def test_broken_manifests_are_refused_with_their_rules(capture) -> None:
    native, recovery, _ = capture
    value = canonical.decode(encode(native), path="x", max_bytes=1 << 20)
    extents, pieces = value["model_extents"], value["residual_extents"]

    for changes, rule in (
        ({"format": 2}, "json.8"),
        ({"kind": "coldsnap-recovery-manifest"}, "json.8"),
        ({"page_bytes": 512}, "json.8"),
        ({"surprise": 1}, "json.5"),
        ({"worker": "../0"}, "json.9"),
        ({"pack": {**value["pack"], "bytes": value["pack"]["bytes"] + 4096}}, "manifest.3"),
        ({"model_extents": [{**extents[0], "pack_offset": 1 << 20}, *extents[1:]]}, "manifest.3"),
        ({"residual_extents": [{**pieces[0], "file_offset": 1}, *pieces[1:]]}, "manifest.4"),
        ({"residual_extents": [*pieces[:-1], {**pieces[-1], "file_offset": 1 << 20}]}, "manifest.4"),
        ({"residual": {**value["residual"], "bytes": 1}}, "manifest.4"),
        ({"residual_extents": [{**pieces[0], "crc32": 1 << 32}, *pieces[1:]]}, "json.9"),
    ):
        with pytest.raises(FormatError) as caught:
            changed(native, **changes)
        assert rule == caught.value.rule, changes

    with pytest.raises(CoverageError):
        changed(native, residual_extents=pieces[1:])
    with pytest.raises(CoverageError):
        changed(native, residual_extents=[{**pieces[0], "size": pieces[0]["size"] + 1}, *pieces[1:]])
    other = attrs.evolve(recovery, capture_id="capture-0002")
    with pytest.raises(FormatError, match=r"manifest\.5"):
        other.require_same_memory(native)


def test_the_pieces_of_both_manifests_must_be_the_same_ones(capture) -> None:
    native, recovery, _ = capture
    first = recovery.residual_extents[0]
    other = attrs.evolve(recovery, residual_extents=(attrs.evolve(first, crc32=0), *recovery.residual_extents[1:]))

    with pytest.raises(FormatError, match=r"manifest\.5"):
        other.require_same_memory(native)


def test_a_captured_checksum_is_the_one_of_zlib(capture) -> None:
    native, _, memory = capture
    for one in native.model_extents:
        data = memory.bytes[one.allocation][one.offset : one.offset + one.size]
        assert zlib.crc32(data) == one.crc32
