"""The native library that a policy names is the one that works here, or nothing is started."""

import hashlib
import shutil
from pathlib import Path

import pytest
from lab import ask, tagged

import coldsnap as cs
import coldsnap.transfer
from coldsnap.errors import NativeError

PACKAGED = Path(coldsnap.transfer.__file__).with_name("libcoldsnap_io.so")
WRONG = {"io.native_sha256": "0" * 64}


@pytest.fixture
def pinned(tmp_path):
    """A copy of the library, and the policy that names it."""
    own = tmp_path / "own" / PACKAGED.name
    own.parent.mkdir()
    shutil.copy(PACKAGED, own)
    digest = hashlib.sha256(own.read_bytes()).hexdigest()
    return own, {"io.native_library": str(own), "io.native_sha256": digest}


def is_loaded(library):
    return str(library) in Path("/proc/self/maps").read_text()


@pytest.mark.criu
def test_the_named_library_shrinks_and_brings_back_pages(lab, pinned):
    library, policy = pinned
    policy |= {"io.image_compression": "lz4"}

    report = lab.capture(lab.engine(), policy=policy)

    assert is_loaded(library)
    assert report.plan.decision("io.native_sha256").effective == policy["io.native_sha256"]
    assert ask(lab.restore(cs.Artifact.open(report.artifact)).engine)


@pytest.mark.criu
def test_another_build_than_the_pinned_one_is_refused_before_a_capture_starts_anything(lab):
    with pytest.raises(NativeError, match="io.native_sha256 expects 0000") as refused:
        lab.capture(lab.engine(), policy=WRONG)

    assert refused.value.report.workload == "nothing was started"
    assert not tagged(lab.tag)


@pytest.mark.criu
def test_another_build_than_the_pinned_one_is_refused_before_a_restore_starts_anything(lab, artifact):
    restore = cs.Restore(artifact, placement=lab.placement())

    with pytest.raises(NativeError, match="io.native_sha256 expects 0000") as refused:
        lab.run(restore, WRONG)

    assert refused.value.report.workload == "nothing was started"


@pytest.mark.criu
def test_another_build_than_the_pinned_one_does_not_verify(lab, artifact):
    with pytest.raises(NativeError, match="io.native_sha256 expects 0000"):
        lab.run(cs.Verify(artifact), WRONG)
