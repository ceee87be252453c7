"""The n580 driver: a process that has not begun becomes a capsule, and an engine is built around it.

Capture, in one run:

1. The engine's command is not started itself: ``coldsnap.keeper.template`` is, and stops before anything of the engine.
2. ``await_template`` and ``prove_template``: every process of the tree is proven to hold no device, no library of a
   driver and no context; what cannot be decided is refused. Then the tree stands still for ten looks.
3. ``dump_template``: CRIU writes the image, and the tree goes on waiting.
4. The *same* tree is started: it loads, is asked, and leaves packs, residuals and manifests behind. Nothing is
   restored during a capture.

Restore, under a fresh keeper:

1. ``stage`` and ``thaw_tree``, as every image; it has a few megabytes, and no port to move.
2. The directive places it: address, port, devices, network. Then it becomes the engine, on this machine's driver, and
   its load fills the weights.

The one rule: an image of this driver holds nothing of an accelerator, or, for a target-local template, no context and
the exact driver release that it was taken under.
"""

from __future__ import annotations

from pathlib import Path

from coldsnap.drivers.base import TreeKeeper
from coldsnap.drivers.dump import DumpedTree, dump_tree
from coldsnap.drivers.template import ProvenTemplate, await_template, prove_template
from coldsnap.drivers.thaw import StagedTree, ThawedTree, stage_tree, thaw_tree
from coldsnap.drivers.tree_record import HeldDevice

__all__ = [
    "ABI",
    "DumpedTree",
    "ProvenTemplate",
    "StagedTree",
    "ThawedTree",
    "await_template",
    "dump_template",
    "prove_template",
    "stage_tree",
    "thaw_tree",
]

ABI = 1
"""Version of the layout inside a capsule of this driver."""


def dump_template(
    keeper: TreeKeeper,
    criu: str | Path,
    capsule_dir: Path,
    *,
    timeout_s: float,
    nvidia_pids: tuple[int, ...] = (),
    devices: tuple[HeldDevice, ...] = (),
) -> DumpedTree:
    """Write the image of a proven template into a capsule; it goes on waiting.

    Args:
        keeper: The tree's, with an operation of ours in flight.
        criu: The executable.
        capsule_dir: An empty directory.
        timeout_s: Deadline, s.
        nvidia_pids: Processes of a target-local template that hold the driver, and were checkpointed before.
        devices: Where their state was; a template without a context has none.

    Returns:
        What was dumped.

    Raises:
        AdmissionError: The audit found obstacles; nothing was frozen.
        DriverError: CRIU failed; the template waits on.
        StepTimeout: The deadline passed; the template waits on.
    """
    return dump_tree(
        keeper, criu, capsule_dir, leave="running", timeout_s=timeout_s, nvidia_pids=nvidia_pids, devices=devices
    )
