"""A real torch model, loaded from a checkpoint under the observer, sleeps and wakes: ``torch_sleep``."""

import json
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def slept(engine_python, native_library, tmp_path_factory):
    directory = tmp_path_factory.mktemp("torch")

    def sleep(backend, kv_bytes):
        script = Path(__file__).parent / "torch_sleep.py"
        command = [engine_python, script, directory, native_library, backend, str(kv_bytes)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return [sleep("python", 100_000), sleep("auto", 3_000_000)]


def test_the_model_answers_with_the_same_logits(slept):
    for seen in slept:
        assert seen["same_logits"]
        assert seen["same_digests"]
        assert seen["same_places"]
        assert seen["telling_logits"] > 5
        assert seen["woken"]["state"] == "awake"


def test_what_the_checkpoint_holds_is_in_the_pack_and_the_rest_in_the_residual(slept):
    for seen in slept:
        # What the load computed is not the checkpoint's: one vector of 192 for each of three layers.
        assert seen["released"]["kept"] == {"source-not-aliased": 3 * 192 * 2}
        # Equal extents are stored once each, so that the pack has every parameter, and zeros up to pages.
        assert seen["woken"]["bytes"]["pack"] == seen["parameter_bytes"]
        assert 0 < seen["woken"]["bytes"]["residual"] < seen["parameter_bytes"] / 50


def test_its_memory_is_given_away_meanwhile(slept):
    for seen in slept:
        assert not seen["asleep_holds_bytes"]
        assert seen["asleep_mapped"] == {"weights": 0, "kv_cache": 0}


def test_another_process_with_another_kv_cache_adds_no_pack_bytes(slept):
    first, second = (seen["released"]["pack"] for seen in slept)

    assert first["sha256"] == second["sha256"]
    assert (first["new_bytes"], second["new_bytes"]) == (first["bytes"], 0)
