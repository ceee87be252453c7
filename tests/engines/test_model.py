"""The identity of a model is its contents."""

import json
import sys
from pathlib import Path

import pytest

from coldsnap.engines.model import identify_directory, identify_hub
from coldsnap.engines.vllm import VLLM
from coldsnap.errors import AdmissionError, UnsupportedError

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from make_tiny_model import make_tiny_model  # noqa: E402

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def model(tmp_path):
    return make_tiny_model(tmp_path / "tiny", layers=1, hidden=128)


def test_the_same_model_made_twice_is_the_same_model(model, tmp_path):
    again = make_tiny_model(tmp_path / "again", layers=1, hidden=128)
    first, second = identify_directory(model), identify_directory(again)
    assert first.revision == second.revision and first.differences(second) == ()
    assert first.architecture == "Qwen3ForCausalLM"


def test_a_flipped_bit_in_the_weights_is_another_model(model):
    before = identify_directory(model)
    shard = model / "model-00001-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert before.differences(identify_directory(model)) == (
        f"model file {shard.name}: other contents than at capture",
    )


def test_the_tokenizer_and_the_configuration_count_and_the_readme_does_not(model):
    before = identify_directory(model)
    (model / "README.md").write_text("hello")
    assert identify_directory(model) == before
    (model / "tokenizer_config.json").unlink()
    (model / "chat_template.jinja").write_text("{{ x }}")
    assert before.differences(identify_directory(model)) == (
        "model file chat_template.jinja: not there at capture",
        "model file tokenizer_config.json: missing",
    )


def test_weights_have_the_digest_of_their_header_too(model):
    files = {file.name: file for file in identify_directory(model).files}
    assert files["model-00001-of-00002.safetensors"].header.startswith("sha256:")
    assert files["config.json"].header == ""


def test_a_missing_directory_and_a_missing_configuration_are_told_apart(tmp_path):
    with pytest.raises(AdmissionError, match="does not exist; for a model of the hub, give revision="):
        VLLM(tmp_path / "nowhere").identify({})
    with pytest.raises(AdmissionError, match=r"config\.json does not exist"):
        VLLM(tmp_path).identify({})
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(AdmissionError, match="holds list"):
        VLLM(tmp_path).identify({})
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(AdmissionError, match="has no weights"):
        VLLM(tmp_path).identify({})


def test_what_is_no_safetensors_file_is_refused(model):
    (model / "model-00001-of-00002.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(AdmissionError, match="not a safetensors file"):
        identify_directory(model)


@pytest.mark.parametrize(("key", "why"), [("quantization_config", "quantised"), ("vision_config", "multimodal")])
def test_kinds_of_models_that_are_not_qualified_are_refused_by_name(model, key, why):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, key: {"a": 1}}))
    with pytest.raises(UnsupportedError, match=why) as caught:
        VLLM(model).identify({})
    assert key in caught.value.field


def test_a_model_of_the_hub_is_known_by_its_revision(tmp_path, model):
    snapshot = tmp_path / "hub" / "models--Qwen--Qwen3-8B" / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_bytes((model / "config.json").read_bytes())
    engine = VLLM("Qwen/Qwen3-8B", revision=REVISION)
    for environ in ({"HF_HUB_CACHE": str(tmp_path / "hub")}, {"HF_HOME": str(tmp_path)}):
        identity = engine.identify(environ)
        assert (identity.kind, identity.revision, identity.files) == ("hub", REVISION, ())
    assert identify_directory(model).differences(identity) == (
        f"model: captured local {model}, found hub Qwen/Qwen3-8B",
    )


def test_a_revision_that_was_not_fetched_is_refused_with_the_way_to_fetch_it(tmp_path):
    with pytest.raises(AdmissionError, match="snapshot_download"):
        identify_hub("Qwen/Qwen3-8B", REVISION, tmp_path)
