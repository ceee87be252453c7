"""What happens when a tree ends unasked: files are undone, and ``outcome.json`` tells the story.

The one rule: it is done once, by whoever is left: the guard when the keeper died, the keeper when the guard died, and
the next one who looks when both did.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Any

from coldsnap.keeper import journal, layout, undo


def settle(
    run_dir: str, dir_fd: int, root_fd: int, *, state: str, cause: str, end: int | None = None
) -> dict[str, Any]:
    """Undo what can be undone without a tree, and write ``outcome.json``.

    Args:
        run_dir: The run directory, in the caller's world.
        dir_fd: The same, open.
        root_fd: The root directory of the caller's world.
        state: ``exited`` (the engine by itself) or ``killed`` (its keeper or guard).
        cause: One sentence.
        end: Exit code of the engine's root, or minus its signal, if known.

    Returns:
        What was written.
    """
    did: list[str] = []
    try:
        recorded = journal.in_flight(dir_fd)
    except (ValueError, KeyError) as error:
        recorded, did = None, [f"the journal cannot be read: {error}"]
    if recorded is not None:
        did = [undo.remove_path(root_fd, entry) for entry in reversed(recorded.entries) if entry["kind"] == "remove"]
        did += _note(dir_fd, cause, did)
    undo.let_go(root_fd, dir_fd, run_dir)
    outcome = {
        "format": layout.FORMAT,
        "state": state,
        "cause": cause,
        "exit": end,
        "operation": None if recorded is None else recorded.operation,
        "undone": did,
        "ended_unix_ns": time.time_ns(),
    }
    try:
        layout.write_json(dir_fd, layout.OUTCOME, outcome)
    except OSError as error:  # no room: whoever looks next settles it again
        sys.stderr.write(f"the outcome could not be written: {error}\n")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(layout.KEEPER_SOCKET, dir_fd=dir_fd)
    return outcome


def _note(dir_fd: int, cause: str, did: list[str]) -> list[str]:
    try:
        log = journal.Journal(dir_fd)
        log.undone(cause, did)
        log.close()
    except OSError as error:
        return [f"the journal could not be written: {error.strerror}"]
    return []


def settle_once(run_dir: str, dir_fd: int, root_fd: int, *, cause: str) -> dict[str, Any]:
    """Return the outcome of a dead run directory; write it first when nobody was left to do so.

    The caller holds the directory's lock.
    """
    outcome = layout.read_json(dir_fd, layout.OUTCOME)
    return settle(run_dir, dir_fd, root_fd, state="killed", cause=cause) if outcome is None else outcome


def story(outcome: dict[str, Any]) -> str:
    """Say an outcome in one sentence."""
    text = str(outcome.get("cause"))
    if operation := outcome.get("operation"):
        done = "; ".join(outcome.get("undone") or ()) or "there were no files to remove"
        text += f", during {operation}: {done}"
    return text
