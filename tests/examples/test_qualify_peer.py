"""The comparison with vLLM's own snapshot: our half of it for real, and what it says when the other half cannot run."""

import sys
from pathlib import Path

import pytest

import coldsnap as cs

pytestmark = pytest.mark.criu


@pytest.fixture
def peer(example, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")  # what the example shares lies beside it
    return example("qualify_peer")


def test_our_half_restores_asks_and_counts_the_processors(peer, artifact, described, criu, free_port):
    options = peer.arguments(["--criu", criu, "--port", str(free_port)])

    took, answer = peer.ours(cs.Artifact.open(artifact), described(), options)

    assert answer
    assert took["first_token_s"] > 0
    assert took["processor_s"] > 0


def test_an_interpreter_without_vllm_is_told_by_its_own_words(peer, criu, tmp_path):
    options = peer.arguments(["--criu", criu, "--python", sys.executable])
    engine = cs.VLLM(str(tmp_path), python=sys.executable)

    with (
        pytest.raises(peer.PeerError, match=r"could not create: its process has ended[\s\S]*No module named 'vllm'"),
        peer.Peer(tmp_path / "peer", engine, options) as rival,
    ):
        rival.do("create", timeout_s=60)


def test_the_table_sets_medians_against_each_other(peer):
    row = {"first_token_s": [1.0, 3.0, 2.0], "processor_s": [1.0, 1.0, 1.0]}
    medians = {"first_token_s": 2.0, "processor_s": 1.0}

    told = peer.table(
        {
            "machine": "a machine",
            "load": [0.5, 1.0],
            "restores": {peer.OURS: row, peer.PEER: row},
            "medians": {peer.OURS: medians, peer.PEER: medians},
            "ratio": 1.0,
            "processor_ratio": 1.0,
            "bytes": {peer.OURS: 1e6, peer.PEER: 2e6},
            "failed": ["once"],
            "exact": True,
        }
    )

    assert "| coldsnap | 2.00 | 1.00 3.00 2.00 | 1.00 | 1.0 |" in told
    assert "| coldsnap of vllm snapshot | 1.00 |" in told
    assert told.endswith("restores of vllm snapshot that failed: 1\n\ntokens identical")
