"""The digests of a model's parameters and buffers: ``digest_scenarios``, in torch."""

import json
import subprocess
from pathlib import Path

import pytest

from coldsnap.engines.rank import MESSAGE_BYTES


@pytest.fixture(scope="module")
def told(engine_python):
    script = Path(__file__).parent / "digest_scenarios.py"
    done = subprocess.run([engine_python, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_parameter_and_buffer_has_a_digest_under_each_of_its_names(told):
    assert set(told["small"]["found"]) == {"weight", "tied", "scale"}
    assert told["small"]["found"]["weight"] == told["small"]["found"]["tied"] == told["expected"]


def test_a_digest_is_of_type_shape_and_elements_and_not_of_strides(told):
    assert told["transposed"] == told["plain"]
    assert len({told[name] for name in ("plain", "flipped", "reshaped", "retyped", "empty")}) == 5


def test_a_tensor_without_memory_is_told_instead_of_hashed(told):
    assert told["meta"] == "no plain memory"


def test_an_answer_of_many_tensors_comes_in_pages_that_fit_into_a_reply(told):
    many = told["many"]
    assert len(many["found"]) == many["tensors"] == 2003
    assert len(many["pages"]) > 3
    assert max(many["pages"]) < MESSAGE_BYTES - 4096


def test_a_rank_that_has_no_model_yet_skips_it(told):
    assert told["before"] == {"skipped": True}


def test_bytes_of_a_device_come_in_pieces_through_pages_that_are_given_back(told):
    assert told["staged"] == ["00010203", "04050607", "0809"]
    assert told["staged_nothing"] == []
