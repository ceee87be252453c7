"""Where SGLang's weights go: out of the image wherever its memory saver is, with one rank and with several."""

import pytest

from coldsnap.engines.sglang import SGLang
from coldsnap.engines.vllm import VLLM
from coldsnap.errors import UnsupportedError
from coldsnap.planning.weights import at_capture
from coldsnap.policy import Policy

SAVER = "--enable-memory-saver"


def placed(engine, *, gpu=False, **policy):
    return at_capture(Policy().evolve(**policy), engine, gpu=gpu)


@pytest.mark.parametrize(
    ("engine", "gpu", "native"),
    [
        (SGLang("/models/tiny"), False, False),
        (SGLang("/models/tiny", args=(SAVER,)), False, True),
        (SGLang("/models/tiny"), True, True),
        (SGLang("/models/tiny", args=(SAVER, "--tp", "2")), False, True),
        (SGLang("/models/tiny", args=("--tp", "2")), True, True),
        (VLLM("/models/tiny", args=("-tp", "2")), True, False),
    ],
    ids=["processor", "processor-saver", "gpu", "processor-two", "gpu-two", "vllm-two"],
)
def test_weights_leave_where_there_is_a_provider_and_every_worker_says_which_it_is(engine, gpu, native):
    assert placed(engine, gpu=gpu).native is native


def test_weights_that_must_leave_a_server_without_the_saver_are_refused():
    with pytest.raises(UnsupportedError, match="sglang /models/tiny without a GPU has no memory"):
        placed(SGLang("/models/tiny"), **{"weights.mode": "native"})


def test_weights_stay_where_the_policy_says_so():
    assert not placed(SGLang("/models/tiny"), gpu=True, **{"weights.mode": "image"}).native
