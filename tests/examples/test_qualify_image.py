"""The qualification of process images, on the reference engine: each way restores, and the table has all of them."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.criu


def test_every_way_is_measured_and_one_is_chosen(tmp_path, example, described, criu, free_port, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")  # what the example shares lies beside it
    module = example("qualify_image")
    given = ["--criu", criu, "--port", str(free_port), "--repeats", "1", "--workers", "1"]

    result = module.measure(described(), tmp_path, module.arguments(given))

    assert [each["way"] for each in result["captures"]] == ["raw", "zero-free", "lz4"]
    raw, _, lz4 = result["captures"]
    assert lz4["stored_bytes"] < raw["stored_bytes"] == raw["raw_bytes"]
    ways = {(row["way"], row["cache"]) for row in result["restores"]}
    assert len(ways) == len(result["restores"]) == 8
    assert all(0 < row["image_s"][0] < row["answer_s"][0] for row in result["restores"])
    assert len(result["table"]) == 2 + 4
    assert result["chosen"] in ("none", "lz4")
