"""Named fault points: count them, die at one, fail at one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from coldsnap.artifact.durable import FaultPoint


def points_of(work: Callable[[FaultPoint], object]) -> list[str]:
    points: list[str] = []
    work(points.append)
    return points


def failing_at(count: int, error: int) -> FaultPoint:
    remaining = [count]

    def at(point: str) -> None:
        remaining[0] -= 1
        if remaining[0] < 0:
            raise OSError(error, os.strerror(error))

    return at


def killed_at(count: int, work: Callable[[FaultPoint], object]) -> bool:
    """Run ``work`` in a child that is killed at its ``count``-th fault point; tell whether it was."""
    child = os.fork()
    if child == 0:
        remaining = [count]

        def at(point: str) -> None:
            remaining[0] -= 1
            if remaining[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            work(at)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)
