"""CRIU on a throw-away process, through its command line.

The one rule: only probes use it. A workload's tree goes through the drivers, which speak CRIU's protocol; here a
process of our own making needs no options worth a conversation.
"""

from __future__ import annotations

import time
from pathlib import Path

from coldsnap.errors import ColdSnapError
from coldsnap.host.canary import Canary
from coldsnap.host.child import ChildError, last_lines, output

# libcuda takes file locks and leaves unlinked names; both sides of a round trip must say so.
OPTIONS = ("--link-remap", "--file-locks")


class FreezeError(ColdSnapError):
    """CRIU refused; ``.phase`` is ``dump``, ``exit`` or ``restore``."""

    phase: str


def dump(criu: str, canary: Canary, images: Path, *, leave_running: bool = False) -> None:
    """Dump the process; unless it is left running, it is gone afterwards, its pid free.

    Raises:
        FreezeError: CRIU refused, or the pid stayed taken.
    """
    images.mkdir()
    words = ["dump", "-t", str(canary.pid), *(["--leave-running"] if leave_running else [])]
    _run(criu, words, canary, images, "dump")
    if not leave_running and not canary.gone():
        raise FreezeError(f"pid {canary.pid} was still taken after the dump", phase="exit")


def restore(criu: str, canary: Canary, images: Path) -> None:
    """Thaw the process under its own pid.

    Raises:
        FreezeError: CRIU refused.
    """
    _run(criu, ["restore", "--restore-detached"], canary, images, "restore")


def _run(criu: str, words: list[str], canary: Canary, images: Path, phase: str) -> None:
    log = images / f"{phase}.log"
    left = canary.deadline - time.monotonic()
    try:
        output([criu, *words, "-D", str(images), "-o", log.name, "-v2", *OPTIONS], timeout_s=max(left, 0.1))
    except ChildError as error:
        said = last_lines(log.read_text(errors="replace")) if log.exists() else ""
        raise FreezeError(f"criu {phase}: {said or error}", phase=phase) from error
