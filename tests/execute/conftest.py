"""Real plans on real CRIU with a small real engine. Nothing may be left behind."""

import shutil
from types import SimpleNamespace

import pytest
from lab import Lab, mounts, tagged, until, unused_port

import coldsnap as cs


@pytest.fixture
def lab(tmp_path, criu, engine_python, facts):
    before = mounts(tmp_path)
    lab = Lab(tmp_path, criu, engine_python, facts)
    yield lab
    lab.close()
    until(lambda: not tagged(lab.tag), "the end of every process of the test")
    assert mounts(tmp_path) == before
    shutil.rmtree(tmp_path, ignore_errors=True)  # images are large


@pytest.fixture(scope="session")
def captured(tmp_path_factory, criu, engine_python, facts):
    """One artifact for every test that only restores, and the report of its capture."""
    directory = tmp_path_factory.mktemp("captured")
    lab = Lab(directory, criu, engine_python, facts)
    events, port = [], unused_port()
    report = lab.capture(lab.engine(loopback=True), placement=lab.placement(port=port), on_event=events.append)
    yield SimpleNamespace(report=report, events=events, port=port)
    lab.close()
    until(lambda: not tagged(lab.tag), "the end of every restored process")
    shutil.rmtree(directory)


@pytest.fixture
def artifact(captured):
    return cs.Artifact.open(captured.report.artifact)


@pytest.fixture
def copied(artifact, tmp_path):
    """A copy to be damaged; the evidence of the original does not hold for it."""
    path = tmp_path / "copy"
    shutil.copytree(artifact.path, path)
    return cs.Artifact.open(path)
