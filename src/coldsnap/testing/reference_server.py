"""The reference engine's processes: a front end, and the start of a worker.

Small, but of the same kind as a real engine: a process tree made by ``spawn``, a shared-memory ring with named
semaphores between the two, threads in both, an optional TCP pair on loopback, HTTP with health and streamed
completions, and coldsnap's ranks inside.

The one rule: a request is either held at the door, or counted until its last token; nothing runs unseen.
"""

from __future__ import annotations

import argparse
import atexit
import json
import mmap
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from coldsnap.engines.rank import Busy, Operation
from coldsnap.engines.settings import directive_path
from coldsnap.keeper.directive import read_directive
from coldsnap.testing.reference_worker import END, POLL_S, Channel, start_rank, work

BEAT_S, BEAT_PATIENCE_S = 0.02, 1.0
WATCHDOG_S, WATCHDOG_EXIT = 3600.0, 4


class FrontEnd:
    """Counts requests, and closes the door when it is asked to."""

    def __init__(
        self, channel: Channel, worker: multiprocessing.process.BaseProcess, pair: socket.socket | None
    ) -> None:
        self.channel = channel
        self.worker = worker
        self.pair = pair
        self._door = threading.Condition()
        # Started for a restore, it must first give the captured answer.
        path = directive_path()
        self._closed = path is not None and read_directive(path).operation == "restore"
        self._unfinished = 0
        self._held = 0
        self._key = ""
        self._turns = 0
        self._one_at_a_time = threading.Lock()
        self._read = 0
        self._cache: dict[str, int] = {}
        self._beats = threading.Condition()
        threading.Thread(target=self._beat, name="reference-beat", daemon=True).start()

    def _beat(self) -> None:
        """Do what keep-alives and watchdogs of real engines do: sleep by a clock, and look how long it was."""
        before = time.monotonic()
        while True:
            time.sleep(BEAT_S)
            now = time.monotonic()
            if not 0 <= now - before < WATCHDOG_S:
                os.write(2, f"watchdog: a beat of {now - before:.0f} s\n".encode())
                os._exit(WATCHDOG_EXIT)
            before = now
            with self._beats:
                self._beats.notify_all()

    def complete(self, request: Mapping[str, Any], request_id: str) -> Iterator[int]:
        """Yield the tokens that answer a request, once the door is open."""
        self._enter(request_id)
        try:
            with self._one_at_a_time:
                seen = self._cache.get(request["prompt"], 0)
                self._cache[request["prompt"]] = seen + 1
                self.channel.put_request({**request, "cached": seen > 0})
                yield from self._tokens()
        finally:
            self._leave()

    def _tokens(self) -> Iterator[int]:
        token = 0
        try:
            while token != END:
                token = self._next()
                if token != END:
                    yield token
        finally:
            while token != END:  # the client went away: the ring must be empty for the next request
                token = self._next()

    def _next(self) -> int:
        token = self.channel.get_token(self._read, self.worker)
        self._read += 1
        return token

    def healthy(self) -> bool:
        """Tell whether the worker lives, timers run and the TCP pair, if there is one, still carries bytes."""
        with self._beats:
            if not self.worker.is_alive() or not self._beats.wait(BEAT_PATIENCE_S):
                return False
        if self.pair is not None:
            self.pair.sendall(b"ping")
            return self.pair.recv(64) == b"ping"
        return True

    def _enter(self, request_id: str) -> None:
        with self._door:
            self._held += 1
            self._door.wait_for(lambda: not self._closed or bool(self._key and self._key in request_id))
            self._held -= 1
            self._unfinished += 1

    def _leave(self) -> None:
        with self._door:
            self._unfinished -= 1
            self._door.notify_all()

    def operations(self) -> Mapping[str, Operation]:
        """Return the operations of the rank that owns the front end."""
        return {
            "quiesce": self._quiesce,
            "admit": self._admit,
            "resume": self._resume,
            "reset_prefix_cache": self._reset_prefix_cache,
            "status": lambda _: self._status(),
        }

    def _status(self) -> Mapping[str, Any]:
        return {
            "unfinished": self._unfinished,
            "held": self._held,
            "open": not self._closed,
            "quiesced": self._closed and not self._unfinished,
        }

    def _quiesce(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        timeout_s = float(request.get("drain_timeout_s", request.get("timeout_s", 60.0)))
        with self._door:
            self._closed, turn = True, self._turns
            idle = self._door.wait_for(lambda: not self._unfinished or turn != self._turns, timeout_s)
            if turn != self._turns:
                raise Busy("the engine was resumed while it was being quiesced")
            if not idle:
                self._open()
                raise Busy(f"{self._unfinished} requests still ran after {timeout_s:g} s; the engine serves on")
            return self._status()

    def _admit(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        with self._door:
            self._key = str(request["key"])
            self._door.notify_all()
            return self._status()

    def _resume(self, _request: Mapping[str, Any]) -> Mapping[str, Any]:
        with self._door:
            self._open()
            return self._status()

    def _open(self) -> None:
        self._closed, self._key = False, ""
        self._turns += 1
        self._door.notify_all()

    def _reset_prefix_cache(self, _request: Mapping[str, Any]) -> Mapping[str, Any]:
        with self._door:
            if self._unfinished:
                raise Busy(f"the prefix cache is in use by {self._unfinished} requests")
            self._cache.clear()
        return {"reset": True}


class Server(ThreadingHTTPServer):
    """The HTTP server, with the front end that its handlers use."""

    daemon_threads = True
    front: FrontEnd
    model: str


class Handler(BaseHTTPRequestHandler):
    """``/health`` and ``/v1/completions``."""

    server: Server

    def do_GET(self) -> None:
        """Answer a readiness probe."""
        good = self.path == "/health" and self.server.front.healthy()
        self._send(HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE, b"", "text/plain")

    def do_POST(self) -> None:
        """Answer a completion request, as a stream or at once."""
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))))
        if self.path != "/v1/completions" or body.get("model") != self.server.model:
            self._send(HTTPStatus.NOT_FOUND, b'{"error": "no such path or model"}', "application/json")
            return
        tokens = self.server.front.complete(
            {
                "prompt": str(body["prompt"]),
                "max_tokens": int(body.get("max_tokens", 16)),
                "temperature": float(body.get("temperature", 1.0)),
                "delay_s": float(body.get("delay_s", 0.0)),
            },
            self.headers.get("X-Request-Id", ""),
        )
        if body.get("stream"):
            self._stream(tokens)
        else:
            self._send(HTTPStatus.OK, json.dumps(_event(list(tokens))).encode(), "application/json")

    def _stream(self, tokens: Iterator[int]) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for token in tokens:
            self.wfile.write(b"data: " + json.dumps(_event([token])).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, status: HTTPStatus, data: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name is http.server's
        """Write nothing: readiness probes come every few milliseconds."""


def _event(tokens: list[int]) -> Mapping[str, Any]:
    text = "".join(chr(0x21 + token % 94) for token in tokens)
    return {"choices": [{"index": 0, "text": text, "token_ids": tokens}]}


def serve(options: argparse.Namespace) -> None:
    """Start the worker, wait for it, and serve until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    channel = Channel()
    atexit.register(channel.remove)
    listener = socket.create_server(("127.0.0.1", 0)) if options.loopback else None
    port = listener.getsockname()[1] if listener is not None else None
    start: Any = multiprocessing.get_context("fork" if options.fork else "spawn")
    worker = start.Process(target=work, args=(channel, options, port), daemon=True)
    worker.start()
    while not channel.ready.wait(timeout=POLL_S):
        if not worker.is_alive():
            sys.exit(f"the worker ended with {worker.exitcode} before it was ready")
    pair = None
    if listener is not None:
        pair, _ = listener.accept()
        listener.close()
    front = FrontEnd(channel, worker, pair)
    listeners = [_listen_unix(name) for name in options.listen_unix]
    blank = _zeros(options.zero_bytes)
    start_rank("api", {**front.operations(), **({"tidy": _refuse} if options.untidy else {})})
    with Server((options.host, options.port), Handler) as server:
        server.front, server.model = front, options.model
        server.serve_forever(poll_interval=POLL_S)
    for each in listeners:
        each.close()
    for memory in blank:
        memory.close()


def _listen_unix(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name[1:]}" if name.startswith("@") else name)
    listener.listen()
    return listener


def _zeros(size_bytes: int) -> list[mmap.mmap]:
    """Return private memory into which zeros were written: an engine's caches before their first use."""
    if not size_bytes:
        return []
    found = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, size_bytes, mmap.PAGESIZE):
        found[at] = 0
    return [found]


def _refuse(_request: Mapping[str, Any]) -> Mapping[str, Any]:
    raise Busy("this engine gives nothing back")


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="reference")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights-seed", type=int, default=0)
    parser.add_argument("--weights-bytes", type=int, default=1 << 20)
    parser.add_argument("--zero-bytes", type=int, default=0, help="hold so much memory that was filled with zeros")
    parser.add_argument("--weights", help="a safetensors file, loaded into memory that can be released")
    parser.add_argument("--load-format", choices=["auto", "coldsnap"], default="auto", help="as vLLM's")
    parser.add_argument("--kv-bytes", type=int, default=1 << 20)
    parser.add_argument("--kernel", default="", help="a file below TRITON_CACHE_DIR that the worker makes and maps")
    parser.add_argument("--hoard", action="store_true", help="keep a second copy of the weights that nothing releases")
    parser.add_argument("--untidy", action="store_true", help="refuse to give unused memory back before a capture")
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--fork", action="store_true", help="fork the worker: it has what was imported already")
    parser.add_argument("--exit-after-s", type=float, default=None)
    parser.add_argument("--listen-unix", action="append", default=[], help="a Unix socket: a path, or @ and a name")
    parser.add_argument("--noise", action="store_true", help="give a greedy request another answer each time")
    options = parser.parse_args()
    if options.exit_after_s is not None:
        threading.Timer(options.exit_after_s, os._exit, args=(3,)).start()
    serve(options)


if __name__ == "__main__":
    main()
