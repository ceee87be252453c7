"""The n610 driver: an initialised engine, device state and all, becomes a capsule, and the capsule an engine again.

Capture, with the workload quiesced:

1. ``prepare_dump``: audit the whole tree; what CRIU cannot dump is named before anything is frozen.
2. ``CudaHelper.lock`` then ``checkpoint``: every process that holds the NVIDIA driver is locked, children first; only
   when all are, their device memory moves into host memory, where it is process memory like any other.
3. ``dump_tree``: CRIU writes the image of every process; while all stand still, /dev/shm is copied. The tree stays
   stopped until the artifact is committed, or runs on.
4. The workload is stopped; or ``continue_tree``, then ``CudaHelper.restore`` and ``unlock``, and it serves on.

Restore, under a fresh keeper:

1. ``stage``: /dev/shm is put back, and ports are chosen and held; runs beside the verification of files.
2. ``thaw_tree``: CRIU makes every process again, with the pids it had, as a child of the keeper.
3. ``CudaHelper.restore`` then ``unlock``: in every process that had device state, children first.

On a host without a GPU the CUDA steps are absent, and so is all they would do. The one rule: a step that fails leaves
what it found, a dump its workload running, a thaw no process at all.
"""

from __future__ import annotations

import signal

from coldsnap.drivers.audit import PATIENCE_S, Audit, audit_tree
from coldsnap.drivers.base import TreeKeeper
from coldsnap.drivers.dump import DumpedTree, dump_tree, opened_directory
from coldsnap.drivers.findings import Severity
from coldsnap.drivers.messages import load_messages
from coldsnap.drivers.rebind import Rebind
from coldsnap.drivers.thaw import StagedTree, ThawedTree, stage_tree, thaw_tree
from coldsnap.drivers.volatile import remove_volatile
from coldsnap.drivers.volatile_index import VolatileFiles

__all__ = [
    "Audit",
    "DumpedTree",
    "Rebind",
    "StagedTree",
    "ThawedTree",
    "continue_tree",
    "dump_tree",
    "load_messages",
    "prepare_dump",
    "remove_leftovers",
    "stage_tree",
    "thaw_tree",
]


def prepare_dump(keeper: TreeKeeper, *, secrets: Severity = "note", patient: bool = False) -> Audit:
    """Audit a running tree before anything is locked or frozen.

    Args:
        keeper: The tree's.
        secrets: How severe an environment name is that looks secret, in any of its processes.
        patient: Whether connections of clients may be there still: they are looked at again when the engine is quiet.

    Returns:
        What was found; ``nvidia_pids`` are the processes to lock and checkpoint.

    Raises:
        AdmissionError: Something in the tree cannot be dumped; every obstacle with its remedy.
        DriverError: There is no tree.
    """
    audit = audit_tree(keeper, secrets=secrets, patience_s=0 if patient else PATIENCE_S)
    audit.require(patient=patient)
    return audit


def continue_tree(keeper: TreeKeeper) -> None:
    """Let a tree that a dump left stopped run on.

    Args:
        keeper: The tree's.
    """
    keeper.signal(signal.SIGCONT, whom="tree")


def remove_leftovers(volatile: VolatileFiles) -> None:
    """Remove what a killed tree left in the host's /dev/shm, where no namespace took it along.

    Args:
        volatile: Of its capsule, with ``process.namespace = "host"``.
    """
    with opened_directory("/") as root_fd:
        remove_volatile(root_fd, (entry for entry in volatile.entries if entry.kind != "dir"))
