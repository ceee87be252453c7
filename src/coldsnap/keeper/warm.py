"""The mark of a warm engine: its processes are back, its weights are not, and nobody has asked it anything yet.

The one rule: the mark is there before the engine is anybody's, and goes before the first weight comes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from attrs import frozen

from coldsnap.keeper import layout

__all__ = ["Warm", "is_warm", "mark_warm", "unmark_warm", "warm_of"]


@frozen(kw_only=True)
class Warm:
    """What a warm engine came from.

    Attributes:
        artifact: The artifact's directory.
        digest: Its digest.
    """

    artifact: str
    digest: str


def mark_warm(run_dir: str | os.PathLike[str], warm: Warm) -> None:
    """Mark an engine as warm."""
    with _opened(run_dir) as fd:
        layout.write_json(fd, layout.WARM, {"format": 1, "artifact": warm.artifact, "digest": warm.digest})


def warm_of(run_dir: str | os.PathLike[str]) -> Warm | None:
    """Return what a warm engine came from; None when it is not warm."""
    with contextlib.suppress(OSError), _opened(run_dir) as fd:
        value = layout.read_json(fd, layout.WARM)
        if value is not None and value.get("format") == 1:
            return Warm(artifact=str(value["artifact"]), digest=str(value["digest"]))
    return None


def is_warm(run_dir: str | os.PathLike[str]) -> bool:
    """Tell whether an engine is warm."""
    return warm_of(run_dir) is not None


def unmark_warm(run_dir: str | os.PathLike[str]) -> None:
    """Take the mark away: from here on the engine runs in the end, or is no more."""
    with _opened(run_dir) as fd:
        os.unlink(layout.WARM, dir_fd=fd)


@contextlib.contextmanager
def _opened(run_dir: str | os.PathLike[str]) -> Iterator[int]:
    fd = layout.open_directory(os.fspath(run_dir))
    try:
        yield fd
    finally:
        os.close(fd)
