"""The multimodal warm-up waits until the engine is open, and a real request never waits for one that has not begun."""

import json
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from coldsnap.engines.vllm.mm_warmup import DeferredWarmup

DEADLINE_S = 20.0


class Cache:
    def __init__(self):
        self.cleared = 0

    def clear_cache(self):
        self.cleared += 1


def module():
    """A module with a renderer of either shape; what it does stands in ``done``."""

    class BaseRenderer:
        def __init__(self):
            self._mm_executor = ThreadPoolExecutor(1)
            self.cache, self.done = Cache(), []
            self.begun, self.go_on = threading.Event(), threading.Event()

        def _warmup_mm_processor(self, processor, cache=None, *, log_prefix):
            self.begun.set()
            assert self.go_on.wait(DEADLINE_S)
            self.done.append((log_prefix, processor, cache))
            if processor == "broken":
                raise ValueError("no image")

        def _process_multimodal(self, prompt):
            self.done.append(prompt)

    return SimpleNamespace(BaseRenderer=BaseRenderer)


class World:
    """A renderer whose warm-ups are put off."""

    def __init__(self, grace_s=0.0):
        made, self.log = module(), []
        self.warmup = DeferredWarmup(log=self.log.append, grace_s=grace_s)
        self.warmup.watch(made)
        self.renderer = made.BaseRenderer()

    def wanted(self, processor="images"):
        self.renderer._warmup_mm_processor(processor, self.renderer.cache, log_prefix="Multi-modal")

    def request(self, prompt="a real image"):
        """Submit what vLLM submits for a real request."""
        return self.renderer._mm_executor.submit(self.renderer._process_multimodal, prompt)

    def settled(self):
        self.renderer._mm_executor.submit(lambda: None).result(DEADLINE_S)

    def wait_for_timer(self):
        self.warmup._timer.join(DEADLINE_S)
        self.settled()


@pytest.fixture
def make():
    made = []

    def world(**options):
        made.append(World(**options))
        return made[-1]

    yield world
    for one in made:
        one.renderer.go_on.set()
        if one.warmup._timer is not None:
            one.warmup._timer.cancel()
            one.warmup._timer.join(DEADLINE_S)
        one.renderer._mm_executor.shutdown()


def test_nothing_is_warmed_before_the_engine_is_open(make):
    world = make()
    world.wanted()
    world.settled()
    assert (world.warmup.state, world.renderer.done) == ("deferred", [])


def test_it_is_warmed_once_after_the_engine_has_been_open_for_a_moment_and_its_cache_is_empty(make):
    world = make()
    world.renderer.go_on.set()
    world.wanted()
    world.warmup.ready()
    world.warmup.ready()
    world.wait_for_timer()
    assert world.renderer.done == [("Multi-modal", "images", world.renderer.cache)]
    assert (world.warmup.state, world.renderer.cache.cleared) == ("done", 1)
    assert world.log == [
        "the multimodal warm-up waits until the engine has answered",
        "the multimodal warm-up is done",
    ]


@pytest.mark.parametrize("opened", [True, False])
def test_the_first_real_request_cancels_it(make, opened):
    world = make(grace_s=3600)
    world.wanted()
    if opened:
        world.warmup.ready()
    world.request().result(DEADLINE_S)
    world.warmup.ready()
    world.settled()
    assert (world.warmup.state, world.renderer.done) == ("cancelled", ["a real image"])
    assert world.log[-1] == "the multimodal warm-up is cancelled: a request has come first"
    if opened:
        world.warmup._timer.join(DEADLINE_S)
        assert not world.warmup._timer.is_alive()


def test_a_request_in_the_queue_before_it_cancels_it_though_its_time_has_come(make):
    world = make()
    world.renderer.go_on.set()
    world.wanted()
    held = threading.Event()
    world.renderer._mm_executor.submit(held.wait, DEADLINE_S)
    asked = world.request()
    world.warmup.ready()
    world.warmup._timer.join(DEADLINE_S)
    held.set()
    asked.result(DEADLINE_S)
    world.settled()
    assert (world.warmup.state, world.renderer.done) == ("cancelled", ["a real image"])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_request_behind_one_that_has_begun_waits_its_turn(make, threads):
    world = make()
    world.renderer._mm_executor = ThreadPoolExecutor(threads)
    world.wanted()
    world.warmup.ready()
    assert world.renderer.begun.wait(DEADLINE_S)
    asked = world.request()
    assert world.renderer.done == []
    world.renderer.go_on.set()
    asked.result(DEADLINE_S)
    assert world.renderer.done == [("Multi-modal", "images", world.renderer.cache), "a real image"]
    assert world.warmup.state == "done"


def test_one_that_fails_is_told_and_requests_go_on(make):
    world = make()
    world.renderer.go_on.set()
    world.wanted("broken")
    world.warmup.ready()
    world.wait_for_timer()
    world.request().result(DEADLINE_S)
    assert world.renderer.done[-1] == "a real image"
    assert (world.warmup.state, world.renderer.cache.cleared) == ("failed", 1)
    assert world.log[-1] == "the multimodal warm-up failed: ValueError: no image"


def test_an_engine_that_ends_first_leaves_it_out(make):
    world = make()
    world.wanted()
    world.renderer._mm_executor.shutdown()
    world.warmup.ready()
    world.warmup._timer.join(DEADLINE_S)
    assert world.warmup.state == "cancelled"
    assert "is left out" in world.log[-1]


def test_the_cache_of_a_processor_is_emptied_where_none_is_given(make):
    world = make()
    world.renderer.go_on.set()
    processor = SimpleNamespace(cache=Cache())
    world.renderer._warmup_mm_processor(processor, log_prefix="Multi-modal")
    world.warmup.ready()
    world.wait_for_timer()
    assert (world.warmup.state, processor.cache.cleared) == ("done", 1)


def test_a_text_model_has_nothing_to_put_off(make):
    world = make()
    world.warmup.ready()
    assert (world.warmup.state, world.warmup._timer, world.log) == ("none", None, [])


@pytest.mark.vllm
def test_the_warm_up_of_the_installed_vllm_is_put_off_and_done_by_its_own_executor(engine_python):
    scenario = Path(__file__).with_name("mm_warmup_scenario.py")
    done = subprocess.run([engine_python, scenario], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["put off"] == ["deferred", 0]
    assert seen["open"] == ["done", 1, "dummies of image"]
    assert seen["asked first"] == ["cancelled", 0, "a real one"]
