"""The reference engine: real processes, one answer, and a door that can be closed."""

import http.client
import json
import threading
import time

import pytest

from coldsnap.engines.acceptance import Question, compare
from coldsnap.engines.base import Engine
from coldsnap.engines.endpoint import await_ready, stream
from coldsnap.errors import EngineError
from coldsnap.keeper.directive import Endpoint, read_acks
from coldsnap.testing.reference import ReferenceEngine

QUESTION = Question(prompt="Reply with exactly: coldsnap", max_tokens=16)

pytestmark = pytest.mark.vllm


def sample(running, tokens=8):
    body = {"model": "reference", "prompt": "hello", "max_tokens": tokens, "temperature": 1.0}
    connection = http.client.HTTPConnection("127.0.0.1", running.endpoint.port, timeout=10)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Connection": "close"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer["choices"][0]["token_ids"]


def until(condition, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.005)


class Stream(threading.Thread):
    """A completion that takes its time; ``begun`` once its first token is there."""

    def __init__(self, running, tokens=20, delay_s=0.02):
        super().__init__()
        self.body = {
            "model": "reference",
            "prompt": "hello",
            "max_tokens": tokens,
            "temperature": 0,
            "delay_s": delay_s,
            "stream": True,
        }
        self.running, self.begun, self.tokens = running, threading.Event(), []
        self.start()

    def run(self):
        for _, event in stream(self.running.endpoint, "/v1/completions", self.body, timeout_s=30):
            self.tokens += event["choices"][0]["token_ids"]
            self.begun.set()


def test_it_is_an_engine(engine_python):
    assert isinstance(ReferenceEngine(python=engine_python), Engine)
    assert ReferenceEngine(python=engine_python).refusals(gpu=True)


def test_its_interpreter_is_admitted_like_every_engines(engine_python):
    spec = ReferenceEngine(python=engine_python)
    environ = {"PATH": "/usr/bin:/bin"}
    assert spec.inspect(environ).versions["torch"]
    assert spec.identify(environ) != ReferenceEngine(python=engine_python, weights_seed=1).identify(environ)


def test_it_answers_the_same_every_time_and_by_its_weights(running, launch):
    assert running.ranks.require(running.spec.roles())
    answer = running.spec.ask(running.endpoint, QUESTION, timeout_s=10)
    assert len(set(answer.token_ids)) > 4
    running.ranks.reset_prefix_cache()
    compare(answer, running.spec.ask(running.endpoint, QUESTION, timeout_s=10))
    other = launch(weights_seed=1)
    assert other.spec.ask(other.endpoint, QUESTION, timeout_s=10) != answer


def test_a_quiesce_waits_for_the_stream_and_holds_what_comes_later(running):
    answer = running.spec.ask(running.endpoint, QUESTION, timeout_s=10)
    first = Stream(running)
    assert first.begun.wait(10)
    running.ranks.quiesce(timeout_s=30)
    assert {"unfinished": 0, "held": 0, "quiesced": True}.items() <= running.ranks.status().items()
    first.join(10)
    assert len(first.tokens) == 20
    late = Stream(running, delay_s=0)
    until(lambda: running.ranks.status()["held"])
    assert not late.begun.is_set()
    running.ranks.resume()
    late.join(10)
    assert late.tokens == first.tokens
    compare(answer, running.spec.ask(running.endpoint, QUESTION, timeout_s=10))


def test_only_the_request_with_the_key_passes_an_admitted_engine(running):
    answer = running.spec.ask(running.endpoint, QUESTION, timeout_s=10)
    running.ranks.quiesce(timeout_s=30)
    running.ranks.admit("k" * 32)
    stranger = Stream(running, delay_s=0)
    until(lambda: running.ranks.status()["held"])
    compare(answer, running.spec.ask(running.endpoint, QUESTION, timeout_s=10, request_id="k" * 32))
    assert not stranger.begun.is_set()
    running.ranks.resume()
    stranger.join(10)
    assert len(stranger.tokens) == 20


def test_a_quiesce_that_takes_too_long_leaves_the_engine_serving(running):
    first = Stream(running, tokens=50)
    assert first.begun.wait(10)
    with pytest.raises(EngineError, match="still ran after 0.05 s; the engine serves on"):
        running.ranks.quiesce(timeout_s=0.05)
    with pytest.raises(EngineError, match="prefix cache is in use"):
        running.ranks.reset_prefix_cache()
    first.join(30)
    assert len(first.tokens) == 50 and not running.ranks.status()["quiesced"]


def test_a_resume_overtakes_a_quiesce(running):
    first = Stream(running, tokens=100)
    assert first.begun.wait(10)
    failures = []

    def quiesce():
        try:
            running.ranks.quiesce(timeout_s=30)
        except EngineError as error:
            failures.append(str(error))

    thread = threading.Thread(target=quiesce)
    thread.start()
    until(lambda: not running.ranks.status()["open"])
    running.ranks.resume()
    thread.join(30)
    first.join(30)
    assert "resumed while it was being quiesced" in failures[0]


def test_sampling_follows_the_seed_of_the_directive(running):
    first, second = running.direct(), running.direct()
    drawn = []
    for directive in (first, second, first):
        running.direct(directive=directive)
        running.ranks.adopt(incarnation=directive.incarnation)
        drawn.append(sample(running))
    assert drawn[0] == drawn[2] != drawn[1]
    acks = {ack.role: ack.reseeded for ack in read_acks(running.keeper.rank_dir)}
    assert "random" in acks["api"] and "torch" in acks["worker"]


def test_an_adoption_without_reseeding_goes_on_with_the_users_sequence(running):
    first = running.direct()
    running.ranks.adopt(incarnation=first.incarnation)
    expected = [sample(running), sample(running)]
    running.direct(directive=first)
    running.ranks.adopt(incarnation=first.incarnation)
    drawn = [sample(running)]
    running.ranks.adopt(incarnation=running.direct().incarnation, reseed=False)
    assert [*drawn, sample(running)] == expected


def test_a_seed_of_the_user_is_seen_and_used(engine_python):
    spec = ReferenceEngine(python=engine_python, seed=7)
    command = spec.launch_command(Endpoint(host="127.0.0.1", port=1), environ={})
    assert spec.user_seeded and command.argv[-2:] == ("--seed", "7")


def test_an_engine_that_dies_while_starting_is_told_with_its_log(launch):
    running = launch(wait=False, args=("--exit-after-s", "0.1"))
    with pytest.raises(EngineError, match="exit status 3"):
        await_ready(running.endpoint, timeout_s=60, ended=running.ended, log=running.keeper.log_path)


def test_a_wrong_argument_is_told_by_the_log(launch):
    running = launch(wait=False, args=("--fly",))
    with pytest.raises(EngineError, match="unrecognized arguments: --fly"):
        await_ready(running.endpoint, timeout_s=60, ended=running.ended, log=running.keeper.log_path)
