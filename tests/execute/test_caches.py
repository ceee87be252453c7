"""Derived caches travel with an artifact: a process that maps a kernel comes back where its cache was never made."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from lab import Lab, ask, tagged, until

import coldsnap as cs
from coldsnap.engines.caches import bound
from coldsnap.engines.specs import spec_to_text
from coldsnap.errors import ArtifactError, UnsupportedError

pytestmark = pytest.mark.criu

SEEDED = {"process.cache_seed": True}
MTIME_NS = 1_700_000_000_123_456_789


@pytest.fixture(scope="module")
def home(tmp_path_factory, criu, engine_python, facts):
    """An artifact with a cache, whose directory may be removed."""
    directory = tmp_path_factory.mktemp("caches")
    lab = Lab(directory, criu, engine_python, facts)
    spec = lab.engine(args=("--kernel", "deep/kernel.so"))
    environment = bound(spec_to_text(spec))
    own = Path(environment["TRITON_CACHE_DIR"]).parent
    engine = lab.run(cs.Launch(spec, placement=lab.placement()), SEEDED).engine
    kernel = Path(environment["TRITON_CACHE_DIR"], "deep", "kernel.so")
    os.utime(kernel, ns=(MTIME_NS, MTIME_NS))
    report = lab.capture(engine, policy=SEEDED)
    yield SimpleNamespace(
        report=report, artifact=cs.Artifact.open(report.artifact), kernel=kernel, own=own, content=kernel.read_bytes()
    )
    lab.close()
    until(lambda: not tagged(lab.tag), "the end of every process of the module")
    shutil.rmtree(directory)
    shutil.rmtree(own)


def test_an_artifact_carries_the_caches_that_its_engine_was_launched_with(home):
    (seed,) = home.artifact.descriptor.cache_seeds
    (file,) = seed.files
    assert (seed.name, seed.target) == ("triton", str(home.kernel.parents[1]))
    assert (file.bytes, file.mtime_ns) == (len(home.content), MTIME_NS)
    assert home.artifact.size_bytes["cache_seeds"] == file.bytes
    assert home.report.receipt("caches").effective == "1 files of 1 caches"
    assert "vllm" in home.report.receipt("caches").reason


def test_a_process_that_maps_a_kernel_comes_back_where_its_cache_is_gone(lab, home):
    shutil.rmtree(home.kernel.parents[1])

    report = lab.restore(home.artifact)

    assert report.receipt("caches").effective == "1 files put back, 0 were there"
    assert home.kernel.read_bytes() == home.content
    assert home.kernel.stat().st_mtime_ns == MTIME_NS
    assert ask(report.engine)
    again = lab.restore(home.artifact)
    assert again.receipt("caches").effective == "0 files put back, 1 were there"


def test_a_preparation_puts_them_back_too(lab, home):
    shutil.rmtree(home.kernel.parents[1])
    lab.run(cs.Prepare(home.artifact, placement=lab.placement()))
    assert home.kernel.read_bytes() == home.content


def test_another_file_of_that_name_is_refused_and_not_replaced(lab, home):
    home.kernel.write_bytes(b"another kernel")

    with pytest.raises(ArtifactError, match="is another file than the one that was captured") as failed:
        lab.restore(home.artifact)

    assert failed.value.report.workload == "nothing was started"
    assert home.kernel.read_bytes() == b"another kernel"
    home.kernel.unlink()
    assert lab.restore(home.artifact).engine.status().state == "running"


def test_a_cache_that_the_user_binds_is_carried_by_its_path_or_refused_by_name(lab):
    path = Path("/tmp/coldsnap-derived-cache") / lab.tag
    spec = lab.engine(args=("--kernel", "kernel.so"), env={"TRITON_CACHE_DIR": str(path)})
    with pytest.raises(UnsupportedError, match="TRITON_CACHE_DIR") as refusal:
        lab.capture(spec, policy=SEEDED)
    assert refusal.value.field == "process.cache_seed"

    report = lab.capture(spec, policy=SEEDED | {"process.cache_paths": [str(path)]})

    artifact = cs.Artifact.open(report.artifact)
    shutil.rmtree(path)
    assert lab.restore(artifact).engine.status().state == "running"
    assert (path / "kernel.so").exists()
    shutil.rmtree(path)


def test_an_engine_that_was_launched_without_has_no_managed_cache_to_carry(lab):
    engine = lab.launch()
    with pytest.raises(UnsupportedError, match="was launched with its caches elsewhere") as refusal:
        lab.capture(engine, policy=SEEDED)
    assert refusal.value.field == "process.cache_seed"
    assert lab.run(cs.Status(engine)).receipt("status").effective == "awake"
