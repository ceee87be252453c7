"""What a server that a restore starts does in the place of SGLang's warm-up: its door is closed.

SGLang's own warm-up is a request through the front door. The question whose answer is compared warms a restored server
up; all that it needs before is the event loop of the front end, which SGLang makes at its first request.

The one rule: SGLang says that it is up when the door opens, and not before.
"""

from __future__ import annotations

import http.client
import inspect
import time
from contextlib import closing
from typing import Any

from coldsnap.engines.sglang.frontend import FrontEnd
from coldsnap.engines.sglang.hooking import Hook
from coldsnap.errors import EngineError

__all__ = ["Warmup"]

_TARGET = "sglang.srt.entrypoints.http_server._wait_and_warmup"
_LISTEN_S = 120.0  # as long as SGLang's own waits for its server
_POLL_S = 0.02
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104  nothing is bound here


class Warmup:
    """The hook on SGLang's warm-up.

    Args:
        front: The front end; its door is closed.
    """

    def __init__(self, front: FrontEnd) -> None:
        self._front = front

    def hooks(self) -> tuple[Hook, ...]:
        """Return what is hooked."""
        parameters = ("server_args", "launch_callback", "execute_warmup_func")
        return (Hook(target=_TARGET, wrapper=self.warm, parameters=parameters),)

    def warm(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Begin instead of warming up (around ``_wait_and_warmup``, in a thread of its own)."""
        asked = inspect.signature(original).bind(*args, **kwargs)
        begin(asked.arguments["server_args"])
        asked.arguments["execute_warmup_func"] = lambda _server_args: True
        done = original(*asked.args, **asked.kwargs)
        self._front.hold()  # a server that was told to skip its warm-up has said that it is up
        return done


def begin(server_args: Any) -> None:
    """Wait until the server listens, and have it make its event loop; its cache is empty before and after.

    Raises:
        EngineError: It does not answer.
    """
    deadline, told = time.monotonic() + _LISTEN_S, ""
    host, port = _ANY.get(server_args.host, server_args.host), server_args.port
    while time.monotonic() < deadline:
        try:
            with closing(http.client.HTTPConnection(host, port, timeout=_LISTEN_S)) as connection:
                connection.request("POST", "/flush_cache", headers={"Connection": "close"})
                if (status := connection.getresponse().status) == http.client.OK:
                    return
                told = f"it answered {status}"
        except (OSError, http.client.HTTPException) as error:
            told = str(error)
        time.sleep(_POLL_S)
    raise EngineError(f"the front end did not answer at {host}:{port} within {_LISTEN_S:g} s of its start: {told}")
