"""vLLM's multimodal warm-up, moved behind readiness in an engine that is started for a restore.

vLLM makes its processor of images and sounds work once on dummy inputs before the port opens, some seconds that no text
request needs. Here that waits until the engine has answered as captured and its door is open, and a moment longer, so
that text comes first; then it goes through the renderer's own executor, which does one thing at a time.

The one rule: a real multimodal request never waits for a warm-up that has not begun. The first one cancels it, since it
warms the processor itself; behind one that has begun it waits its turn, as vLLM lets it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

from attrs import frozen

__all__ = ["GRACE_S", "RENDERER", "DeferredWarmup"]

RENDERER = "vllm.renderers.base"
GRACE_S = 30.0
"""How long the engine serves before it warms what nobody has asked for, s."""

State = Literal["none", "deferred", "scheduled", "running", "done", "cancelled", "failed"]


@frozen(eq=False)
class _Put:
    """One warm-up that vLLM wanted, and was put off."""

    renderer: Any
    cache: Any
    run: Callable[[], object]


class DeferredWarmup:
    """The warm-ups of this process.

    Args:
        log: Takes one sentence.
        grace_s: How long after the engine is open, s.

    Attributes:
        state: none (nothing was put off), deferred (until the engine is open), scheduled (a timer runs), running, done,
            cancelled (by a real request), failed (the log says why; requests are not affected).
    """

    def __init__(self, *, log: Callable[[str], None], grace_s: float = GRACE_S) -> None:
        self.state: State = "none"
        self._log, self._grace_s = log, grace_s
        self._lock, self._warming = threading.Lock(), threading.Lock()
        self._put_off: list[_Put] = []
        self._timer: threading.Timer | None = None

    def watch(self, module: ModuleType) -> None:
        """Put off what the renderers of vLLM warm from now on.

        Args:
            module: ``vllm.renderers.base``.
        """
        base = module.BaseRenderer
        warm, process = base._warmup_mm_processor, base._process_multimodal  # noqa: SLF001  the contract has both

        @functools.wraps(warm)
        def later(renderer: Any, processor: Any, *args: Any, **named: Any) -> None:
            again = functools.partial(warm, renderer, processor, *args, **named)
            # What it fills: the cache that it is given, since 0.32; before, that of the processor.
            self._put_aside(_Put(renderer, args[0] if args else getattr(processor, "cache", None), again))

        @functools.wraps(process)
        def real(renderer: Any, *args: Any, **named: Any) -> Any:
            self._cancel()
            with self._warming:  # an executor of several threads, which 0.26 may have, would not make it wait
                pass
            return process(renderer, *args, **named)

        base._warmup_mm_processor = later  # noqa: SLF001
        base._process_multimodal = real  # noqa: SLF001

    def _put_aside(self, wanted: _Put) -> None:
        with self._lock:
            self._put_off.append(wanted)
            self.state = "deferred" if self.state == "none" else self.state
        self._log("the multimodal warm-up waits until the engine has answered")

    def ready(self) -> None:
        """Begin to wait: the engine is open. A second call does nothing."""
        with self._lock:
            if self.state != "deferred":
                return
            self.state = "scheduled"
            self._timer = threading.Timer(self._grace_s, self._submit)
            self._timer.daemon = True  # an engine that ends does not wait for it
            self._timer.start()

    def _submit(self) -> None:
        with self._lock:
            if self.state != "scheduled":
                return
            executors = {id(one.renderer): one.renderer._mm_executor for one in self._put_off}  # noqa: SLF001
            try:
                for executor in executors.values():
                    executor.submit(self._run)
            except RuntimeError as error:  # the executor was shut down: the engine ends
                self.state = "cancelled"
                self._log(f"the multimodal warm-up is left out: {error}")

    def _run(self) -> None:
        with self._warming:
            with self._lock:
                if self.state != "scheduled":
                    return
                self.state = "running"
            self._warm()

    def _warm(self) -> None:
        try:
            for one in self._put_off:
                try:
                    one.run()
                finally:
                    if one.cache is not None:  # no request may find the dummies there; vLLM clears it, too
                        one.cache.clear_cache()
        except Exception as error:  # noqa: BLE001  as vLLM's own: a warm-up that fails is a slow first request, no more
            self._end("failed", f"the multimodal warm-up failed: {type(error).__name__}: {error}")
        else:
            self._end("done", "the multimodal warm-up is done")

    def _cancel(self) -> None:
        with self._lock:
            if self.state not in ("deferred", "scheduled"):
                return
            if self._timer is not None:
                self._timer.cancel()
            self.state = "cancelled"
            self._put_off.clear()
        self._log("the multimodal warm-up is cancelled: a request has come first")

    def _end(self, state: State, sentence: str) -> None:
        with self._lock:
            self.state = state
            self._put_off.clear()
        self._log(sentence)
