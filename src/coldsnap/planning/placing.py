"""Where a plan takes place: the unit and its host, the driver there, its GPUs and its CRIU.

The one rule: pure; whatever is said of a machine stands in the facts.
"""

from __future__ import annotations

from typing import Literal

from coldsnap.errors import UnsupportedError
from coldsnap.host.facts import Facts, HostFacts
from coldsnap.host.selection import select_driver
from coldsnap.operation import Placement, UnitPlacement
from coldsnap.plan import Decision
from coldsnap.policy import Policy
from coldsnap.steps import AdmitHost

__all__ = [
    "UNIT",
    "admit_host",
    "chosen_driver",
    "criu_path",
    "cuda_decision",
    "devices_for",
    "driver_decision",
    "placed",
]

UNIT = "unit-0"


def placed(placement: Placement, facts: Facts) -> tuple[UnitPlacement, HostFacts]:
    """Return the unit with the front end, and its host.

    Raises:
        UnsupportedError: There are several units.
    """
    if len(placement.units) > 1:
        raise UnsupportedError(
            f"a placement of {len(placement.units)} units", field="placement.units", works="one unit on one host"
        )
    return placement.front, facts.host(placement.front.host)


def chosen_driver(policy: Policy, facts: Facts, unit: UnitPlacement | None, workers: int) -> tuple[str, str]:
    """Return the snapshot driver, and why.

    Raises:
        AdmissionError: No driver fits, or not all is known of the hosts.
    """
    rule = policy.resolved()["compatibility.driver"]
    hosts = ["local" if unit is None else unit.host]
    return select_driver(facts, hosts, compatibility_driver=rule, workers=workers)


def driver_decision(driver: str, why: str) -> Decision:
    """Return the decision that names the driver."""
    return Decision(name="driver", requested="", layer="", effective=driver, reason=why)


def cuda_decision(host: HostFacts, *, captured: bool = True, held: bool = True) -> Decision:
    """Return the decision that tells whether a plan has CUDA steps.

    Args:
        host: Where the plan runs.
        captured: Whether the artifact was captured on a GPU.
        held: Whether the process image has to do with the driver.
    """
    if host.gpus and not captured:
        effective, reason = "left out", "the artifact was captured on a host without GPU"
    elif host.gpus and not held:
        effective, reason = "left out", "a template has nothing of a GPU"
    elif host.gpus:
        effective, reason = "in the plan", f"{host.name} has {len(host.gpus)} GPU{'s' * (len(host.gpus) > 1)}"
    else:
        effective, reason = "left out", f"no GPU on {host.name}: {host.gpu_reason}"
    return Decision(name="cuda steps", requested="", layer="", effective=effective, reason=reason)


def devices_for(unit: UnitPlacement | None, host: HostFacts, workers: int) -> tuple[int, ...]:
    """Return the GPUs that an engine takes.

    Raises:
        UnsupportedError: The placement names others.
    """
    first = tuple(gpu.index for gpu in host.gpus)[:workers]
    if unit is not None and unit.devices and unit.devices != first:
        raise UnsupportedError(
            f"the GPUs {', '.join(map(str, unit.devices))}, where the engine would take {', '.join(map(str, first))}",
            field="placement.devices",
            works="no devices in the placement; CUDA_VISIBLE_DEVICES chooses which GPUs an engine sees",
        )
    return first


def admit_host(host: HostFacts, namespace: Literal["private", "host"]) -> AdmitHost:
    """Return the step that every plan on a host begins with."""
    criu = host.criu
    return AdmitHost(
        id="admit-host",
        host=host.name,
        boot_id=host.boot_id,
        criu=criu_path(host),
        criu_digest="" if criu is None else criu.build_digest,
        namespace=namespace,
    )


def criu_path(host: HostFacts) -> str:
    """Return the path of the host's CRIU, empty without one."""
    return "" if host.criu is None else host.criu.path
