"""The tool that provides engine environments: what decides where one lies."""

import importlib.util
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "engine_env.py"
spec = importlib.util.spec_from_file_location("engine_env", TOOL)
engine_env = importlib.util.module_from_spec(spec)
sys.modules["engine_env"] = engine_env
spec.loader.exec_module(engine_env)


@pytest.fixture
def root(tmp_path, monkeypatch):
    (tmp_path / "requirements").mkdir()
    for name in ("one", "two", "two-alone"):
        (tmp_path / "requirements" / f"{name}.txt").write_text(f"{name}==1\n")
    monkeypatch.setattr(engine_env, "ROOT", tmp_path)
    return tmp_path


def test_an_environment_is_found_by_its_name_and_its_pins(root):
    before = engine_env.key("one")
    (root / "requirements" / "one.txt").write_text("one==2\n")

    assert before.startswith("one-")
    assert engine_env.key("one") != before


def test_what_is_installed_alone_decides_too(root):
    before = engine_env.key("two")
    (root / "requirements" / "two-alone.txt").write_text("two==2\n")

    assert engine_env.key("two") != before


def test_an_environment_whose_requirements_are_followed_has_one_file(root):
    assert [path.name for path in engine_env.requirements("one")] == ["one.txt"]
    assert [path.name for path in engine_env.requirements("two")] == ["two.txt", "two-alone.txt"]


def test_stand_ins_of_an_environment_that_is_there_are_brought_up_to_date(root, monkeypatch):
    monkeypatch.setenv("COLDSNAP_CI_CACHE", str(root / "cache"))
    monkeypatch.setattr(engine_env, "STAND_INS", {"one": root / "stand-ins"})
    (root / "stand-ins" / "absent").mkdir(parents=True)
    (root / "stand-ins" / "absent" / "__init__.py").write_text("new = True\n")
    environment = root / "cache" / engine_env.key("one")
    site = environment / "lib" / "python3.99" / "site-packages"
    (site / "absent").mkdir(parents=True)
    (site / "absent" / "__init__.py").write_text("new = False\n")
    (environment / ".complete").touch()

    assert engine_env.build("one") == environment / "bin" / "python"
    assert (site / "absent" / "__init__.py").read_text() == "new = True\n"


def test_every_environment_that_is_stood_in_for_has_its_requirements():
    assert all(path.exists() for name in engine_env.STAND_INS for path in engine_env.requirements(name))
