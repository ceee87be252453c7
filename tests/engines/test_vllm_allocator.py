"""vLLM's allocator as preserved memory: vLLM's real tables, over a device played by host mappings."""

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from coldsnap.engines.vllm.imports import after_import
from coldsnap.engines.vllm.kv_payload import REMNANT_LIMIT_BYTES, KvStorage, discardable, rests
from coldsnap.transfer.memory import Region

OUT_OF_MEMORY = "failed on CUDA device 1: CUDA Error: out of memory"


@pytest.fixture(scope="module")
def seen(engine_python):
    """What the scenarios saw, in the engine's interpreter."""
    scenarios = Path(__file__).with_name("cumem_scenarios.py")
    done = subprocess.run([engine_python, scenarios], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


pytestmark = [pytest.mark.vllm]


def test_released_memory_leaves_the_process_and_comes_back_as_zeros_at_the_same_addresses(seen):
    told = seen["release_and_remap"]
    assert told["listed"] == [["weights", 4], ["weights", 6], ["weights", 2], ["kv_cache", 12]]
    assert told["freed_mib"] >= 23
    assert told["zero"] and told["equal"] and told["awake"]


def test_vllms_own_table_says_what_is_asleep_and_its_usage_stays(seen):
    told = seen["release_and_remap"]
    assert told["asleep"] and told["others_untouched"]
    assert told["usage"][0] == told["usage"][1]


def test_only_blocks_that_torch_has_free_in_the_weights_pool_are_vacant(seen):
    mib = 1 << 20
    found = [[mib, mib // 2], [2 * mib + mib // 2, mib + mib // 2]]
    assert seen["what_no_tensor_lives_in"] == {"found": found, "without": []}


def test_vllms_own_sleep_and_wake_up_work_after_a_hydration(seen):
    assert seen["vllm_itself_goes_on_afterwards"] == {"slept": 6, "awake": True, "equal": True}


def test_what_vllm_woke_meanwhile_is_not_mapped_twice(seen):
    told = seen["vllm_wakes_what_was_released"]
    assert told == {"mapped": [True, True, True, False], "then_mapped": 1, "awake": True}


def test_weights_that_vllm_copied_itself_are_not_overwritten(seen):
    told = seen["a_copy_of_vllm_is_not_overwritten"]
    assert "POST /wake_up" in told["told"] and told["asleep"] == 6


def test_a_remap_that_ran_out_of_memory_is_finished_by_the_next_one(seen):
    told = seen["out_of_memory_in_the_middle"]
    assert OUT_OF_MEMORY in told["told"]
    assert told["mapped"] == [True, True, False, False]
    assert told["mapped_once"] == [1, 1, 3, 1]  # two attempts that failed, and none for what was mapped
    assert told["awake"] and all(told["backed"])


def test_a_mapping_that_fails_at_its_last_step_leaves_the_range_free(seen):
    told = seen["a_mapping_that_fails_last_is_undone"]
    assert "unknown error" in told["told"]
    assert told["backed"] == [False, False, False, False] and told["awake"]


def test_memory_without_backing_is_not_touched(seen):
    told = seen["what_has_no_backing_is_not_touched"]
    assert "remap it first" in told["read"] and "remap it first" in told["write"]
    assert "no allocation of vLLM holds 64 bytes" in told["outside"]


def test_an_allocation_that_the_engine_gave_up_is_told_before_anything_is_mapped(seen):
    told = seen["an_allocation_that_went_is_told"]
    assert "vLLM no longer has the allocation of 6291456 bytes of weights" in told["told"]
    assert told["mapped"] == 2


def test_a_thread_of_its_own_works_on_the_workers_device(seen):
    told = seen["a_thread_of_its_own_uses_the_right_device"]
    assert told["devices"] == [told["ordinal"]]


def test_what_lies_beside_the_kv_cache_in_its_allocation_comes_back(seen):
    told = seen["what_lies_beside_the_cache_comes_back"]
    assert told["storages"] == [[0, 4096, 1 << 20], [0, 2 << 20, 8 << 20]]
    assert told["kept"] == told["expected"] and told["held_after"] == 0
    assert told["beside_equal"] and told["cache_zero"]


def test_an_allocation_with_much_beside_the_kv_cache_keeps_its_backing(seen):
    assert seen["an_allocation_with_much_beside_the_cache_is_kept"] == {"listed": 0}


def region(address, size):
    return Region(address=address, size_bytes=size, mapped_bytes=size, tag="kv_cache")


def test_the_rests_of_an_allocation_are_what_no_cache_covers():
    caches = [KvStorage(index=1, address=140, size_bytes=20), KvStorage(index=0, address=90, size_bytes=30)]
    assert list(rests(region(100, 100), caches)) == [(120, 20), (160, 40)]
    assert list(rests(region(300, 10), caches)) == [(300, 10)]
    assert list(rests(region(95, 20), caches)) == []


def test_an_allocation_is_thrown_away_only_for_the_caches_in_it():
    cache = KvStorage(index=0, address=1 << 30, size_bytes=1 << 20)
    assert discardable(region(1 << 30, 2 << 20), [cache])
    assert not discardable(region(1 << 30, (2 << 20) + REMNANT_LIMIT_BYTES), [cache])
    assert not discardable(region(2 << 30, 2 << 20), [cache])


def test_a_hook_runs_once_when_its_module_is_imported(tmp_path, monkeypatch):
    (tmp_path / "late_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "late_module", raising=False)
    seen_modules = []

    def hook(module):
        seen_modules.append((module.__name__, module.value))
        module.value = 2

    after_import("late_module", hook)
    assert seen_modules == []
    import late_module

    assert late_module.value == 2 and seen_modules == [("late_module", 1)]
    assert type(late_module.__spec__.loader).__name__ == "SourceFileLoader"
    import importlib

    importlib.reload(late_module)
    assert seen_modules == [("late_module", 1)]
    after_import("late_module", hook)
    assert len(seen_modules) == 2
    del sys.modules["late_module"]


def test_a_hook_for_a_module_that_is_not_there_leaves_the_import_as_it_was():
    after_import("coldsnap_has_no_such_module", lambda module: None)
    with pytest.raises(ModuleNotFoundError):
        import coldsnap_has_no_such_module  # noqa: F401
    watchers = [finder for finder in sys.meta_path if type(finder).__name__ == "_Watch"]
    assert len(watchers) == 1
    sys.meta_path.remove(watchers[0])


def test_two_hooks_for_one_module_both_run(tmp_path, monkeypatch):
    (tmp_path / "twice_module.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    calls = []
    after_import("twice_module", lambda module: calls.append("first"))
    after_import("twice_module", lambda module: calls.append("second"))
    import twice_module

    assert isinstance(twice_module, types.ModuleType) and sorted(calls) == ["first", "second"]
    del sys.modules["twice_module"]
