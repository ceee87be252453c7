"""A startup plan of vLLM is taken with a little less memory, off the KV cache to the byte; with much less it is not."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from coldsnap.engines.vllm.startup_plan import StartupPlan, admitted
from coldsnap.errors import ContractError

MIB = 1 << 20
FREE, KV = 64 << 30, 8 << 30


@pytest.fixture(scope="module")
def told(engine_python, tmp_path_factory):
    """What vLLM's own functions did, by scenario."""
    script = Path(__file__).with_name("plan_scenarios.py")
    done = subprocess.run(
        [engine_python, script, tmp_path_factory.mktemp("plans")], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_plan_is_taken_as_recorded_when_as_much_is_free(told):
    for name in ("same", "more", "two workers, same"):
        assert (told["results"][name]["kv"], told["results"][name]["state"]) == (KV, "applied")


@pytest.mark.parametrize("missing", [100, 512])
def test_what_is_missing_is_taken_off_the_kv_cache_to_the_byte(told, missing):
    found = told["results"][f"{missing} MiB less"]
    assert found["kv"] == found["kv_cache_bytes"] == KV - missing * MIB
    assert (found["state"], found["shortfall_bytes"]) == ("shrunk", missing * MIB)
    assert (found["recorded_free_bytes"], found["free_bytes"]) == (FREE, FREE - missing * MIB)
    assert any(f"{missing * MIB:,} bytes less" in line for line in told["lines"])


@pytest.mark.parametrize("name", ["1 GiB less", "two workers, 100 MiB less", "a cache smaller than what is missing"])
def test_where_too_much_is_missing_vllm_profiles(told, name):
    found = told["results"][name]
    assert (found["kv"], found["kv_cache_bytes"], found["state"]) == (None, 0, "profiled")


def test_vllms_own_fingerprint_decides_which_plan_it_is(told):
    assert told["results"]["before"]["kv"] is None
    assert told["results"]["before"]["state"] == "none"
    assert told["results"]["another configuration"]["kv"] is None


def test_a_plan_without_figures_is_none():
    for plan in ({}, {"kv_cache_memory_bytes": True, "free_memory_baseline": 1}, {"kv_cache_memory_bytes": 0}):
        assert admitted(plan, 5, most_bytes=9).state == "none"


def test_a_vllm_that_applies_its_plans_another_way_is_refused_by_name():
    with pytest.raises(ContractError, match="_applicable_kv_cache_memory_bytes"):
        StartupPlan().watch(SimpleNamespace(maybe_apply_startup_plan=lambda _: None), log=print, environ={})
