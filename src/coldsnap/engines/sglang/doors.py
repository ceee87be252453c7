"""The front end's part in a release or resume: workers meet here, SGLang is asked, and a user hears how it went.

The one rule: SGLang is asked once for all workers; what a scheduler could not do fails the request that asked for it.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from coldsnap.engines.sglang.frontend import FrontEnd
from coldsnap.engines.sglang.hooking import Hook
from coldsnap.engines.sglang.meeting import Meeting
from coldsnap.engines.sglang.memory import KV_CACHE, WEIGHTS
from coldsnap.errors import EngineError
from coldsnap.keeper.control import request_control

__all__ = ["TRANSITION_S", "Doors"]

TRANSITION_S = 3600.0
"""As long as the slowest disk takes; whoever asked has a deadline of his own."""

_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"


class Doors:
    """The front end's part in a release or resume.

    Args:
        front: The front end.
        directory: The directory of the directive.
    """

    def __init__(self, front: FrontEnd, directory: str) -> None:
        self._front = front
        self._directory = directory
        self._meeting_asks = False
        self.meeting = Meeting(self._workers, self._ask)

    def hooks(self) -> tuple[Hook, ...]:
        """Return what is hooked."""
        return (
            Hook(target=f"{_TOKENIZER}.__init__", wrapper=self._front.made),
            Hook(
                target=f"{_TOKENIZER}.generate_request",
                wrapper=self._front.generate_request,
                parameters=("obj", "request"),
            ),
            *(
                Hook(target=f"{_TOKENIZER}.{name}", wrapper=wrapper, parameters=("obj", "request"))
                for name, wrapper in (
                    ("release_memory_occupation", self._released),
                    ("resume_memory_occupation", self._resumed),
                )
            ),
        )

    async def _released(self, original: Any, tokenizer: Any, obj: Any, request: Any = None) -> None:
        before = self._front.asleep
        if request is not None:
            self._front.asleep = before | _tags(obj)  # before anything is gone
        try:
            await self._occupation(original, tokenizer, obj, request)
        except BaseException:
            self._front.asleep = before
            raise

    async def _resumed(self, original: Any, tokenizer: Any, obj: Any, request: Any = None) -> None:
        await self._occupation(original, tokenizer, obj, request)
        if request is not None:
            self._front.asleep -= _tags(obj)

    async def _occupation(self, original: Any, tokenizer: Any, obj: Any, request: Any) -> None:
        """Let a user's request through, and fail it with what the schedulers say they could not do."""
        await original(tokenizer, obj, request)
        if request is not None:
            await asyncio.to_thread(self._require_done)

    def _require_done(self) -> None:
        replies = request_control(self._directory, "transition", roles=["worker"], timeout_s=30.0)
        errors = sorted({str(reply["error"]) for reply in replies.values() if reply.get("error")})
        if errors:
            raise EngineError("; ".join(errors))

    def _workers(self) -> set[str]:
        names = os.listdir(os.path.join(self._directory, "control"))
        return {name.removesuffix(".sock") for name in names if name.startswith("worker.") and name.endswith(".sock")}

    def _ask(self, kind: str) -> None:
        from sglang.srt.managers.io_struct import (  # noqa: PLC0415
            ReleaseMemoryOccupationReqInput,
            ResumeMemoryOccupationReqInput,
        )

        tokenizer = self._front.tokenizer
        if kind == "release":
            asked = tokenizer.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=None))
        else:
            asked = tokenizer.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=None))
        self._front.run(asked, TRANSITION_S)


def _tags(obj: Any) -> frozenset[str]:
    """Return what of the memory without which nothing is served a request is about: all of it where it names none."""
    return frozenset(obj.tags or (WEIGHTS, KV_CACHE)) & {WEIGHTS, KV_CACHE}
