"""The undo entries of an operation, run by the keeper while it lives.

The one rule: while the memory of the engine is not back, its door stays closed and what that memory held is kept.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from coldsnap.keeper import control, layout, undo
from coldsnap.keeper.birth import Birth
from coldsnap.keeper.tree import Tree

CONTROL_TIMEOUT_S = 5.0
HYDRATE_TIMEOUT_S = 600.0  # of a whole model, from a slow disk; nothing but this brings the workload back


class Undoing:
    """What runs entries, on a tree of processes and in the names of a birth."""

    def __init__(self, birth: Birth, tree: Tree, tree_fd: int) -> None:
        self._birth = birth
        self._tree = tree
        self._tree_fd = tree_fd

    def run_all(self, entries: Sequence[undo.Undo]) -> list[str]:
        """Run entries, last first, and return what was done, a sentence for each."""
        did: list[str] = []
        asleep = False
        for entry in reversed(entries):
            # An open door would have the engine answer from memory that holds anything, and nobody could tell.
            # And a removal would take away what the memory held.
            did.append(self._run_asleep(entry) if asleep else self.run(entry))
            asleep = asleep or (entry == undo.control("hydrate") and undo.NOT_DONE in did[-1])
        return did

    def _run_asleep(self, entry: undo.Undo) -> str:
        if entry == undo.control("resume"):
            return undo.STAYS_CLOSED
        if entry["kind"] == "remove" and entry["kept"]:
            return undo.keep_path(self._birth.root_fd, self._birth.dir_fd, self._birth.run_dir, entry)
        return self.run(entry)

    def run(self, entry: undo.Undo) -> str:
        """Run one entry, and return what was done."""
        match entry["kind"]:
            case "remove":
                return undo.remove_path(self._birth.root_fd, entry)
            case "continue":
                self._tree.signal(signal.SIGCONT, [process.pid for process in self._tree.members()])
                return "let the tree continue"
            case "control":
                return self._ask_ranks(entry["op"])
            case _:
                self._tree.kill()
                return "killed the tree"

    def _ask_ranks(self, op: str) -> str:
        control_fd = os.open(layout.CONTROL, layout.DIRECTORY, dir_fd=self._tree_fd)
        try:
            timeout_s = HYDRATE_TIMEOUT_S if op == "hydrate" else CONTROL_TIMEOUT_S
            answers = control.ask(control_fd, {"op": op, "timeout_s": timeout_s}, timeout_s)
        finally:
            os.close(control_fd)
        bad = [
            f"{name}: {answer}" for name, answer in answers.items() if isinstance(answer, str) or not answer.get("ok")
        ]
        return f"asked {len(answers)} ranks to {op}" + (f"{undo.NOT_DONE}{'; '.join(bad)}" if bad else "")
