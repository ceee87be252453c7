"""The hooks on vLLM's default loader, on a stand-in of its outline; ``test_vllm_live`` has them in vLLM itself."""

import pytest

from coldsnap.engines.settings import check_user_environment
from coldsnap.engines.vllm import loading
from coldsnap.errors import AdmissionError


@pytest.mark.parametrize("iterator", loading.ITERATORS)
def test_a_load_through_each_iterator_is_observed(seen, iterator):
    found = seen["hooks_on_the_default_loader"][iterator]
    assert (found["copies"], found["unsupported"], found["loader"]) == (17, {}, "DefaultModelLoader")
    assert found["names"] == 11 and found["bytes"] == 39_432


def test_what_comes_from_no_safetensors_file_is_unsupported(seen):
    found = seen["hooks_on_the_default_loader"]["of another kind"]
    assert (found["copies"], found["bytes"]) == (0, 0)
    assert found["unsupported"] == {"source-not-aliased": 11}


def test_a_process_that_loaded_nothing_says_that_it_skipped_the_question(seen):
    assert seen["hooks_on_the_default_loader"]["before"] == {"skipped": True}
    assert seen["hooks_on_the_default_loader"]["gone"] == {"skipped": True}  # a model that is gone takes its record


def test_what_was_loaded_is_told_without_reading_memory_that_may_be_asleep(seen):
    hooks = seen["hooks_on_the_default_loader"]
    assert hooks["asleep"]["bytes"] == 39_432 and hooks["asleep"]["unsupported"] == {}
    assert list(hooks["changed"]) == ["changed-after-load"]


def test_of_a_load_that_was_not_observed_nothing_is_known(seen):
    found = seen["loads_that_are_not_observed"]
    assert found["kept"] == {"not-observed": found["bytes"]}


def test_each_model_of_a_process_has_its_own_record(seen):
    assert seen["loads_that_are_not_observed"]["two"] == 34
    assert seen["loads_that_are_not_observed"]["loaders_are_back"]


def test_what_stands_in_the_way_ends_the_load_and_is_named(seen):
    errors = seen["what_stands_in_the_way_of_the_hooks"]
    assert "lacks what the load observer hooks" in errors["lacks"] and "DefaultModelLoader" in errors["lacks"]
    assert "safetensors.4" in errors["twice"] and "safetensors.3" in errors["cut"]
    assert "FileNotFoundError" in errors["absent"] and "AttributeError" in errors["sealed"]
    unobservable = [errors[name] for name in ("twice", "cut", "absent", "sealed")]
    assert all("the load cannot be observed" in text and "weights.mode = 'image'" in text for text in unobservable)


def test_after_a_load_that_failed_the_next_one_is_observed(seen):
    assert seen["what_stands_in_the_way_of_the_hooks"]["afterwards"] == ""


@pytest.mark.parametrize(
    ("name", "value"), [("COLDSNAP_EXPORT_MODEL_PAYLOAD", "1"), ("COLDSNAP_RECOVERY_WEIGHT_SOURCE", "safetensors")]
)
def test_the_observer_is_asked_for_where_weights_may_leave_the_image(monkeypatch, name, value):
    for other in ("COLDSNAP_EXPORT_MODEL_PAYLOAD", "COLDSNAP_RECOVERY_WEIGHT_SOURCE"):
        monkeypatch.delenv(other, raising=False)
    assert not loading.is_asked_for()
    monkeypatch.setenv(name, value)
    assert loading.is_asked_for()


def test_a_user_asks_for_packs_in_the_policy_alone():
    with pytest.raises(AdmissionError, match="set the policy's weights.mode instead"):
        check_user_environment({"COLDSNAP_EXPORT_MODEL_PAYLOAD": "1"}, "vllm")
