"""Which snapshot driver a placement gets.

The one rule: the weakest host decides, and an incomplete inventory is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Sequence

from coldsnap.errors import AdmissionError
from coldsnap.host.contracts import CONTRACTS, unmet
from coldsnap.host.facts import Facts, HostFacts

QUALIFY = "run coldsnap.qualify_host() on it, then probe again"


def select_driver(
    facts: Facts, hosts: Sequence[str], *, compatibility_driver: str = "release", workers: int = 1
) -> tuple[str, str]:
    """Choose the snapshot driver for a placement.

    Args:
        facts: What is known of the machines.
        hosts: Names of the hosts of the placement.
        compatibility_driver: ``release``: the NVIDIA driver's number decides. ``probed``: for a single worker, a
            qualification record of this boot decides. ``n580``: that one, if every host can.
        workers: Ranks of the engine, over all hosts.

    Returns:
        The contract's id and the reason for it.

    Raises:
        AdmissionError: No driver fits, or not all is known.
    """
    placed = [facts.host(name) for name in dict.fromkeys(hosts)]
    if not placed:
        raise AdmissionError("the placement names no host")
    unknown = [f"{host.name}: {host.gpu_reason}" for host in placed if not host.gpus_known]
    if unknown:
        raise AdmissionError("the GPUs of the placement are not all known, and a driver is not guessed", unknown)
    bare = [host.name for host in placed if not host.gpus]
    if compatibility_driver == "n580":
        return _asked_for("n580", placed)
    if len(bare) == len(placed):
        return "n610", "no GPU on any host: process state only, no CUDA step"
    if bare:
        lines = [
            f"{host.name}: {f'{len(host.gpus)} GPUs' if host.gpus else f'no GPU: {host.gpu_reason}'}" for host in placed
        ]
        raise AdmissionError("the placement mixes hosts with and without a GPU; place the engine on one kind", lines)
    if compatibility_driver == "probed" and workers == 1:
        return _probed(placed)
    return _by_release(placed, compatibility_driver)


def _asked_for(driver: str, placed: Sequence[HostFacts]) -> tuple[str, str]:
    floor = CONTRACTS[driver].minimum_driver_major
    majors = _majors([host for host in placed if host.gpus])
    if lines := [
        f"{name}: NVIDIA driver {major}, needed {floor} or newer" for name, major in majors.items() if major < floor
    ]:
        raise AdmissionError(f"the NVIDIA driver is too old for {driver}; update it", lines)
    return driver, "the policy asks for it" + ("" if majors else "; no GPU on any host: nothing of a driver is needed")


def _majors(placed: Sequence[HostFacts]) -> dict[str, int]:
    majors = {host.name: host.driver_major for host in placed}
    unknown = [
        f"{name}: the version of the NVIDIA driver is unknown" for name, major in majors.items() if major is None
    ]
    if unknown:
        raise AdmissionError("a driver is not guessed", unknown)
    return {name: major for name, major in majors.items() if major is not None}


def _by_release(placed: Sequence[HostFacts], rule: str) -> tuple[str, str]:
    majors = _majors(placed)
    name, smallest = min(majors.items(), key=lambda item: item[1])
    note = "; several workers: the number decides even where one worker would be probed" if rule == "probed" else ""
    for contract in sorted(CONTRACTS.values(), key=lambda each: -each.minimum_driver_major):
        if smallest >= contract.minimum_driver_major:
            reason = f"smallest NVIDIA driver is {smallest} ({name}), at least {contract.minimum_driver_major}{note}"
            return contract.id, reason
    floor = min(contract.minimum_driver_major for contract in CONTRACTS.values())
    lines = [
        f"{host}: NVIDIA driver {major}, needed {floor} or newer" for host, major in majors.items() if major < floor
    ]
    raise AdmissionError("the NVIDIA driver is too old for any snapshot driver; update it", lines)


def _probed(placed: Sequence[HostFacts]) -> tuple[str, str]:
    contract = CONTRACTS["n610"]
    majors = _majors(placed)
    floor = contract.probed_driver_major or contract.minimum_driver_major
    lines = []
    for host in placed:
        record = host.qualification
        if majors[host.name] < floor:
            lines.append(f"{host.name}: NVIDIA driver {majors[host.name]}, needed {floor} or newer even when probed")
        elif record is None:
            lines.append(f"{host.name}: no qualification record ({host.qualification_reason}); {QUALIFY}")
        else:
            lines += [f"{host.name}: {sentence}; {QUALIFY}" for sentence in unmet(contract, record)]
    if lines:
        raise AdmissionError('compatibility.driver = "probed" is not admitted', lines)
    return contract.id, "single worker, every feature of n610 passed in the qualification record of this boot"
