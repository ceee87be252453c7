"""A load that converts, shards, stacks and overwrites is done again out of the file: ``recovery_scenarios``."""

import json
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def seen(engine_python, native_library, tmp_path_factory):
    script = Path(__file__).parent / "recovery_scenarios.py"
    command = [engine_python, script, tmp_path_factory.mktemp("recovery"), native_library]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_loader_backend_leaves_the_same_bytes_through_a_slab_of_any_size(seen):
    assert len(seen["recovered"]) == 10
    assert {name: told["same"] for name, told in seen["recovered"].items()} == dict.fromkeys(seen["recovered"], True)


def test_copies_that_convert_share_or_stride_go_through_the_slab_and_the_others_do_not(seen):
    assert (seen["recorded"]["copies"], seen["recorded"]["plain"]) == (18, 9)
    for name, told in seen["recovered"].items():
        expected = (0, 18) if name.startswith("torch") else (9, 9)
        assert (told["plain_copies"], told["staged_copies"]) == expected
        # Nine copies on their way; the memory of seven others is read back, two of which wrote to one tensor each.
        assert told["verified_extents"] == 16


def test_no_slab_is_larger_than_it_may_be(seen):
    slabs = {name: told["staging_buffer_bytes"] for name, told in seen["recovered"].items()}
    assert all(0 < size <= 4096 for name, size in slabs.items() if name.endswith("small") and "torch" not in name)
    assert slabs["auto large"] > 1 << 16


def test_both_ends_of_what_was_read_are_compared_by_every_backend(seen):
    sampled = {name: told["verified_sample_bytes"] for name, told in seen["recovered"].items()}
    assert all((size > 9 * 16) == name.endswith("small") for name, size in sampled.items())


def test_a_flipped_byte_is_found_whatever_was_done_to_the_tensor(seen):
    for name, told in seen["flipped"].items():
        assert "is not the one that was loaded at capture" in told
        assert name in told
    assert seen["whole after all"]


def test_a_parameter_that_is_not_what_it_was_aborts_the_wake_by_name(seen):
    assert seen["sampled"] == "awake"
    assert "1 parameters and buffers are not what they were before the release: converted:" in seen["other model"]


def test_more_derived_bytes_than_allowed_are_named(seen):
    assert "384 bytes of parameters and buffers are not copied from the checkpoint" in seen["too much derived"]
    assert "the largest: derived (384)" in seen["too much derived"]
