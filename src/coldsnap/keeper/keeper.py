"""The keeper: pid 1 of the tree's namespaces (or its subreaper), which answers its callers and reaps the tree.

The one rule: it never blocks on a caller and never dies of one. What must be waited for becomes a :class:`_Wait`,
looked at after every event; whatever a caller sends is answered with a sentence.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from coldsnap.keeper import aftermath, kernel, layout, namespaces, wire
from coldsnap.keeper.birth import Birth
from coldsnap.keeper.operations import Operations
from coldsnap.keeper.request import Refused
from coldsnap.keeper.tree import Tree

MAX_CONNECTIONS = 64
_UCRED = struct.Struct("3i")


class GuardGone(BaseException):
    """The guard was killed. Raised wherever the keeper is, even in the middle of a system call."""


def main(birth: Birth) -> NoReturn:
    """Be the keeper; the process ends here."""
    try:
        _watch_guard(birth.link)
        try:
            _enter(birth)
        except OSError as error:
            _tell_guard(birth.link, {"failed": str(error), "privilege": isinstance(error, PermissionError)})
            os._exit(1)
        _tell_guard(birth.link, {"ready": True})
        _Server(birth._replace(keeper_pid=_await_introduction(birth.link))).serve()
    except GuardGone:
        _alone(birth)
    except BaseException:  # noqa: BLE001 - a forked child: nothing may return into the guard's code
        traceback.print_exc(file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(1)


def _tell_guard(link: socket.socket, message: Mapping[str, Any]) -> None:
    try:
        wire.send(link, message)
    except OSError:
        raise GuardGone from None


def _await_introduction(link: socket.socket) -> int:
    """Wait for the guard's word that ``keeper.json`` is written; return this process's pid as the guard sees it."""
    go = wire.receive(link)
    if go is None:
        raise GuardGone
    return int(go[0]["keeper_pid"])


def _watch_guard(link: socket.socket) -> None:
    def on_death(_number: int, _frame: FrameType | None) -> None:
        # A process of the tree may send this signal too (some engines signal their parent): believe the socket.
        try:
            gone = not link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError as error:
            gone = not isinstance(error, BlockingIOError)
        if gone:
            raise GuardGone

    signal.signal(signal.SIGUSR1, on_death)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    kernel.die_with_parent(signal.SIGUSR1)
    kernel.set_name(kernel.KEEPER)


def _enter(birth: Birth) -> None:
    if birth.private:
        namespaces.enter(os.path.join(birth.run_dir, layout.RANK), birth.rank_fd)
    else:
        kernel.become_subreaper()


def _alone(birth: Birth) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    Tree(private=birth.private).kill()
    aftermath.settle(
        birth.run_dir, birth.dir_fd, birth.root_fd, state="killed", cause="the guard of its keeper was killed"
    )
    layout.unlock(birth.dir_fd)


class _Wait(NamedTuple):
    connection: int
    ready: Callable[[], Mapping[str, Any] | None]  # the reply, or None: not yet
    deadline: float
    late: Mapping[str, Any]


class _Server:
    def __init__(self, birth: Birth) -> None:
        self.birth = birth
        tree_fd = os.open(
            birth.tree_dir, layout.DIRECTORY
        )  # after the mounts: engine.log must lie in the tree's namespace
        self.operations = Operations(birth, Tree(private=birth.private), tree_fd)
        self.selector = selectors.DefaultSelector()
        self.connections: dict[int, socket.socket] = {}
        self._numbers = itertools.count(1)  # descriptors are used again, these are not
        self.waits: list[_Wait] = []
        self._hello_fds = [*(os.open(path, layout.DIRECTORY) for path in (layout.SHM, "/proc", "/")), birth.life_fd]

    def serve(self) -> NoReturn:
        """Answer until the end of the tree."""
        self._wake_on_children()
        self.birth.listener.setblocking(False)
        self.selector.register(self.birth.listener, selectors.EVENT_READ, self._accept)
        self.selector.register(self.birth.link, selectors.EVENT_READ, self._hear_guard)
        self._answer(self._add(self.birth.first), {"op": "hello"}, [])
        # Advance before the first event too: the first caller may be dead already.
        while (final := self._advance()) is None:
            for key, _ in self.selector.select(self._patience()):
                key.data()
        # The killing is done and the callers have heard of it; now the guard removes or records.
        _tell_guard(self.birth.link, final)
        os._exit(0)

    def _advance(self) -> dict[str, Any] | None:
        self.operations.tree.reap()
        self.operations.advance(time.monotonic(), connected=bool(self.connections))
        self._settle_waits()
        return self.operations.finish

    def _wake_on_children(self) -> None:
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)

        def drain() -> None:
            with contextlib.suppress(BlockingIOError):
                os.read(reader, 4096)

        self.selector.register(reader, selectors.EVENT_READ, drain)

    def _patience(self) -> float | None:
        moments = [wait.deadline for wait in self.waits]
        if (moment := self.operations.next_moment()) is not None:
            moments.append(moment)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _hear_guard(self) -> None:
        if wire.receive(self.birth.link) is None:
            raise GuardGone

    # Connections

    def _accept(self) -> None:
        try:
            connection, _ = self.birth.listener.accept()
        except OSError:
            return
        uid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[1]
        refusal = None
        if uid not in {0, os.geteuid()}:
            refusal = _refusal("peer", f"this keeper serves uid {os.geteuid()}, the caller has uid {uid}")
        elif len(self.connections) >= MAX_CONNECTIONS:
            refusal = _refusal("state", f"this keeper has {MAX_CONNECTIONS} callers already")
        if refusal is not None:
            with connection, contextlib.suppress(OSError):
                wire.send(connection, refusal, flags=socket.MSG_DONTWAIT)
            return
        self._add(connection)

    def _add(self, connection: socket.socket) -> int:
        number = next(self._numbers)
        connection.setblocking(False)
        self.connections[number] = connection
        self.selector.register(connection, selectors.EVENT_READ, lambda: self._hear(number))
        return number

    def _drop(self, number: int) -> None:
        connection = self.connections.pop(number)
        self.selector.unregister(connection)
        self.waits = [wait for wait in self.waits if wait.connection != number]
        self.operations.caller_gone(number)
        connection.close()

    def _hear(self, number: int) -> None:
        if number not in self.connections:
            return
        try:
            received = wire.receive(self.connections[number])
        except wire.WireError as error:
            self._reply(number, _refusal("format", str(error)))
            return
        except BlockingIOError:
            return
        except OSError:
            received = None
        if received is None:
            self._drop(number)
            return
        message, fds = received
        try:
            self._answer(number, message, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _answer(self, number: int, message: Mapping[str, Any], fds: list[int]) -> None:
        try:
            answer = self.operations.perform(number, message, fds)
        except Refused as refused:
            answer = _refusal(refused.kind, str(refused))
        except OSError as error:
            answer = _refusal("os", str(error))
        except Exception as error:  # noqa: BLE001 - a caller must not be able to end the tree by a strange request
            traceback.print_exc(file=sys.stderr)
            answer = _refusal("os", f"the keeper failed: {type(error).__name__}: {error}")
        if isinstance(answer, tuple):
            self.waits.append(_Wait(number, *answer))
        else:
            self._reply(number, answer, self._hello_fds if message.get("op") == "hello" else [])

    def _reply(self, number: int, answer: Mapping[str, Any], fds: list[int] | None = None) -> None:
        try:
            wire.send(self.connections[number], {"ok": True, **answer}, fds or (), flags=socket.MSG_DONTWAIT)
        except OSError:
            # Gone, or a caller that sends without reading: nobody waits for it.
            self._drop(number)

    def _settle_waits(self) -> None:
        waits, self.waits = self.waits, []
        now = time.monotonic()
        for wait in waits:
            answer = wait.ready()
            if answer is None and now < wait.deadline:
                self.waits.append(wait)
            elif wait.connection in self.connections:
                self._reply(wait.connection, wait.late if answer is None else answer)


def _refusal(kind: str, sentence: str) -> dict[str, Any]:
    return {"ok": False, "kind": kind, "error": sentence}
