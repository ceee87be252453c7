"""SGLang's front end, seen from inside: close the door, wait, pause; and back.

``TokenizerManager`` lives on the event loop of the HTTP server. Operations arrive on the control thread and run on that
loop.

The one rule: a quiesce that does not succeed leaves the engine serving. Requests that arrive meanwhile wait at the
door; they are neither lost nor refused, and go on when it opens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from coldsnap.engines.rank import Busy, Operation

__all__ = ["FrontEnd"]

_T = TypeVar("_T")
_POLL_S = 0.005
_ANSWER_S = 30.0  # for operations that only talk to the schedulers
_LAST_WRITES_S = 0.02  # the last pieces of streamed answers leave the server after their requests have ended


class FrontEnd:
    """The one ``TokenizerManager`` of this process, and the door in front of it.

    Args:
        closed: Whether the door is closed until somebody is admitted: an engine that is started for a restore must
            answer nobody before its answer was compared.
    """

    def __init__(self, *, closed: bool = False) -> None:
        self._tokenizer: Any = None
        self._open = asyncio.Event()
        if not closed:
            self._open.set()
        self._inside = 0
        self._held = 0
        self._key = ""  # lets one request through the closed door: the acceptance request of a restore
        self._asleep: frozenset[str] = frozenset()  # the tags of memory that a user had taken away
        self._turns = 0  # how often the door was opened; a quiesce that sees it change was overtaken

    # Hooks

    def made(self, original: Any, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        """Take the tokenizer manager that was just made (around ``TokenizerManager.__init__``)."""
        original(tokenizer, *args, **kwargs)
        self._tokenizer = tokenizer

    def generate_request(self, original: Any, tokenizer: Any, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        """Let a request in (around ``TokenizerManager.generate_request``)."""
        return self._through_the_door(original(tokenizer, obj, request), obj)

    async def _through_the_door(self, answers: Any, obj: Any) -> AsyncIterator[Any]:
        await self._pass(obj)
        self._inside += 1
        try:
            async with aclosing(answers) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self._inside -= 1

    async def _pass(self, obj: Any) -> None:
        while not self._open.is_set() and not (self._key and self._key in _names(obj)):
            self._held += 1
            try:
                await self._open.wait()
            finally:
                self._held -= 1
        if self._asleep and not self.tokenizer.is_pause:  # SGLang has a paused one wait, as it does alone
            raise ValueError(  # which SGLang answers with 400, and its sentence
                f"the memory of this server ({', '.join(sorted(self._asleep))}) was released and cannot serve a "
                "request; resume it with /resume_memory_occupation first"
            )

    @property
    def asleep(self) -> frozenset[str]:
        """Return the tags of memory that a user had taken away: requests are refused, and probes told so, meanwhile."""
        return self._asleep

    @asleep.setter
    def asleep(self, tags: frozenset[str]) -> None:
        if bool(tags) != bool(self._asleep) and self._open.is_set():
            self._announce(ready=not tags)
        self._asleep = tags

    # Operations

    def operations(self) -> Mapping[str, Operation]:
        """Return the operations of the rank that owns the front end."""
        return {
            "quiesce": lambda request: self.run(self._quiesce(_seconds(request)), _seconds(request) + _ANSWER_S),
            "admit": lambda request: self.run(self._admit(_key(request)), _ANSWER_S),
            "resume": lambda _: self.run(self._resume(), _ANSWER_S),
            "reset_prefix_cache": lambda _: self.run(self._reset_prefix_cache(), _ANSWER_S),
            "status": lambda _: self.run(self._status(), _ANSWER_S),
        }

    @property
    def tokenizer(self) -> Any:
        """Return SGLang's tokenizer manager.

        Raises:
            Busy: It does not run yet.
        """
        if self._tokenizer is None or self._tokenizer.event_loop is None:
            raise Busy("the engine is still starting")
        return self._tokenizer

    def run(self, coroutine: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
        """Run something on the event loop of the front end.

        Raises:
            Busy: There is none yet.
            TimeoutError: It took too long.
        """
        try:
            loop = self.tokenizer.event_loop
        except Busy:
            coroutine.close()
            raise
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(timeout_s)

    async def _status(self) -> Mapping[str, Any]:
        return {
            "unfinished": self._unfinished(),
            "held": self._held,
            "open": self._open.is_set(),
            "quiesced": not self._open.is_set() and bool(self.tokenizer.is_pause),
            "ready": self.tokenizer.server_status.name == "Up",  # for releases without /ready
        }

    def _unfinished(self) -> int:
        # A client that left makes its request end here first; the schedulers know of it a moment longer.
        return max(self._inside, len(self.tokenizer.rid_to_state))

    async def _quiesce(self, timeout_s: float) -> Mapping[str, Any]:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput  # noqa: PLC0415

        deadline, turn = time.monotonic() + timeout_s, self._turns
        self._open.clear()
        try:
            await self._drain(deadline, turn, timeout_s)
            self._announce(ready=False)
            await self.tokenizer.pause_generation(PauseGenerationReqInput(mode="retract"))
            # Answered after the pause was: schedulers take their requests in order. It also ends the batch that
            # SGLang's watchdog looks at, which would count the time in an image as time without progress.
            await self._flush()
            await asyncio.sleep(_LAST_WRITES_S)
            self._demand(turn)
            self._demand_idle()
        except BaseException:
            if turn == self._turns:
                await self._resume()
            raise
        return await self._status()

    async def _drain(self, deadline: float, turn: int, timeout_s: float) -> None:
        while count := self._unfinished():
            if time.monotonic() >= deadline:
                raise Busy(f"{count} requests still ran after {timeout_s:g} s; the engine serves on")
            await asyncio.sleep(_POLL_S)
            self._demand(turn)

    def _demand(self, turn: int) -> None:
        if turn != self._turns:
            raise Busy("the engine was resumed while it was being quiesced")

    def _demand_idle(self) -> None:
        if count := self._unfinished():
            raise Busy(f"{count} requests were found in an engine that had said it is idle")

    async def _admit(self, key: str) -> Mapping[str, Any]:
        """Let the engine run, for requests with this key in their id; the door stays closed for all others."""
        self._key = key
        await self._continue()
        return await self._status()

    async def _resume(self) -> Mapping[str, Any]:
        await self._continue()
        self._turns += 1
        self._key = ""
        self._announce(ready=not self._asleep)
        self._open.set()
        return await self._status()

    async def _continue(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput  # noqa: PLC0415

        if self.tokenizer.is_pause:
            await self.tokenizer.continue_generation(ContinueGenerationReqInput())

    def _announce(self, *, ready: bool) -> None:
        """Have ``/health`` and ``/ready`` say 503, or 200; a probe that waits for an answer would hang meanwhile."""
        statuses = type(self.tokenizer.server_status)
        self.tokenizer.server_status = statuses.Up if ready else statuses.Starting

    def hold(self) -> None:
        """Have the server say that it is starting while its door is closed; called before anybody is admitted."""
        if not self._open.is_set():
            self._announce(ready=False)

    async def _flush(self) -> None:
        answer = await self.tokenizer.flush_cache()
        if not answer.success:
            raise Busy(f"the prefix cache is in use by {self._unfinished()} requests")

    async def _reset_prefix_cache(self) -> Mapping[str, Any]:
        await self._flush()
        return {"reset": True}


def _names(obj: Any) -> str:
    rid = getattr(obj, "rid", None)
    return " ".join(map(str, rid)) if isinstance(rid, list) else str(rid)


def _seconds(request: Mapping[str, Any]) -> float:
    value = request.get("drain_timeout_s", request.get("timeout_s"))
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 86400:
        raise Busy(f"expected drain_timeout_s between 0 and 86400, found {value!r}")
    return float(value)


def _key(request: Mapping[str, Any]) -> str:
    key = request.get("key")
    if not isinstance(key, str) or len(key) < 16:
        raise Busy("expected a key of at least 16 characters")
    return key
