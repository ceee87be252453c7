"""What the multimodal warm-up of the installed vLLM does, with a processor that only counts; one line of JSON."""

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from vllm.renderers import base

from coldsnap.engines.vllm.mm_warmup import DeferredWarmup


class Processor:
    """What vLLM's warm-up asks of a processor."""

    def __init__(self):
        self.info = SimpleNamespace(allowed_mm_limits={"image": 2})
        self.cache, self.dummies, self.last = None, 0, ""

    def get_dummy_mm_inputs(self, counts, **_):
        assert counts == {"image": 1}
        self.dummies += 1
        self.last = "dummies of image"


class Renderer(base.BaseRenderer):
    """vLLM's own, without a model."""

    def __init__(self):
        self._mm_warmup_future, self._mm_warmup_done = None, False
        self._mm_executor = ThreadPoolExecutor(1)
        self.config = SimpleNamespace(scheduler_config=None)
        self.mm_processor, self._mm_processor_only_cache = Processor(), None

    def get_mm_processor(self):
        self.mm_processor.last = "a real one"
        raise ValueError("far enough")  # the first thing that vLLM does for a request


Renderer.__abstractmethods__ = frozenset()


def world(warmup):
    renderer = Renderer()
    renderer.start_mm_warmup_in_background()
    renderer._join_mm_warmup()
    return renderer, warmup


def seen(renderer, warmup):
    renderer._mm_executor.submit(lambda: None).result(60)
    renderer._mm_executor.shutdown()
    return [warmup.state, renderer.mm_processor.dummies, renderer.mm_processor.last]


def watched(grace_s):
    warmup = DeferredWarmup(log=lambda _: None, grace_s=grace_s)
    warmup.watch(base)
    return warmup


def main():
    original = base.BaseRenderer._warmup_mm_processor, base.BaseRenderer._process_multimodal
    told = {}
    renderer, warmup = world(watched(0.0))
    told["put off"] = [warmup.state, renderer.mm_processor.dummies]
    warmup.ready()
    warmup._timer.join(60)
    told["open"] = seen(renderer, warmup)

    base.BaseRenderer._warmup_mm_processor, base.BaseRenderer._process_multimodal = original
    renderer, warmup = world(watched(3600.0))
    warmup.ready()
    asked = renderer._mm_executor.submit(renderer._process_multimodal, [1], {}, None, None)
    assert asked.exception(60) is not None
    told["asked first"] = seen(renderer, warmup)
    print(json.dumps(told))


main()
