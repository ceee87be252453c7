"""What the guard hands to the keeper it forks.

The one rule: everything a keeper needs of the outside is opened before it leaves for its own namespaces.
"""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

from coldsnap.keeper import layout


class Birth(NamedTuple):
    """Descriptors and facts; ``root_fd`` is the host's ``/``, since the keeper's own has another ``/dev/shm``."""

    run_dir: str
    dir_fd: int
    rank_fd: int
    work_fd: int
    root_fd: int
    private: bool
    labels: dict[str, str]
    listener: socket.socket
    first: socket.socket
    link: socket.socket
    life_fd: int
    guard_pid: int
    keeper_pid: int = 0  # known to the guard only, once it has forked

    @property
    def tree_dir(self) -> str:
        """Where the tree sees the directory that its ranks share with us."""
        return layout.IN_PROCESS_DIR if self.private else os.path.join(self.run_dir, layout.RANK)

    @property
    def tmp_dir(self) -> str:
        """What TMPDIR is to be in the tree."""
        return layout.TMP_DIR if self.private else os.path.join(self.tree_dir, layout.TMP)
