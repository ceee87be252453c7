"""The reference engine's worker: torch weights, and the shared memory through which it is asked.

The one rule: an answer is a function of the weights, the prompt and, with a temperature, of torch's global generator;
nothing else of the machine or of the moment gets in.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import mmap
import multiprocessing
import os
import random
import secrets
import signal
import socket
import ssl
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from multiprocessing import shared_memory
from typing import Any, Protocol

from coldsnap.engines.rank import Operation, Rank
from coldsnap.engines.settings import directive_path

__all__ = ["END", "POLL_S", "Channel", "start_rank", "work"]

END = -1  # stands in the ring behind the last token of an answer
POLL_S = 0.5

_VOCABULARY = 256
_HIDDEN = 64
_GAIN = 2.5
_REQUEST_BYTES = 32 << 10
_SLOTS = 1024


class Channel:
    """What the two processes share: one request, and a ring of the tokens that answer it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._request = shared_memory.SharedMemory(create=True, size=_REQUEST_BYTES)
        self._ring = shared_memory.SharedMemory(create=True, size=4 * _SLOTS)
        self.requested = context.Semaphore(0)
        self.tokens = context.Semaphore(0)
        self.free = context.Semaphore(_SLOTS)
        self.ready = context.Event()

    def remove(self) -> None:
        """Remove the shared memory; both processes can still use what they have mapped."""
        self._request.unlink()
        self._ring.unlink()

    def put_request(self, request: Mapping[str, Any]) -> None:
        """Hand a request to the worker."""
        data = json.dumps(request).encode()
        if len(data) + 4 > _REQUEST_BYTES:
            raise ValueError(f"a request of {len(data)} bytes, at most {_REQUEST_BYTES - 4} fit")
        _bytes(self._request)[4 : 4 + len(data)] = data
        _bytes(self._request)[:4] = len(data).to_bytes(4, "little")
        self.requested.release()

    def get_request(self) -> Mapping[str, Any]:
        """Take the request that was handed over."""
        size = int.from_bytes(_bytes(self._request)[:4], "little")
        return dict(json.loads(bytes(_bytes(self._request)[4 : 4 + size])))

    def put_token(self, index: int, token: int) -> None:
        """Write one token into the ring, waiting for room."""
        self.free.acquire()
        at = 4 * (index % _SLOTS)
        _bytes(self._ring)[at : at + 4] = token.to_bytes(4, "little", signed=True)
        self.tokens.release()

    def get_token(self, index: int, worker: multiprocessing.process.BaseProcess) -> int:
        """Read the next token.

        Raises:
            RuntimeError: The worker ended.
        """
        while not self.tokens.acquire(timeout=POLL_S):
            if not worker.is_alive():
                raise RuntimeError("the worker ended")
        at = 4 * (index % _SLOTS)
        token = int.from_bytes(_bytes(self._ring)[at : at + 4], "little", signed=True)
        self.free.release()
        return token


def _bytes(memory: shared_memory.SharedMemory) -> memoryview:
    if memory.buf is None:
        raise RuntimeError(f"the shared memory {memory.name} is closed")
    return memory.buf


def work(channel: Channel, options: argparse.Namespace, port: int | None) -> None:
    """Run the worker: weights, a loop over requests, and a thread that only ticks."""
    inherited = sorted({"torch", "numpy"} & set(sys.modules))
    import torch  # noqa: PLC0415  the front end must not pay for it

    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(2)
    torch.manual_seed(options.seed)
    kernel = _compiled(options.kernel) if options.kernel else None  # mapped for as long as the process lives
    model, operations = load(options)
    told = {"inherited": lambda _: {"modules": inherited}}
    start_rank("worker", {**operations, **told}, torch=torch.__version__)
    threading.Thread(target=_tick, name="reference-tick", daemon=True).start()
    if port is not None:
        threading.Thread(target=_echo, args=(port,), name="reference-echo", daemon=True).start()
    channel.ready.set()
    written = 0
    while os.getppid() == parent:
        if channel.requested.acquire(timeout=POLL_S):
            written = _serve_request(channel, model, written)
    del kernel


def load(options: argparse.Namespace) -> tuple[Generator, Mapping[str, Operation]]:
    """Return the model, and what its rank answers beyond what every rank does."""
    if options.weights is None:
        return Model(options.weights_seed, options.weights_bytes, noise=options.noise), {}
    from coldsnap.engines.ordered import ordered  # noqa: PLC0415
    from coldsnap.testing.reference_memory import ReleasableModel  # noqa: PLC0415  it imports torch

    model = ReleasableModel(options.weights, options.kv_bytes, noise=options.noise, hoard=options.hoard)
    return model, {**model.operations(), **ordered.operations()}


class Generator(Protocol):
    """What answers requests."""

    def generate(self, prompt: str, max_tokens: int, temperature: float, *, cached: bool) -> Iterator[int]:
        """Continue a prompt."""


def _serve_request(channel: Channel, model: Generator, written: int) -> int:
    request = channel.get_request()
    asked = request["prompt"], request["max_tokens"], request["temperature"]
    for token in model.generate(*asked, cached=request["cached"]):
        time.sleep(request["delay_s"])
        channel.put_token(written, token)
        written += 1
    channel.put_token(written, END)
    return written + 1


class Model:
    """A recurrent model with seeded random weights."""

    def __init__(self, seed: int, weights_bytes: int, *, noise: bool = False) -> None:
        import torch  # noqa: PLC0415

        generator = torch.Generator().manual_seed(seed)
        self.torch = torch
        self.noise = noise
        self.embedding = torch.randn(_VOCABULARY, _HIDDEN, generator=generator)
        self.output = torch.randn(_VOCABULARY, _HIDDEN, generator=generator)
        # A gain above one keeps the state wandering, so that an answer does not settle on one token.
        self.recurrent = _GAIN * torch.randn(_HIDDEN, _HIDDEN, generator=generator) / _HIDDEN**0.5
        # Memory that a real model would have, and that the answer depends on: one of its rows is added at each token.
        self.ballast = torch.randn(max(1, weights_bytes // (4 * _HIDDEN)), _HIDDEN, generator=generator)

    def generate(
        self,
        prompt: str,
        max_tokens: int,
        temperature: float,
        *,
        cached: bool = False,  # noqa: ARG002  it has no cache
    ) -> Iterator[int]:
        """Continue a prompt, byte by byte."""
        torch = self.torch
        state = torch.zeros(_HIDDEN)
        for token in prompt.encode():
            state = self._advance(state, token)
        for _ in range(max_tokens):
            logits = self.output @ state
            if self.noise:
                logits = logits + 100 * torch.randn_like(logits)
            if temperature > 0:
                token = int(torch.multinomial(torch.softmax(logits / temperature, 0), 1))
            else:
                token = int(logits.argmax())
            yield token
            state = self._advance(state, token)

    def _advance(self, state: Any, token: int) -> Any:
        row = self.ballast[(token * 7919) % len(self.ballast)]
        return self.torch.tanh(self.recurrent @ state + self.embedding[token] + row)


def _compiled(name: str) -> mmap.mmap:
    """Return a kernel as compilers keep theirs: a file of the cache, made when it is not there, and mapped."""
    path = os.path.join(os.environ["TRITON_CACHE_DIR"], name)
    if not os.path.exists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as made:
            made.write(name.encode() * 1024)
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)


def _tick() -> None:
    while True:
        time.sleep(0.05)


def _echo(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while data := connection.recv(64):
            connection.sendall(data)


def draw(_: Mapping[str, Any]) -> Mapping[str, Any]:
    """Draw from every source of randomness in this process that a clone might repeat."""
    libc, torch = ctypes.CDLL(None), sys.modules.get("torch")
    return {
        "libc": [libc.random(), libc.lrand48()],
        "openssl": ssl.RAND_bytes(8).hex(),
        "tempfile": os.path.basename(tempfile.mktemp(dir="/")),  # noqa: S306 - a name, and no file
        "random": random.random(),  # noqa: S311 - what is looked at
        "uuid": uuid.uuid4().hex,
        "secrets": secrets.token_hex(8),
        **(
            {} if torch is None else {"torch": float(torch.rand(1)), "numpy": float(sys.modules["numpy"].random.rand())}
        ),
    }


def start_rank(role: str, operations: Mapping[str, Operation], **versions: str) -> None:
    """Become a rank, when this library launched the process."""
    if path := directive_path():
        known = {"coldsnap": importlib.metadata.version("coldsnap"), **versions}
        Rank(role, path, engine="reference", versions=known, operations={"draw": draw, **operations}).start()
