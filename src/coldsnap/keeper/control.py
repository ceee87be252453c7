"""Ask the ranks of an engine through their control sockets.

The one rule: one request, one reply, then the connection is closed, and everybody is asked at the same time; a rank
that hangs costs the deadline once, not once for each rank.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from coldsnap.errors import EngineError, PayloadMissingError, StepTimeout
from coldsnap.keeper import layout

REPLY_BYTES = 64 << 10
NO_ANSWER = "no answer in time"
_SUFFIX = ".sock"
_MARGIN_S = 2.0  # for a rank that answers at its very deadline
_LOOK_S = 0.5  # how long a dead rank may keep the others waiting


def ask(
    control_fd: int,
    request: Mapping[str, Any],
    timeout_s: float,
    roles: Sequence[str] | None = None,
    ended: Callable[[], str | None] = lambda: None,
) -> dict[str, dict[str, Any] | str]:
    """Ask every rank that listens the same.

    Args:
        control_fd: The directory of the sockets.
        request: One JSON object.
        timeout_s: For all of them together.
        roles: Only ranks with these roles.
        ended: Called twice a second; a sentence means that the engine, or a rank of it, is dead, and ends the wait.

    Returns:
        For each socket, named ``role.pid``, the reply, or a sentence about why there is none.
    """
    return ask_each(control_fd, dict.fromkeys(_names(control_fd, roles), request), timeout_s, ended)


def ask_each(
    control_fd: int,
    requests: Mapping[str, Mapping[str, Any]],
    timeout_s: float,
    ended: Callable[[], str | None] = lambda: None,
) -> dict[str, dict[str, Any] | str]:
    """Ask ranks by name, each its own.

    Args:
        control_fd: The directory of the sockets.
        requests: By ``role.pid``.
        timeout_s: For all of them together.
        ended: As for :func:`ask`.

    Returns:
        As :func:`ask`.
    """
    end = time.monotonic() + timeout_s
    answers: dict[str, dict[str, Any] | str] = {}
    waiting: dict[int, tuple[str, socket.socket]] = {}
    try:
        for name, request in requests.items():
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            waiting[connection.fileno()] = name, connection
            try:
                _submit(connection, f"/proc/self/fd/{control_fd}/{name}{_SUFFIX}", request, end)
            except OSError as error:
                answers[name] = f"it does not listen: {error.strerror or error}"
                waiting.pop(connection.fileno())[1].close()
        _collect(waiting, answers, end, ended)
    finally:
        for _, connection in waiting.values():
            connection.close()
    return answers


def _names(control_fd: int, roles: Sequence[str] | None) -> Iterable[str]:
    for name in sorted(os.listdir(control_fd)):
        if name.endswith(_SUFFIX) and (roles is None or name.partition(".")[0] in roles):
            yield name.removesuffix(_SUFFIX)


def _submit(connection: socket.socket, path: str, request: Mapping[str, Any], end: float) -> None:
    connection.settimeout(max(0.001, end - time.monotonic()))
    connection.connect(path)
    connection.send(json.dumps(request).encode())


def _collect(
    waiting: dict[int, tuple[str, socket.socket]],
    answers: dict[str, dict[str, Any] | str],
    end: float,
    ended: Callable[[], str | None],
) -> None:
    poll = select.poll()
    for fd in waiting:
        poll.register(fd, select.POLLIN)
    why = None
    while waiting and (left := end - time.monotonic()) > 0 and why is None:
        ready = poll.poll(min(left, _LOOK_S) * 1000)
        why = None if ready else ended()
        for fd, _ in ready:
            name, connection = waiting.pop(fd)
            poll.unregister(fd)
            answers[name] = _reply(connection)
            connection.close()
    for name, _ in waiting.values():
        answers[name] = f"the engine ended: {why}" if why else NO_ANSWER


def _reply(connection: socket.socket) -> dict[str, Any] | str:
    try:
        value = json.loads(connection.recv(REPLY_BYTES))
    except OSError as error:
        return f"the connection broke: {error.strerror}"
    except ValueError:
        return "it closed the connection, or answered something that is not JSON"
    return value if isinstance(value, dict) else f"expected one JSON object, found {value!r}"


def request_control(
    rank_dir: str | os.PathLike[str],
    op: str,
    *,
    roles: Sequence[str] | None = None,
    timeout_s: float,
    ended: Callable[[], str | None] = lambda: None,
    **arguments: Any,
) -> dict[str, dict[str, Any]]:
    """Ask the ranks of an engine to do something, and insist on an answer from each.

    Args:
        rank_dir: The run directory's ``rank``.
        op: See docs/architecture.md, "Directive and control".
        roles: Only ranks with these roles, for example ``("api",)``.
        timeout_s: Deadline for all; also sent to the ranks.
        ended: As for :func:`ask`.
        **arguments: Of the operation.

    Returns:
        The reply of each rank, by ``role.pid``; empty when no rank has a control socket.

    Raises:
        StepTimeout: Some did not answer; named.
        PayloadMissingError: One found that a pack is not there.
        EngineError: Some refused, or no longer listen; with their sentences.
    """
    control_fd = os.open(os.path.join(rank_dir, layout.CONTROL), layout.DIRECTORY)
    try:
        answers = ask(control_fd, {"op": op, "timeout_s": timeout_s, **arguments}, timeout_s + _MARGIN_S, roles, ended)
    finally:
        os.close(control_fd)
    return _insist(rank_dir, op, answers, timeout_s)


def request_each(
    rank_dir: str | os.PathLike[str],
    op: str,
    arguments: Mapping[str, Mapping[str, Any]],
    *,
    timeout_s: float,
    ended: Callable[[], str | None] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Ask ranks by name to do something, each with arguments of its own, and insist on an answer from each.

    Args:
        rank_dir: The run directory's ``rank``.
        op: See docs/architecture.md, "Directive and control".
        arguments: Of the operation, by ``role.pid``.
        timeout_s: Deadline for all; also sent to the ranks.
        ended: As for :func:`ask`.

    Returns:
        The reply of each rank, by ``role.pid``.

    Raises:
        StepTimeout: Some did not answer; named.
        PayloadMissingError: One found that a pack is not there.
        EngineError: Some refused, or no longer listen; with their sentences.
    """
    requests = {name: {"op": op, "timeout_s": timeout_s, **own} for name, own in arguments.items()}
    control_fd = os.open(os.path.join(rank_dir, layout.CONTROL), layout.DIRECTORY)
    try:
        answers = ask_each(control_fd, requests, timeout_s + _MARGIN_S, ended)
    finally:
        os.close(control_fd)
    return _insist(rank_dir, op, answers, timeout_s)


def _insist(
    rank_dir: str | os.PathLike[str], op: str, answers: Mapping[str, dict[str, Any] | str], timeout_s: float
) -> dict[str, dict[str, Any]]:
    replies = {
        name: answer for name, answer in answers.items() if isinstance(answer, dict) and answer.get("ok") is True
    }
    bad = [f"{name}: {_sentence(answer)}" for name, answer in answers.items() if name not in replies]
    if any(answer == NO_ANSWER for answer in answers.values()):
        raise StepTimeout(
            f"{op} was not answered within {timeout_s:g} s by every rank: {'; '.join(bad)}", seconds=timeout_s
        )
    for answer in answers.values():
        if isinstance(answer, dict) and answer.get("kind") == "missing":
            raise PayloadMissingError(f"{op} was not done by every rank: {'; '.join(bad)}", digest=answer["digest"])
    if bad:
        log = layout.tail(os.path.join(rank_dir, layout.ENGINE_LOG), 20)
        raise EngineError(f"{op} was not done by every rank: {'; '.join(bad)}", log_tail=log)
    return replies


def _sentence(answer: dict[str, Any] | str) -> str:
    return answer if isinstance(answer, str) else str(answer.get("error", answer))
