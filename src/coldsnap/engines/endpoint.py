"""HTTP to an engine: readiness and one streamed request.

The one rule: no connection outlives its call, and no call its deadline or its engine. A connection from outside that
is still open when a process image is made would be in the image; so every request says ``Connection: close`` and is
read until the engine has closed, or until it is broken off here.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from attrs import frozen

from coldsnap.errors import ColdSnapError, EngineError
from coldsnap.keeper.directive import Endpoint

__all__ = ["POLL_INTERVAL_S", "UNWATCHED", "Watch", "await_ready", "log_tail", "reached_by", "stream"]

POLL_INTERVAL_S = 0.005  # restores are measured in tenths of seconds
_CONNECT_TIMEOUT_S = 0.25
_HEALTH_TIMEOUT_S = 2.0  # an engine that accepts and then hangs must not stop the polling
_LOOK_S = 0.25  # how long a dead engine may go unnoticed while an answer is awaited
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3})[ \r]")
_TAIL_BYTES = 64 << 10
_CAUSES = 3

# "ValueError: what", at the beginning of a line or behind the prefixes of a logger.
_EXCEPTION = re.compile(r"(\([^)]*\) )?(\w+ [\d-]+ [\d:]+ \[[^]]*\] )?(?P<what>[\w.]*(Error|Exception): .*)")

# What an address that means "every interface" is reached by from the same host.
_REACHED_BY = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}  # noqa: S104  # compared, never bound


def reached_by(endpoint: Endpoint) -> str:
    """Return the address to connect to, which is not always the one that is listened on."""
    return _REACHED_BY.get(endpoint.host, endpoint.host)


@frozen(kw_only=True)
class Watch:
    """What is looked at while an answer is awaited.

    Attributes:
        ended: Called every quarter of a second, from another thread; a sentence means that the engine, or a rank of it,
            is dead, and breaks the conversation off.
        log: The engine's log, whose last lines go into the error.
    """

    ended: Callable[[], str | None] = lambda: None
    log: Path | None = None


UNWATCHED = Watch()


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
    """Return the status that a path answers with, or what is wrong."""
    deadline = time.monotonic() + max(0.01, timeout_s)
    try:
        sock = socket.create_connection(
            (reached_by(endpoint), endpoint.port), timeout=max(0.01, min(timeout_s, _CONNECT_TIMEOUT_S))
        )
    except OSError:
        return "nothing listens"
    with closing(sock):
        try:
            return _status(sock, f"GET {path} HTTP/1.1\r\nHost: {endpoint.host}\r\nConnection: close\r\n\r\n", deadline)
        except (OSError, http.client.HTTPException) as error:
            return f"it accepts connections, but {path} gives {type(error).__name__}"


def _status(sock: socket.socket, request: str, deadline: float) -> int:
    """Send a request, read to the end of the connection, all before one deadline, and return the answer's status.

    Not by http.client: its timeout is for each read, so that a server which drips a byte at a time is never given up.
    """
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    sock.sendall(request.encode())
    head = b""
    while True:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        data = sock.recv(4096)
        if time.monotonic() > deadline:
            raise TimeoutError("the answer did not end in time")
        if not data:
            break
        head = (head + data)[:4096]
    if (found := _STATUS_LINE.match(head)) is None:
        raise http.client.BadStatusLine(head[:80].decode(errors="replace"))
    return int(found[1])


class _Guarded:
    """Breaks a conversation off when its time is up or its engine has ended, whatever read it is waiting in."""

    def __init__(self, sock: socket.socket, watch: Watch, deadline: float) -> None:
        self.why = ""
        self._sock, self._watch, self._deadline = sock, watch, deadline
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, name="coldsnap-watch", daemon=True)

    def _look(self) -> None:
        while not self._done.wait(max(0.0, min(_LOOK_S, self._deadline - time.monotonic()))):
            if time.monotonic() < self._deadline:
                self.why = self.ended()
            if self.why or time.monotonic() >= self._deadline:
                with suppress(OSError):  # it has been closed at this very moment
                    self._sock.shutdown(socket.SHUT_RDWR)
                return

    def ended(self) -> str:
        """Say how the engine ended; nothing while it lives."""
        try:
            return self._watch.ended() or ""
        except ColdSnapError as error:  # its keeper is gone, and the error says what became of both
            return str(error)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def stream(
    endpoint: Endpoint,
    path: str,
    body: Mapping[str, Any],
    *,
    timeout_s: float,
    headers: Mapping[str, str] = MappingProxyType({}),
    watch: Watch = UNWATCHED,
) -> Iterator[tuple[float, Mapping[str, Any]]]:
    """Post a request whose answer is a stream of server-sent events.

    Args:
        endpoint: The engine.
        path: Of the request.
        body: Sent as JSON.
        timeout_s: For the whole exchange, s.
        headers: Further headers.
        watch: What ends the exchange before its time.

    Yields:
        Each event, with the seconds since the request was sent.

    Raises:
        EngineError: The engine ended, refused, broke off, or took too long.
    """
    start = time.monotonic()
    deadline = start + timeout_s
    guarded = None
    connection = http.client.HTTPConnection(reached_by(endpoint), endpoint.port, timeout=timeout_s)
    with closing(connection):
        try:
            connection.connect()
            with _Guarded(connection.sock, watch, deadline) as guarded:
                for event in _events(connection, endpoint, path, body, headers):
                    yield time.monotonic() - start, event
            if guarded.why or time.monotonic() >= deadline:
                raise TimeoutError("the answer did not end in time")
        except (OSError, http.client.HTTPException, ValueError) as error:
            # A dead engine closes its connections: the end of one may be noticed sooner than the death.
            why = (guarded.why or guarded.ended()) if guarded is not None else ""
            told = f"the engine ended: {why}" if why else f"{type(error).__name__}: {error}"
            message = f"POST {endpoint.url}{path} failed after {time.monotonic() - start:.1f} s: {told}"
            raise EngineError(message, log_tail=log_tail(watch.log)) from error


def _events(
    connection: http.client.HTTPConnection,
    endpoint: Endpoint,
    path: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
) -> Iterator[Mapping[str, Any]]:
    sent = {**headers, "Content-Type": "application/json", "Connection": "close"}
    connection.request("POST", path, json.dumps(body), sent)
    response = connection.getresponse()
    if response.status != http.HTTPStatus.OK:
        detail = response.read(2000).decode(errors="replace")
        raise EngineError(f"POST {endpoint.url}{path} answered {response.status}: {detail}")
    while line := response.readline(1 << 20):
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


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
