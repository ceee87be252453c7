"""What people and machines do that the steps of a plan do not foresee: each is told in a sentence, and undone."""

import os
import shutil

import pytest
from lab import Background, port_is_free, tagged, until, unused_port

import coldsnap as cs
from coldsnap.artifact import ArtifactWriter
from coldsnap.errors import AdmissionError, ArtifactError, FormatError, IntegrityError, PolicyError, StepError

pytestmark = pytest.mark.criu


def test_of_two_restores_at_once_on_one_port_one_is_refused(lab, artifact):
    port = unused_port()
    runs = [Background(lambda: lab.restore(artifact, port=port)) for _ in range(2)]
    outcomes = []
    for run in runs:
        try:
            outcomes.append(run.result())
        except AdmissionError as error:
            outcomes.append(error)
    refused = [each for each in outcomes if isinstance(each, AdmissionError)]
    assert len(refused) == 1 and str(port) in str(refused[0])
    (served,) = (each for each in outcomes if each not in refused)
    served.serving.stop(grace_s=0)
    until(lambda: port_is_free(port), "the end of the one that was restored")
    assert not tagged(lab.tag)


@pytest.mark.parametrize("name", ["engine.json", "volatile.json"])
def test_a_small_file_that_was_changed_is_named_before_anything_starts(lab, copied, name):
    path = next(copied.path.rglob(name))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=rf"{name}: wrong content") as failed:
        lab.restore(copied)
    assert failed.value.report.workload == "nothing was started"


@pytest.mark.parametrize("below", ["in", "capsule/unit-0/in", "capsule/new/deep/in"])
def test_an_output_inside_another_artifact_is_refused(copied, below):
    with pytest.raises(ArtifactError, match="lies in the artifact"), ArtifactWriter.create(copied.path / below):
        pass
    copied.verify()


@pytest.mark.parametrize("output", ["file/x", "x" * 250, "/proc/x"])
def test_an_output_that_cannot_be_made_is_told_with_its_path(tmp_path, output):
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match="cannot be created: .*; choose another"):
        with ArtifactWriter.create(tmp_path / output):
            pass
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("path", ["a\0b", ""])
def test_a_path_that_is_empty_or_has_a_nul_is_refused(lab, path):
    refused = pytest.raises(PolicyError, match="not empty and without NUL, found '(a.x00b)?'")
    with refused:
        cs.Capture(lab.engine(), output=path, placement=cs.local(port=1))
    with refused:
        cs.Capture(lab.engine(), output="a", store=path, placement=cs.local(port=1))
    with refused:
        cs.local(port=1, run_dir=path)


@pytest.mark.parametrize("path", [3, b"bytes"])
def test_what_is_no_path_is_refused(lab, path):
    with pytest.raises(PolicyError, match="expected a path"):
        cs.Capture(lab.engine(), output="a", store=path, placement=cs.local(port=1))


def test_of_two_captures_of_one_engine_the_second_is_refused_and_undoes_nothing(lab):
    engine = lab.launch()
    other = cs.Engine.attach(engine.run_dir)
    with other.keeper.operation("capture"):
        with pytest.raises(StepError, match="capture is in flight") as failed:
            lab.capture(engine, then="keep")
        assert failed.value.report.workload == "nothing was started"
    assert lab.capture(engine, then="keep").state == "succeeded"


def test_a_linked_artifact_is_told_to_be_a_link(copied, tmp_path):
    (tmp_path / "link").symlink_to(copied.path)
    with pytest.raises(FormatError, match="is a symbolic link; name what it leads to"):
        cs.Artifact.open(tmp_path / "link")


def test_a_path_that_cannot_be_looked_at_is_an_error_of_the_artifact():
    with pytest.raises(ArtifactError, match="cannot be looked at .*too long"):
        cs.Artifact.open("x" * 5000)


def test_an_output_that_vanishes_before_the_dump_fails_the_step_and_leaves_nothing(lab):
    output = lab.output()

    def remove(step, when, *, keeper_pid):
        if (step, when) == ("dump", "before"):
            shutil.rmtree(output)

    with pytest.raises(StepError, match=r"step dump failed: .*No such file") as failed:
        lab.capture(lab.engine(), output=output, fault_point=remove)
    assert failed.value.step == "dump"
    assert failed.value.report.workload.startswith("nothing is left running")
    assert not output.exists() and not tagged(lab.tag)
