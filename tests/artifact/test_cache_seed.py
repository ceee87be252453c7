"""A cache seed comes back whole, with the mtimes that compilers compare."""

from __future__ import annotations

import os
from pathlib import Path

import attrs
import pytest
from made import descriptor

from coldsnap.artifact import Artifact, ArtifactWriter, CacheSeed
from coldsnap.artifact.cache_seed import collect_seed, plant_seed
from coldsnap.errors import ArtifactError, IntegrityError

MTIME = 1_700_000_000_123_456_789


@pytest.fixture(name="cache")
def _cache(tmp_path: Path) -> Path:
    (tmp_path / "cache/deep").mkdir(parents=True)
    for name in ("kernel.so", "deep/plan.json"):
        (tmp_path / "cache" / name).write_bytes(name.encode())
        os.utime(tmp_path / "cache" / name, ns=(MTIME, MTIME))
    return tmp_path / "cache"


def seeded(output: Path, cache: Path) -> Artifact:
    with ArtifactWriter.create(output) as writer:
        seed = collect_seed(writer, cache, unit="rank0", name="inductor", target="/var/cache/coldsnap/inductor")
        writer.directory("capsule/rank0")
        return writer.commit(descriptor(writer.seal("capsule/rank0"), cache_seeds=(seed,)))


def test_a_seed_is_planted_with_its_mtimes(tmp_path: Path, cache: Path) -> None:
    artifact = Artifact.open(seeded(tmp_path / "one", cache).path)
    (seed,) = artifact.descriptor.cache_seeds

    assert 23 == plant_seed(artifact, seed, tmp_path / "planted")
    for name in ("kernel.so", "deep/plan.json"):
        assert name.encode() == (tmp_path / "planted" / name).read_bytes()
        assert MTIME == (tmp_path / "planted" / name).stat().st_mtime_ns
    assert {"cache_seeds": 23} == dict(artifact.size_bytes)


def test_a_damaged_seed_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    artifact = seeded(tmp_path / "one", cache)
    (seed,) = artifact.descriptor.cache_seeds
    (artifact.path / seed.path / "kernel.so").write_bytes(b"lenrek.so")

    with pytest.raises(IntegrityError):
        plant_seed(artifact, seed, tmp_path / "planted")
    assert not (tmp_path / "planted").exists()


def test_a_seed_does_not_mix_with_another_cache(tmp_path: Path, cache: Path) -> None:
    artifact = seeded(tmp_path / "one", cache)

    with pytest.raises(ArtifactError, match="not empty"):
        plant_seed(artifact, artifact.descriptor.cache_seeds[0], cache)
    assert (cache / "kernel.so").exists()


def test_only_regular_files_belong_to_a_seed(tmp_path: Path, cache: Path) -> None:
    (cache / "link").symlink_to("/etc")

    with pytest.raises(ArtifactError, match="neither a regular file nor a directory"):
        seeded(tmp_path / "one", cache)
    with pytest.raises(ArtifactError, match="is not a directory"):
        seeded(tmp_path / "one", cache / "link")
    assert not (tmp_path / "one").exists()


def test_a_seed_without_an_mtime_or_outside_its_directory_breaks_a_rule(tmp_path: Path, cache: Path) -> None:
    (seed,) = seeded(tmp_path / "one", cache).descriptor.cache_seeds

    for change in ({"mtime_ns": None}, {"path": "elsewhere/kernel.so"}):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            CacheSeed(
                unit="rank0", name="x", target="/x", path=seed.path, files=(attrs.evolve(seed.files[0], **change),)
            )
        assert "manifest.9" == caught.value.rule
