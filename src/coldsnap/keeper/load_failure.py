"""Why an ordered load ended: a note of the worker beside the directive, for whoever waits for the engine.

An engine whose load fails ends with whatever its own code makes of the exception, pages of it, from several processes.
The one rule: what the worker knew is told as the worker said it, with its class and its fields.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from attrs import field, frozen

from coldsnap.artifact import canonical, record
from coldsnap.artifact.capsule import WORKER
from coldsnap.artifact.private import read_small
from coldsnap.errors import ColdSnapError, EngineError, IntegrityError
from coldsnap.keeper import layout

__all__ = ["LoadFailure", "noted", "told"]

_BEGINS, _ENDS = "load-failure-", ".json"
_MAX_BYTES = 64 << 10
_SHOWN = 4000  # of a sentence that names many things


@frozen(kw_only=True)
class LoadFailure:
    """What ended the load of one worker.

    Attributes:
        worker: Whose.
        error: Name of the exception's class.
        sentence: What it said.
        path: Of an IntegrityError: the file.
        expected: Of an IntegrityError: what was captured.
        actual: Of an IntegrityError: what was found.
    """

    format: Literal[1] = 1
    worker: str = field(validator=WORKER)
    error: str
    sentence: str
    path: str = ""
    expected: str = ""
    actual: str = ""


@contextmanager
def noted(rank_dir: str | os.PathLike[str], worker: str) -> Iterator[None]:
    """Leave a note of an error of this library that ends what is done within.

    Args:
        rank_dir: Where the directive lies.
        worker: Whose load it is.
    """
    try:
        yield
    except ColdSnapError as error:
        note = LoadFailure(
            worker=worker,
            error=type(error).__name__,
            sentence=str(error)[:_SHOWN],
            path=str(getattr(error, "path", "")),
            expected=str(getattr(error, "expected", "")),
            actual=str(getattr(error, "actual", "")),
        )
        dir_fd = os.open(rank_dir, layout.DIRECTORY)
        try:
            layout.replace(dir_fd, f"{_BEGINS}{worker}{_ENDS}", canonical.encode(record.write(note)))
        finally:
            os.close(dir_fd)
        raise


@contextmanager
def told(rank_dir: str | os.PathLike[str]) -> Iterator[None]:
    """Say what the workers have noted, where an engine is waited for and ends.

    Args:
        rank_dir: Where the directive lies.

    Raises:
        IntegrityError: A worker found other bytes than those captured.
        EngineError: Its load ended in another way, or nobody noted why.
    """
    try:
        yield
    except EngineError as error:
        _raise_noted(rank_dir, error)
        raise


def _raise_noted(rank_dir: str | os.PathLike[str], cause: EngineError) -> None:
    names = sorted(name for name in os.listdir(rank_dir) if name.startswith(_BEGINS) and name.endswith(_ENDS))
    for name in names:
        path = Path(rank_dir, name)
        data = canonical.decode(read_small(path, max_bytes=_MAX_BYTES), path=str(path), max_bytes=_MAX_BYTES)
        found = record.read(LoadFailure, data, path=str(path))
        if found.error == IntegrityError.__name__:
            message = f"the load of {found.worker} was ended: {_within(found)}"
            raise IntegrityError(message, path=found.path, expected=found.expected, actual=found.actual) from cause
        raise EngineError(f"the load of {found.worker} was ended: {found.sentence}", log_tail=cause.log_tail) from cause


def _within(failure: LoadFailure) -> str:
    """Return what an IntegrityError says between its path and its figures, which its class adds again."""
    sentence = failure.sentence.removeprefix(f"{failure.path}: ")
    return sentence.partition(f": expected {failure.expected}, found ")[0]
