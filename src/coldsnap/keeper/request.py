"""What a keeper can be asked: the name and the arguments of every request.

The one rule: a request has exactly the arguments of its operation, of their types, or is refused before anything is
done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ARGUMENTS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "hello": {},
    "begin": {"operation": str, "undo": list},
    "undo": {"entry": dict},
    "end": {},
    "abort": {},
    "spawn_engine": {"argv": list, "env": dict, "cwd": str, "pid_floor": int, "deny_io_uring": bool},
    "spawn_helper": {"argv": list, "env": dict, "name": str, "fds": list},
    "wait_helper": {"pid": int, "timeout_s": (int, float)},
    "adopt": {"pid": int},
    "tree": {},
    "signal": {"signal": int, "whom": str},
    "status": {},
    "stop": {"grace_s": (int, float)},
}


class Refused(Exception):
    """A request that is answered with ``ok: false``."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


def checked(message: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the operation and its arguments.

    Raises:
        Refused: There is no such operation, or its arguments are others.
    """
    op = message.get("op")
    expected = ARGUMENTS.get(op) if isinstance(op, str) else None
    if expected is None or not isinstance(op, str):
        raise Refused("format", f"unknown op {op!r}; known: {', '.join(ARGUMENTS)}")
    given = {name: value for name, value in message.items() if name != "op"}
    if set(given) != set(expected):
        raise Refused("format", f"{op} takes {sorted(expected)}, found {sorted(given)}")
    for name, kind in expected.items():
        if not isinstance(given[name], kind) or (isinstance(given[name], bool) and kind is not bool):
            raise Refused("format", f"{op}: {name} has the wrong type {type(given[name]).__name__}")
    return op, given


def require_texts(argv: list[Any], env: dict[str, Any], cwd: str) -> None:
    """Refuse a command, an environment or a directory that the kernel could not be given.

    Raises:
        Refused: With what they must be.
    """
    texts = [*argv, *env, *env.values(), cwd]
    if not argv or any(not isinstance(text, str) or "\0" in text for text in texts) or any("=" in name for name in env):
        raise Refused(
            "format", "argv and the environment are non-empty lists and objects of strings without NUL, names without ="
        )
