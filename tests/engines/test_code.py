"""The files that an engine is made of are known again, and a changed one is named."""

import os

import pytest

from coldsnap.engines.code import changed, known


@pytest.fixture
def package(tmp_path):
    root = tmp_path / "engine"
    (root / "inner" / "__pycache__").mkdir(parents=True)
    (root / "__init__.py").write_text("a = 1\n")
    (root / "inner" / "b.py").write_text("b = 2\n")
    (root / "inner" / "_C.so").write_bytes(b"\x7fELF")
    return root


def test_what_nobody_touched_is_unchanged_and_what_is_no_code_does_not_count(package):
    before = known([str(package), os.path.realpath(os.sys.executable)])

    (package / "inner" / "__pycache__" / "b.pyc").write_bytes(b"x")
    (package / "README.md").write_text("x")

    assert changed(before) == []


def test_a_file_that_was_only_written_again_is_unchanged(package):
    before = known([str(package)])

    (package / "__init__.py").write_text("a = 1\n")
    os.utime(package / "__init__.py", ns=(1, 1))

    assert changed(before) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "__init__.py").write_text("a = 2\n"),
        lambda root: (root / "inner" / "new.py").write_text(""),
        lambda root: (root / "inner" / "b.py").unlink(),
        lambda root: (root / "inner" / "_C.so").write_bytes(b"\x7fELFmore"),
    ],
    ids=["contents", "new", "gone", "library"],
)
def test_a_change_is_named(package, change):
    before = known([str(package)])

    change(package)

    (sentence,) = changed(before)
    assert sentence.startswith(f"{package} was changed since the capture")


def test_a_package_that_is_gone_is_named(package):
    before = known([str(package)])
    package.rename(package.with_name("elsewhere"))

    (sentence,) = changed(before)
    assert "cannot be read" in sentence
