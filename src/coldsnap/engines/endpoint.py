"""HTTP to an engine: readiness and one streamed request.

The one rule: no connection outlives its call. A connection from outside that is still open when a process image is
made would be in the image; so every request says ``Connection: close`` and is read until the engine has closed.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any

from coldsnap.errors import EngineError
from coldsnap.keeper.directive import Endpoint

__all__ = ["POLL_INTERVAL_S", "await_ready", "log_tail", "reached_by", "stream"]

POLL_INTERVAL_S = 0.005  # restores are measured in tenths of seconds
_CONNECT_TIMEOUT_S = 0.25
_HEALTH_TIMEOUT_S = 2.0  # an engine that accepts and then hangs must not stop the polling
_TAIL_BYTES = 64 << 10
_CAUSES = 3

# "ValueError: what", at the beginning of a line or behind the prefixes of a logger.
_EXCEPTION = re.compile(r"(\([^)]*\) )?(\w+ [\d-]+ [\d:]+ \[[^]]*\] )?(?P<what>[\w.]*(Error|Exception): .*)")

# What an address that means "every interface" is reached by from the same host.
_REACHED_BY = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}  # noqa: S104  # compared, never bound


def reached_by(endpoint: Endpoint) -> str:
    """Return the address to connect to, which is not always the one that is listened on."""
    return _REACHED_BY.get(endpoint.host, endpoint.host)


def await_ready(
    endpoint: Endpoint,
    *,
    timeout_s: float,
    health_path: str = "/health",
    ended: Callable[[], str | None] = lambda: None,
    log: Path | None = None,
) -> float:
    """Wait until the engine listens, then until it says that it is healthy.

    Args:
        endpoint: Where it will listen.
        timeout_s: How long to wait, s.
        health_path: Answers 200 when the engine can serve.
        ended: Called between two polls; a sentence means that the engine is dead, and ends the wait at once.
        log: The engine's log, whose last lines go into the error.

    Returns:
        How long it took, s.

    Raises:
        EngineError: It ended, or it was not healthy in time.
    """
    start = time.monotonic()
    state = "nothing listens"
    while (waited := time.monotonic() - start) < timeout_s:
        if reason := ended():
            raise EngineError(f"the engine ended while its first answer was awaited: {reason}", log_tail=log_tail(log))
        status = _health(endpoint, health_path, min(_HEALTH_TIMEOUT_S, timeout_s - waited))
        if status == http.HTTPStatus.OK:
            return time.monotonic() - start
        state = status if isinstance(status, str) else f"{health_path} answers {status}"
        time.sleep(POLL_INTERVAL_S)
    message = (
        f"the engine was not ready at {endpoint.url} within {timeout_s:g} s ({state}); allow more time or read its log"
    )
    raise EngineError(message, log_tail=log_tail(log))


def _health(endpoint: Endpoint, path: str, timeout_s: float) -> int | str:
    connection = http.client.HTTPConnection(
        reached_by(endpoint), endpoint.port, timeout=max(0.01, min(timeout_s, _CONNECT_TIMEOUT_S))
    )
    with closing(connection):
        try:
            connection.connect()
        except OSError:
            return "nothing listens"
        try:
            connection.sock.settimeout(max(0.01, timeout_s))
            connection.request("GET", path, headers={"Connection": "close"})
            response = connection.getresponse()
            response.read()
            _read_to_end(connection.sock)
        except (OSError, http.client.HTTPException) as error:
            return f"it accepts connections, but {path} gives {type(error).__name__}"
        return response.status


def _read_to_end(sock: socket.socket | None) -> None:
    # http.client drops its socket when the response says that the server will close; nothing is left to wait for then.
    while sock is not None and sock.fileno() >= 0 and sock.recv(4096):
        pass


def stream(
    endpoint: Endpoint,
    path: str,
    body: Mapping[str, Any],
    *,
    timeout_s: float,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[tuple[float, Mapping[str, Any]]]:
    """Post a request whose answer is a stream of server-sent events.

    Args:
        endpoint: The engine.
        path: Of the request.
        body: Sent as JSON.
        timeout_s: For the whole exchange, s.
        headers: Further headers.

    Yields:
        Each event, with the seconds since the request was sent.

    Raises:
        EngineError: The engine refused, broke off, or took too long.
    """
    start = time.monotonic()
    connection = http.client.HTTPConnection(reached_by(endpoint), endpoint.port, timeout=timeout_s)
    with closing(connection):
        try:
            connection.connect()
            sock = connection.sock
            sent = {**headers, "Content-Type": "application/json", "Connection": "close"}
            connection.request("POST", path, json.dumps(body), sent)
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                detail = response.read(2000).decode(errors="replace")
                raise EngineError(f"POST {endpoint.url}{path} answered {response.status}: {detail}")
            while line := _line(response, sock, start + timeout_s):
                if line.startswith(b"data: {"):
                    yield time.monotonic() - start, json.loads(line.removeprefix(b"data: "))
        except (OSError, http.client.HTTPException, ValueError) as error:
            seconds = time.monotonic() - start
            message = f"POST {endpoint.url}{path} failed after {seconds:.1f} s: {type(error).__name__}: {error}"
            raise EngineError(message) from error


def _line(response: http.client.HTTPResponse, sock: socket.socket, deadline: float) -> bytes:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("the answer did not end in time")
    if sock.fileno() >= 0:
        sock.settimeout(remaining)
    return response.readline(1 << 20)


def log_tail(log: Path | None, lines: int = 20) -> str:
    """Return the end of a log, and before it the exceptions that the end is the consequence of.

    Engines report a failure from one process to the next; the last traceback says no more than that there was an
    earlier one.

    Args:
        log: The file; no text when there is none.
        lines: How many of the last lines.
    """
    if log is None:
        return ""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            text = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    earlier = dict.fromkeys(match["what"] for line in text[:-lines] if (match := _EXCEPTION.match(line)))
    causes = [f"(earlier) {what}" for what in list(earlier)[:_CAUSES]]
    return "\n".join([*causes, *text[-lines:]])
