"""The contract with SGLang: by structure, on source files, for any tree."""

import sys
from pathlib import Path

import pytest

from coldsnap.engines.sglang import contract
from coldsnap.errors import ContractError

sys.path.insert(0, str(Path(__file__).parent))
from contract_outline import plant  # noqa: E402


@pytest.fixture
def tree(tmp_path):
    """An SGLang of outlines that meets the contract."""
    plant(tmp_path, contract.CONTRACT)
    return tmp_path


def file_of(tree, module):
    return tree.joinpath(*module.split(".")).with_suffix(".py")


def test_a_tree_that_has_everything_meets_the_contract_whatever_its_version(tree):
    report = contract.report(tree, version="99.0")
    assert report.missing == ()
    report.require()


def test_a_boundary_that_lost_its_barrier_is_refused_by_name(tree):
    path = file_of(tree, "srt.managers.scheduler_components.weight_updater")
    path.write_text(path.read_text().replace("self.barrier()", "..."))
    report = contract.report(tree, version="99.0")
    assert len(report.missing) == 2
    assert all("does not call barrier" in line for line in report.missing)
    with pytest.raises(ContractError, match="SGLang 99.0"):
        report.require()


def test_what_another_release_has_instead_is_as_good(tree):
    file_of(tree, "srt.arg_groups.choices").unlink()
    (line,) = contract.report(tree).missing
    assert line.startswith("sglang.srt.arg_groups.choices:add_load_format_choices does not exist")
    file_of(tree, "srt.server_args").write_text("def add_load_format_choices(choices): ...\n")
    assert contract.report(tree).missing == ()


def test_a_name_that_is_assigned_counts_as_there(tree):
    file_of(tree, "srt.arg_groups.choices").write_text("add_load_format_choices = [].extend\n")
    assert contract.report(tree).missing == ()


def test_only_a_detokenizer_that_loads_plugins_is_a_rank(tree):
    assert contract.roles(tree, workers=2) == {"api": 1, "worker": 2}
    file_of(tree, "srt.managers.detokenizer_manager").write_text("def run_detokenizer_process():\n    load_plugins()\n")
    assert contract.roles(tree, workers=2) == {"api": 1, "worker": 2, "detokenizer": 1}


def test_the_source_digest_tells_code_from_comments(tree):
    path = file_of(tree, "srt.plugins.hook_registry")
    before = contract.source_digest(tree)
    path.write_text(f"# a comment\n{path.read_text()}")
    assert contract.source_digest(tree) == before
    path.write_text(f"{path.read_text()}\ndef more(): ...\n")
    assert contract.source_digest(tree) != before
