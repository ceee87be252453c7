"""Reasons against: why a host, a place on it, a command or an artifact's namespace will not do.

The one rule: pure, and complete: each function returns every reason, and a refusal names them all at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from coldsnap.artifact import CapsuleUnit
from coldsnap.engines.base import LaunchCommand
from coldsnap.errors import AdmissionError
from coldsnap.host.doctor import problems
from coldsnap.host.facts import HostFacts
from coldsnap.host.secrets import secret_names
from coldsnap.operation import Placement, UnitPlacement
from coldsnap.policy import ResolvedPolicy

__all__ = ["command_problems", "host_problems", "namespace_problems", "require"]

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - compared, never written


def host_problems(resolved: ResolvedPolicy, host: HostFacts, unit: UnitPlacement | None) -> list[str]:
    """Return every reason why this host, or this place on it, will not do."""
    found = list(problems(host, namespace=resolved["process.namespace"]))
    if unit is not None and unit.port in host.listening_ports:
        found.append(
            f"{unit.host}: port {unit.port} is in use; stop what listens there or place the engine on another port"
        )
    if unit is not None and (absent := sorted(set(unit.devices) - {gpu.index for gpu in host.gpus})):
        has = ", ".join(str(gpu.index) for gpu in host.gpus) or f"none: {host.gpu_reason}"
        found.append(f"{unit.host} has no GPU {', '.join(map(str, absent))} (it has {has}); correct the placement")
    return found


def namespace_problems(capsule: CapsuleUnit, namespace: str, placement: Placement) -> list[str]:
    """Return every reason against restoring a capsule in these namespaces, in this run directory."""
    if capsule.namespace != namespace:
        sentence = f"it was captured with process.namespace = {capsule.namespace!r} and can only be restored so"
        return [f"{sentence}, not with {namespace!r}"]
    # In the host's namespaces a process finds its directive where it was at capture: nothing can be mounted over it.
    captured = os.path.dirname(capsule.run_dir)
    asked = placement.run_dir or (placement.name and os.path.join(os.path.dirname(captured), placement.name))
    if namespace == "host" and asked and asked != captured:
        sentence = f"it was captured with process.namespace = 'host' in {captured} and comes back there, not in {asked}"
        return [f"{sentence}; leave name and run_dir out of the placement"]
    return []


def command_problems(resolved: ResolvedPolicy, command: LaunchCommand) -> list[str]:
    """Return every reason against the command of an engine."""
    found = []
    if resolved["process.secrets"] == "refuse":
        found += [
            f"the environment name {name} looks secret, and a process image would hold its value; leave it out, or set "
            'process.secrets = "allow"'
            for name in secret_names(command.env)
        ]
    if resolved["process.namespace"] == "private":
        found += [
            f"{path} lies in {SHARED_MEMORY}, and an engine in private namespaces has one of its own; put it "
            'elsewhere (another tmpfs is as fast), or set process.namespace = "host"'
            for path in sorted(set(_in_shared_memory([*command.argv, command.cwd, *command.env.values()])))
        ]
    return found


def _in_shared_memory(texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        for piece in text.rsplit("=", 1)[-1].split(os.pathsep):
            if os.path.normpath(piece).startswith(f"{SHARED_MEMORY}/"):
                yield piece


def require(what: str, reasons: list[str]) -> None:
    """Raise an AdmissionError with the reasons, if there are any."""
    if reasons:
        raise AdmissionError(what, reasons)
