"""The contract with vLLM: by structure, on source files, for any tree."""

import sys
import textwrap
from pathlib import Path

import pytest

from coldsnap.engines.vllm import contract
from coldsnap.errors import ContractError

sys.path.insert(0, str(Path(__file__).parent))
from contract_outline import outline, plant  # noqa: E402

LLM = "v1.engine.async_llm"


@pytest.fixture
def tree(tmp_path):
    """A vLLM of outlines that meets the contract."""
    plant(tmp_path, contract.CONTRACT)
    return tmp_path


def change(tree, module, before, after):
    path = tree.joinpath(*module.split(".")).with_suffix(".py")
    source = path.read_text()
    assert before in source
    path.write_text(source.replace(before, after))


def test_a_tree_that_has_everything_meets_the_contract_whatever_its_version(tree):
    report = contract.report(tree, version="99.0")
    assert report.missing == ()
    report.require()


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("async def resume_generation", "async def go_on", "resume_generation does not exist"),
        ("async def is_paused", "def is_paused", "is_paused is not a coroutine"),
        ("*, clear_cache, mode", "*, how", "pause_generation does not take clear_cache, mode"),
        ("self.add_request()", "...", "does not call add_request"),
        ("class AsyncLLM", "class Engine", "AsyncLLM.__init__ does not exist"),
    ],
)
def test_what_changed_is_named_with_what_it_is_for(tree, before, after, told):
    change(tree, LLM, before, after)
    report = contract.report(tree, version="99.0")
    assert any(told in line for line in report.missing)
    with pytest.raises(ContractError, match="vLLM 99.0") as caught:
        report.require()
    assert caught.value.missing == report.missing


def test_an_attribute_that_is_no_longer_set_is_named(tree):
    change(tree, "device_allocator.cumem", "self.pointer_to_data = None", "self.table = None")
    (line,) = contract.report(tree).missing
    assert line.startswith("vllm.device_allocator.cumem:CuMemAllocator.__init__ does not set pointer_to_data")


def test_a_tree_without_a_module_is_told_so(tree):
    (tree / "v1" / "engine" / "core.py").unlink()
    lines = contract.report(tree).missing
    assert lines[0].startswith("vllm.v1.engine.core:EngineCore.__init__ does not exist")
    assert all(line.startswith("vllm.v1.engine.core:") for line in lines)


def test_a_module_may_be_a_package(tree):
    (tree / "plugins.py").unlink()
    (tree / "plugins").mkdir()
    (tree / "plugins" / "__init__.py").write_text(outline(contract.CONTRACT)["plugins"])
    assert contract.report(tree).missing == ()


def test_what_is_defined_under_a_condition_counts(tree):
    path = tree / "plugins.py"
    path.write_text(f"if True:\n{textwrap.indent(path.read_text(), '    ')}\n")
    assert contract.report(tree).missing == ()


@pytest.mark.parametrize("requirement", contract.CONTRACT, ids=str)
def test_every_requirement_is_really_looked_at(tmp_path, requirement):
    plant(tmp_path, [one for one in contract.CONTRACT if one != requirement])
    missing = contract.report(tmp_path).missing
    others = {one.module for one in contract.CONTRACT if one != requirement}
    implied = not requirement.name and requirement.module in others
    assert implied or any(line.startswith(f"vllm.{requirement} ") for line in missing)
