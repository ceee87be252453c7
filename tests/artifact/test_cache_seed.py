"""A cache seed comes back whole, with the mtimes that compilers compare."""

from __future__ import annotations

import os
from pathlib import Path

import attrs
import pytest
from made import descriptor

from coldsnap.artifact import Artifact, ArtifactWriter, CacheSeed
from coldsnap.artifact.cache_seed import collect_seed, plant_seed, reconcile_seed
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


def reconciled(tmp_path: Path, cache: Path) -> tuple[Artifact, CacheSeed]:
    artifact = seeded(tmp_path / "artifact", cache)
    (seed,) = artifact.descriptor.cache_seeds
    return artifact, attrs.evolve(seed, target=str(tmp_path / "there" / "inductor"))


def test_a_seed_completes_a_cache_and_keeps_what_is_there(tmp_path: Path, cache: Path) -> None:
    artifact, seed = reconciled(tmp_path, cache)
    there = Path(seed.target)
    assert (reconcile_seed(artifact, seed).files, reconcile_seed(artifact, seed).kept) == (2, 2)
    (there / "deep/plan.json").unlink()
    (there / "of-another").write_bytes(b"kernel")
    os.utime(there / "kernel.so", ns=(1, 1))

    planted = reconcile_seed(artifact, seed)

    assert (planted.files, planted.kept, planted.bytes) == (1, 1, len("deep/plan.json"))
    assert (there / "of-another").read_bytes() == b"kernel"
    for name in ("kernel.so", "deep/plan.json"):
        assert (there / name).read_bytes() == name.encode()
        assert (there / name).stat().st_mtime_ns == MTIME
        assert (there / name).stat().st_mode & 0o777 == 0o700
    assert (cache / "kernel.so").stat().st_mode & 0o777 == 0o700


def test_a_file_of_another_content_is_not_replaced(tmp_path: Path, cache: Path) -> None:
    artifact, seed = reconciled(tmp_path, cache)
    there = Path(seed.target)
    there.mkdir(parents=True)
    for content in (b"longer than it was", b"kernel.sO"):
        (there / "kernel.so").write_bytes(content)
        with pytest.raises(ArtifactError, match="is another file"):
            reconcile_seed(artifact, seed)
        assert (there / "kernel.so").read_bytes() == content
    assert not (there / "deep").exists()


def test_a_wrong_byte_in_the_artifact_adds_nothing_to_a_cache(tmp_path: Path, cache: Path) -> None:
    artifact, seed = reconciled(tmp_path, cache)
    there = Path(seed.target)
    there.mkdir(parents=True)
    (there / "of-another").write_bytes(b"kernel")
    spoilt = artifact.path / next(file.path for file in seed.files if file.path.endswith("kernel.so"))
    spoilt.write_bytes(b"kernel.sO")

    with pytest.raises(IntegrityError):
        reconcile_seed(artifact, seed)

    assert "kernel.so" not in {path.name for path in there.rglob("*")}
    assert not [path for path in there.rglob(".*") if path.is_file()]
