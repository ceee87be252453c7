"""The qualification of templates, on the reference engine: every part has a figure, and the table has all of them."""

import pytest

pytestmark = pytest.mark.criu

LOG = """
[coldsnap] api 601: listening, incarnation 00ff, 12.5 s after its process began
(EngineCore) INFO Loading weights took 1.25 seconds
(EngineCore) INFO Model loading took 1.1 GiB memory and 2.500000 seconds
(EngineCore) INFO Graph capturing finished in 5 secs, took 0.30 GiB
(EngineCore) INFO init engine (profile, create kv cache, warmup model) took 7.75 s
[coldsnap] engine 640: listening, incarnation 00ff, 0.3 s after its process began
"""


def test_a_template_is_captured_restored_and_measured(tmp_path, example, described, criu, free_port):
    module = example("qualify_template")
    given = ["--criu", criu, "--port", str(free_port), "--restores", "1", "--launches", "1"]

    result = module.Measurement(described(), tmp_path, module.arguments(given)).run()

    (restored,) = result["scopes"]["portable"]["restores"]
    assert 0 < restored["steps"]["ready"] < restored["answer_s"]
    assert set(restored["imports"]) == {"api", "worker"}
    assert result["scopes"]["portable"]["proof"] == "no device, no library of a driver"
    text = module.table(result)
    assert "portable, first answer" in text
    assert "launch, ready" in text


def test_what_an_engine_says_of_its_start_is_told_apart(example):
    assert example("qualify_template").parts_of(LOG) == {
        "weights_s": 1.25,
        "model_s": 2.5,
        "kv_and_warmup_s": 7.75,
        "graphs_s": 5.0,
        "imports": {"api": 12.5, "engine": 0.3},
    }
