"""What an engine starts with is everything but tensors."""

import json
import os

import pytest

from coldsnap.engines.start_files import MAX_FILE_BYTES, start_files
from coldsnap.errors import AdmissionError
from coldsnap.testing.checkpoint import write_checkpoint


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"]}))
    (tmp_path / "tokenizer.model").write_bytes(b"\0\1")
    (tmp_path / "modeling_x.py").write_text("x = 1\n")
    (tmp_path / "README.md").write_text("not needed\n")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\0" * 100)
    write_checkpoint(tmp_path / "model.safetensors")
    return tmp_path


def test_every_file_that_decides_tokens_is_there_and_no_tensor(model):
    files = start_files(model)

    assert sorted(files) == ["config.json", "model.safetensors", "modeling_x.py", "tokenizer.model"]
    data = (model / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert files["model.safetensors"] == data[: 8 + length]
    assert "embedding" in json.loads(files["model.safetensors"][8:])


def test_links_are_followed(model, tmp_path):
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(model / name)

    assert start_files(snapshot)["config.json"] == (model / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda model: (model / "config.json").unlink(), "config.json does not exist"),
        (lambda model: (model / "model.safetensors").write_bytes(b"\1"), "is not a safetensors file"),
        (lambda model: (model / "model.safetensors").write_bytes(b"\xff" * 64), "is not a safetensors file"),
        (lambda model: os.truncate(model / "tokenizer.model", MAX_FILE_BYTES + 1), "expected at most"),
        (lambda model: (model / "absent.json").symlink_to(model / "nowhere"), "cannot be read"),
    ],
    ids=["no configuration", "cut", "nonsense", "too large", "dangling"],
)
def test_a_model_that_cannot_be_started_with_is_refused(model, harm, told):
    harm(model)
    with pytest.raises(AdmissionError, match=told):
        start_files(model)
