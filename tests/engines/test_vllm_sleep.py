"""Sleep and wake-up through vLLM's own backend interface: real tables and files, a device played by host mappings."""

import json
import subprocess
from pathlib import Path

import pytest

from coldsnap.engines.vllm import kv_guard

pytestmark = [pytest.mark.vllm]


@pytest.fixture(scope="module")
def seen(engine_python, tmp_path_factory):
    """What the scenarios saw, in the engine's interpreter."""
    scenarios = Path(__file__).with_name("sleep_scenarios.py")
    command = [engine_python, scenarios, tmp_path_factory.mktemp("sleep")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_sleep_of_level_one_puts_weights_into_files_and_frees_their_memory(seen):
    told = seen["sleeps_to_files_and_wakes"]
    assert told["class"] == "DiskSleepBackend" and told["own"]
    assert told["freed_mib"] >= 16
    assert told["asleep"] == ["kv_cache", "weights", "weights"] and told["state"] == ["SUSPENDED", "sleeping"]
    assert told["packs"] == [6 << 20] and "worker-0/native-manifest.json" in told["files"]


def test_a_wake_up_brings_every_byte_back_and_a_zeroed_kv_cache(seen):
    told = seen["sleeps_to_files_and_wakes"]
    assert told["equal"] and told["kv_zero"] and told["awake"] == ["RUNNING", "awake"]


def test_what_is_no_kv_cache_in_the_kv_allocations_survives(seen):
    told = seen["sleeps_to_files_and_wakes"]
    assert told["beside"] and told["tables"] == 9 and told["caches"] == 7


def test_the_log_says_which_worker_can_be_released(seen):
    assert seen["sleeps_to_files_and_wakes"]["log"] == ["worker 0 has releasable memory on cuda:1"]


def test_weights_and_kv_cache_wake_one_after_the_other(seen):
    told = seen["wakes_by_tags"]
    assert told["first"] == ["SUSPENDED", ["kv_cache"], True]
    assert told["then"] == ["RUNNING", []] and told["kv_zero"]


def test_a_second_sleep_finds_the_pack_of_the_first(seen):
    assert seen["sleeps_again_with_the_same_pack"] == {"packs": 1, "equal": True}


def test_without_a_model_payload_the_residual_holds_everything(seen):
    told = seen["without_a_pack_the_residual_holds_everything"]
    assert told == {"blob_mib": 10, "packs": 0, "equal": True}


def test_a_wake_up_that_ran_out_of_memory_is_finished_by_the_next_without_mapping_twice(seen):
    told = seen["out_of_memory_in_a_wake_up"]
    assert "out of memory" in told["told"]
    assert told["failed"] == ["RESUMING", "failed", ["kv_cache", "weights"]]
    assert told["awake"] == ["RUNNING", "awake", []]
    assert told["equal"] and told["backed"]
    assert told["maps"] == [1, 1, 3]  # two attempts that failed, and none for what was mapped


def test_without_a_directory_a_sleep_is_refused_and_nothing_is_given_away(seen):
    told = seen["without_a_directory_nothing_is_given_away"]
    assert "COLDSNAP_DISK_SLEEP_DIR" in told["told"]
    assert told["asleep"] == [] and told["state"] == "RUNNING" and told["equal"]


def test_level_two_is_vllms_own_and_a_release_of_what_it_put_to_sleep_is_refused(seen):
    told = seen["level_two_is_vllms_own"]
    assert told["slept"] == [4, "awake"] and told["awake"] == [] and told["files"] == 0
    assert told["refused"] == "Busy: the weights of this worker sleep; wake the engine first"
    assert told["looked"] == [told["refused"], None]


def test_a_rank_releases_and_hydrates_on_its_own_thread(seen):
    told = seen["the_rank_releases_on_a_thread_of_its_own"]
    assert told["asleep"] == ["kv_cache", "weights", "weights"] and told["pack"]
    assert told["kept"] == {} and told["worker"] == "worker-0" and told["released"] == {"weights": 10, "kv_cache": 8}
    assert told["state"] == "awake" and told["bytes"] == {"pack": 6, "residual": 4, "kv_cache": 8}
    assert told["equal"] and told["beside"]


def test_both_ends_of_every_parameter_and_buffer_are_compared_after_a_recovery(seen):
    told = seen["both_ends_of_each_tensor_are_compared_after_a_recovery"]
    assert told["compared"] == ["first.scale", "first.weight", "second.scale", "second.weight"]
    assert told["told"][0] is None
    assert told["told"][1].startswith("IntegrityError")
    assert "1 parameters and buffers are not what they were before the release: second.scale" in told["told"][1]
    assert told["failed"] == "failed" and told["equal"]


def test_the_kv_cache_that_vllm_chose_is_capped_and_one_that_the_user_chose_is_not(seen):
    told = seen["the_guard_caps_what_vllm_chose"]
    assert told["mib"] == [65, 80, 80] and "more than the device has left" in told["log"]


def test_a_process_without_a_worker_skips_and_one_that_loads_says_so(seen):
    told = seen["a_process_without_a_worker_skips"]
    assert told["replies"] == [{"skipped": True}] * 3
    assert told["loading"] == "Busy: the worker is still loading its model"


def test_a_worker_on_a_processor_is_left_alone(seen):
    assert seen["a_worker_without_vllms_allocator_is_left_alone"] == {"memory": True, "global": True}


@pytest.mark.parametrize(
    ("override", "asked", "on"),
    [("", "", False), ("1", "", True), ("1", "0", False), ("", "1", True), ("0", "", False)],
)
def test_the_guard_follows_the_override_unless_it_is_asked_for_by_name(override, asked, on):
    environ = {"COLDSNAP_VLLM_OVERRIDE_CUMEM": override, "COLDSNAP_KV_CAPACITY_GUARD": asked}
    assert kv_guard.is_on(environ) is on


def test_what_a_worker_does_not_say_that_it_holds_is_measured():
    class Worker:
        requested_memory, peak_activation_memory = 100, 5
        init_snapshot = type("Snapshot", (), {"free_memory": 120})

    assert kv_guard.largest_bytes(Worker(), lambda: 90) == 65
