"""What people read: whole plans, as they are printed."""

from pathlib import Path

import pytest
from golden_plans import texts

GOLDEN = Path(__file__).parent / "golden"
TEXTS = texts()


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_a_plan_reads_as_it_always_did(name):
    assert TEXTS[name] + "\n" == (GOLDEN / f"{name}.txt").read_text(), (
        "the text has changed; if that is meant, run python tests/plan/golden_plans.py and read the difference"
    )


def test_no_golden_text_is_left_over():
    assert {path.stem for path in GOLDEN.iterdir()} == set(TEXTS)


def test_a_plan_without_gpu_has_no_cuda_step_and_says_why():
    assert "lock-cuda" not in TEXTS["capture"]
    assert "cuda steps: left out: no GPU on local: no NVIDIA driver is loaded" in TEXTS["capture"]
    assert "lock-cuda" in TEXTS["capture-gpu"]
    assert "unlock-cuda" in TEXTS["restore-gpu"]
