"""One byte wrong anywhere in an artifact or its pack is refused with the rule it broke."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_store import write_native

from coldsnap.artifact import Artifact
from coldsnap.artifact.collect import verify_artifact
from coldsnap.artifact.store import Store
from coldsnap.errors import ArtifactError

RULE = r"rule (json|descriptor|evidence|manifest|extent|pack|validation)\.\d+"


@pytest.fixture(name="made", scope="module")
def _made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Store]:
    root = tmp_path_factory.mktemp("damage")
    store = Store(root / "store")
    artifact = write_native(root / "native", store)
    verify_artifact(artifact, store, "full")
    return artifact.path, store


def files(root: Path, store: Store) -> list[Path]:
    artifact = Artifact.open(root)
    return [
        root / "artifact.json",
        *(root / file.path for file in artifact.descriptor.files),
        store.packs()[0].path,
    ]


def refused(root: Path, store: Store, verify) -> None:
    with pytest.raises(ArtifactError, match=RULE):
        verify_artifact(Artifact.open(root), store, verify)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), verify=st.sampled_from(["evidence", "full"]))
def test_any_flip_with_a_new_mtime_is_refused_under_both(made, data, verify) -> None:
    root, store = made
    path = data.draw(st.sampled_from(files(root, store)))
    content, before = path.read_bytes(), path.stat()
    offset = data.draw(st.integers(0, len(content) - 1))
    flipped = bytearray(content)
    flipped[offset] ^= 1 << data.draw(st.integers(0, 7))

    path.write_bytes(flipped)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    try:
        refused(root, store, verify)
    finally:
        path.write_bytes(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    verify_artifact(Artifact.open(root), store, verify)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flip_with_a_restored_mtime_is_refused_under_full(made, data) -> None:
    root, store = made
    path = data.draw(st.sampled_from(files(root, store)))
    content, before = path.read_bytes(), path.stat()
    offset = data.draw(st.integers(0, len(content) - 1))
    flipped = bytearray(content)
    flipped[offset] ^= 1 << data.draw(st.integers(0, 7))

    path.write_bytes(flipped)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    try:
        refused(root, store, "full")
    finally:
        path.write_bytes(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), verify=st.sampled_from(["evidence", "full"]), keep_mtime=st.booleans())
def test_any_truncation_is_refused_under_both(made, data, verify, keep_mtime: bool) -> None:
    root, store = made
    path = data.draw(st.sampled_from(files(root, store)))
    content, before = path.read_bytes(), path.stat()
    size = data.draw(st.integers(0, len(content) - 1))

    os.truncate(path, size)
    if keep_mtime:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    try:
        refused(root, store, verify)
    finally:
        path.write_bytes(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
