"""Which device takes the place of which: from the devices of a capture to those of a restore.

The one rule: a device is named by its UUID; ordinals mean something else in every process and on every machine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from attrs import evolve

from coldsnap.drivers.cuda_driver import Moves
from coldsnap.drivers.tree_record import HeldDevice
from coldsnap.errors import DriverError

__all__ = ["moves_to", "needs_by_ordinal", "with_hydration"]


def moves_to(
    captured: Sequence[HeldDevice], placed: Sequence[str], *, present: Collection[str], chosen: bool
) -> tuple[tuple[str, str], ...]:
    """Return the device of the capture and the one to take instead, for every device; empty when all stay.

    Args:
        captured: The devices of the capture, in their order.
        placed: UUIDs of the devices to restore to, in their order.
        present: UUIDs of all devices of this machine.
        chosen: Whether somebody chose ``placed``; else the devices of the capture are taken where they are present.

    Raises:
        DriverError: Fewer devices are placed than the capture had memory on.
    """
    old = [device.uuid for device in captured]
    if not chosen and set(old) <= set(present):
        return ()
    if len(placed) < len(old):
        raise DriverError(
            f"the captured processes had memory on {len(old)} devices ({', '.join(old)}), {len(placed)} are placed: "
            "name as many in placement.devices",
            command="cuda restore",
        )
    # The driver wants every device of the checkpoint in the list, or no list (cuCheckpointProcessRestore).
    return () if old == list(placed[: len(old)]) else tuple(zip(old, placed, strict=False))


def with_hydration(captured: Sequence[HeldDevice], mapped_bytes: Sequence[int]) -> tuple[HeldDevice, ...]:
    """Return the devices of a capture with what their workers will map after the CUDA restore.

    Args:
        captured: The devices of the capture, in their order.
        mapped_bytes: Of each worker, in the order of their ranks, which is that of their devices. Where several share
            several devices nobody can say what goes where, and nothing is counted.
    """
    sizes = [sum(mapped_bytes)] if len(captured) == 1 else mapped_bytes
    if len(captured) != len(sizes):
        return tuple(captured)
    return tuple(
        evolve(device, needs_bytes=device.needs_bytes + size) for device, size in zip(captured, sizes, strict=True)
    )


def needs_by_ordinal(captured: Sequence[HeldDevice], moves: Moves, devices: Sequence[str]) -> tuple[int, ...]:
    """Return what must be free, device by device.

    Args:
        captured: The devices of the capture.
        moves: What takes their places.
        devices: UUIDs of the devices as the driver orders them.

    Raises:
        DriverError: One of them is not there.
    """
    instead, needs = dict(moves), dict.fromkeys(devices, 0)
    for device in captured:
        uuid = instead.get(device.uuid, device.uuid)
        if uuid not in needs:
            raise DriverError(
                f"the device {uuid} is not visible to the CUDA helper, which sees {', '.join(devices) or 'none'}: "
                "let CUDA_VISIBLE_DEVICES name it, or choose another device",
                command="cuda restore",
            )
        needs[uuid] += device.needs_bytes
    return tuple(needs.values())
