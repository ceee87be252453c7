"""vLLM's front end, seen from inside: close the door, wait, pause; and back.

``AsyncLLM`` lives on the event loop of the API server. Operations arrive on the control thread and run on that loop.

The one rule: a quiesce that does not succeed leaves the engine serving. Requests that arrive meanwhile wait at the
door; they are neither lost nor refused, and go on when it opens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from coldsnap.engines.rank import Busy, Operation

__all__ = ["FrontEnd"]

_T = TypeVar("_T")
_POLL_S = 0.005
_ANSWER_S = 30.0  # for operations that only talk to the engine core
_LAST_WRITES_S = 0.02  # the last pieces of streamed answers leave the server after their requests have ended


class FrontEnd:
    """The one ``AsyncLLM`` of this process, and the door in front of it.

    Args:
        closed: Whether the door is closed until somebody is admitted: an engine that is started for a restore must
            first give the captured answer.
        opened: Called whenever the door was opened.
    """

    def __init__(self, *, closed: bool = False, opened: Callable[[], None] = lambda: None) -> None:
        self._engine: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open = asyncio.Event()
        if not closed:
            self._open.set()
        self._opened = opened
        self._entering = 0  # past the door, not yet counted by the engine
        self._held = 0
        self._key = ""  # lets one request through the closed door: the acceptance request of a restore
        self._turns = 0  # how often the door was opened; a quiesce that sees it change was overtaken

    def attach(self, engine: Any) -> None:
        """Put the door in front of an engine that was just made; called on its event loop."""
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        add_request = engine.add_request

        async def through_the_door(request_id: str, *args: Any, **kwargs: Any) -> Any:
            await self._pass(request_id)
            try:
                return await add_request(request_id, *args, **kwargs)
            finally:
                self._entering -= 1

        engine.add_request = through_the_door

    def operations(self) -> Mapping[str, Operation]:
        """Return the operations of the rank that owns the front end."""
        return {
            "quiesce": lambda request: self._run(self._quiesce(_seconds(request)), _seconds(request) + _ANSWER_S),
            "admit": lambda request: self._run(self._admit(_key(request)), _ANSWER_S),
            "resume": lambda _: self._run(self._resume(), _ANSWER_S),
            "reset_prefix_cache": lambda _: self._run(self._reset_prefix_cache(), _ANSWER_S),
            "status": lambda _: self._run(self._status(), _ANSWER_S),
        }

    async def _pass(self, request_id: str) -> None:
        while not self._open.is_set() and not (self._key and self._key in request_id):
            self._held += 1
            try:
                await self._open.wait()
            finally:
                self._held -= 1
        self._entering += 1

    def _run(self, coroutine: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
        if self._engine is None or self._loop is None:
            coroutine.close()
            raise Busy("the engine is still starting")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    async def _status(self) -> Mapping[str, Any]:
        return {
            "unfinished": self._unfinished(),
            "held": self._held,
            "open": self._open.is_set(),
            "quiesced": not self._open.is_set() and await self._engine.is_paused(),
        }

    def _unfinished(self) -> int:
        return self._entering + int(self._engine.output_processor.get_num_unfinished_requests())

    async def _quiesce(self, timeout_s: float) -> Mapping[str, Any]:
        if self._engine.errored:
            raise Busy("the engine core is dead")
        deadline, turn = time.monotonic() + timeout_s, self._turns
        self._open.clear()
        try:
            await self._drain(deadline, turn, timeout_s)
            remaining = max(0.0, deadline - time.monotonic())
            await asyncio.wait_for(self._engine.pause_generation(mode="wait", clear_cache=False), max(remaining, 1.0))
            await asyncio.sleep(_LAST_WRITES_S)
            self._demand(turn)
            await self._demand_idle()
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

    async def _demand_idle(self) -> None:
        if self._unfinished() or not await self._engine.is_paused():
            raise Busy("requests were found in an engine that had said it is idle")

    async def _admit(self, key: str) -> Mapping[str, Any]:
        """Let the engine run, for requests with this key in their id; the door stays closed for all others."""
        self._key = key
        await self._engine.resume_generation()
        return await self._status()

    async def _resume(self) -> Mapping[str, Any]:
        await self._engine.resume_generation()
        self._turns += 1
        self._key = ""
        self._open.set()
        self._opened()
        return await self._status()

    async def _reset_prefix_cache(self) -> Mapping[str, Any]:
        if not await self._engine.reset_prefix_cache():
            raise Busy(f"the prefix cache is in use by {self._unfinished()} requests")
        return {"reset": True}


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
