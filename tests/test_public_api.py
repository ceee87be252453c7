"""The public surface: few names, each documented, none heavy to import."""

import inspect
import subprocess
import sys

import pytest

import coldsnap


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_there_are_at_most_thirty_two_names_and_they_are_sorted():
    assert len(coldsnap.__all__) <= 32
    assert coldsnap.__all__ == sorted(coldsnap.__all__, key=lambda n: (not n.isupper(), not n[0].isupper(), n))


@pytest.mark.parametrize("name", coldsnap.__all__)
def test_every_name_loads_and_is_documented(name):
    thing = getattr(coldsnap, name)

    assert inspect.getdoc(thing)


def test_a_function_named_like_its_module_is_the_function_in_any_order():
    code = (
        "import coldsnap as c, coldsnap.execute, coldsnap.resolve, coldsnap.progress;"
        "print(callable(c.execute), callable(c.resolve), callable(c.progress))"
    )

    assert run(code).split() == ["True", "True", "True"]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        getattr(coldsnap, "nonsense")


def test_import_loads_neither_torch_nor_an_engine_nor_anything_else_heavy():
    names = "coldsnap.resolve, coldsnap.execute, coldsnap.VLLM, coldsnap.probe"
    code = f"import sys, coldsnap; {names}; print(*sys.modules)"

    loaded = {name.split(".")[0] for name in run(code).split()}

    assert not loaded & {"torch", "vllm", "sglang", "huggingface_hub", "numpy", "transformers", "matplotlib", "rich"}


def test_bare_import_loads_only_itself():
    before = set(run("import sys; print(*sys.modules)").split())

    after = set(run("import sys, coldsnap; print(*sys.modules)").split())

    assert {name for name in after - before if name.startswith("coldsnap")} == {"coldsnap"}


def test_no_console_script_is_installed():
    from importlib.metadata import distribution

    scripts = [point for point in distribution("coldsnap").entry_points if point.group == "console_scripts"]

    assert scripts == []
