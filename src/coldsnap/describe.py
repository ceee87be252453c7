"""Between facts, engines and the descriptor: what an artifact says of its capture, and what a target is compared by.

The one rule: the same function describes a machine at capture and at restore, so that two descriptions differ only
where the machines do.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from coldsnap import artifact
from coldsnap.artifact.compatibility import TargetCriu, TargetEngine, TargetUnit
from coldsnap.artifact.overlay import OverlayTarget, TargetAccelerator, TargetHost
from coldsnap.engines.base import Engine
from coldsnap.engines.environment import EngineEnvironment
from coldsnap.engines.model import ModelIdentity
from coldsnap.host.contracts import CONTRACTS
from coldsnap.host.facts import HostFacts
from coldsnap.keeper.directive import ACCEPTED_ABIS, FORMAT, PLUGIN_ABI

__all__ = [
    "compatibility_unit",
    "described_engine",
    "described_model",
    "devices_of",
    "overlay_target",
    "short_name",
    "site_packages_digest",
    "target_engine",
    "target_unit",
]


def devices_of(host: HostFacts, ordinals: Sequence[int]) -> tuple[artifact.Device, ...]:
    """Return the placed GPUs as classes of machine, by slot."""
    by_index = {gpu.index: gpu for gpu in host.gpus}
    chosen = [by_index[index] for index in ordinals if index in by_index] if ordinals else list(host.gpus)
    return tuple(
        artifact.Device(
            slot=slot,
            gpu_name=gpu.name,
            compute_capability=gpu.compute_capability,
            capacity_class_bytes=gpu.capacity_class_bytes,
        )
        for slot, gpu in enumerate(chosen)
    )


def target_unit(unit: str, host: HostFacts, ordinals: Sequence[int]) -> TargetUnit:
    """Describe a host as the target of a restore."""
    criu = None
    if host.criu is not None:
        version = ".".join(map(str, host.criu.version))
        criu = TargetCriu(version=version, sha256=host.criu.build_digest, check_passed=host.criu.check_ok)
    record = host.qualification
    passed = {result.name for result in record.features if result.status == "passed"} if record else set()
    return TargetUnit(
        unit=unit,
        architecture=host.kernel.architecture,
        kernel=host.kernel.release,
        cpu_flags=frozenset(host.cpu.flags),
        criu=criu,
        nvidia_driver=host.nvidia_driver,
        devices=devices_of(host, ordinals),
        features=frozenset(passed),
    )


def compatibility_unit(unit: str, host: HostFacts, ordinals: Sequence[int], driver: str) -> artifact.CompatibilityUnit:
    """Describe the host of a capture as what a restore will be compared with."""
    floor = str(CONTRACTS[driver].minimum_driver_major) if host.gpus else None
    return artifact.CompatibilityUnit(
        unit=unit,
        architecture=host.kernel.architecture,
        kernel=host.kernel.release,
        cpu_flags=tuple(sorted(set(host.cpu.flags))),
        nvidia_driver_captured=host.nvidia_driver,
        nvidia_driver_min=floor,
        cuda_userspace=host.cuda_userspace if host.gpus else None,
        devices=devices_of(host, ordinals),
    )


def overlay_target(
    unit: str, host: HostFacts, ordinals: Sequence[int], driver: Literal["n580", "n610"], *, machine: str
) -> OverlayTarget:
    """Describe a host as exactly where an overlay fits.

    Args:
        unit: Name of the unit.
        host: Its facts.
        ordinals: The placed GPUs; empty: all.
        driver: The snapshot driver.
        machine: What identifies the machine to whoever manages it, such as the content of ``/etc/machine-id``.
    """
    kinds = Counter(
        (device.gpu_name, device.compute_capability, device.capacity_class_bytes)
        for device in devices_of(host, ordinals)
    )
    accelerators = sorted(
        TargetAccelerator(gpu_name=name, compute_capability=capability, capacity_class_bytes=size, count=count)
        for (name, capability, size), count in kinds.items()
    )
    there = TargetHost(unit=unit, host=machine, nvidia_driver=host.nvidia_driver, accelerators=tuple(accelerators))
    return OverlayTarget(snapshot_driver=driver, units=(there,))


def site_packages_digest(environment: EngineEnvironment) -> str:
    """Return ``sha256:<hex>`` over every installed distribution but coldsnap, wherever they lie."""
    names = sorted(
        name for site in environment.sites for name in site.distributions if not name.startswith("coldsnap-")
    )
    return f"sha256:{hashlib.sha256(chr(10).join(names).encode()).hexdigest()}"


def target_engine(engine: Engine, environment: EngineEnvironment, *, cuda_userspace: str | None) -> TargetEngine:
    """Describe an engine's environment as the target of a restore."""
    return TargetEngine(
        kind=engine.kind,
        version=environment.versions.get(engine.distribution, "none"),
        torch=environment.versions.get("torch", "none"),
        python=environment.python_version,
        site_packages_sha256=site_packages_digest(environment),
        coldsnap=environment.versions.get("coldsnap", "none"),
        cuda_userspace=cuda_userspace,
        plugin_abis=tuple(sorted(ACCEPTED_ABIS)),
        directive_formats=(FORMAT,),
    )


def described_engine(
    engine: Engine,
    environment: EngineEnvironment,
    model: artifact.Model,
    *,
    argv: Sequence[str],
    environ: Mapping[str, str],
    redacted: Sequence[str],
    cwd: str,
) -> artifact.Engine:
    """Describe a captured engine for the descriptor."""
    return artifact.Engine(
        kind=engine.kind,
        version=environment.versions.get(engine.distribution, "none"),
        model=model,
        argv=tuple(argv),
        environment={name: value for name, value in environ.items() if name not in redacted},
        redacted=tuple(sorted(redacted)),
        cwd=cwd,
        python=artifact.Python(
            version=environment.python_version,
            executable=environment.executable,
            site_packages_sha256=site_packages_digest(environment),
        ),
        torch=environment.versions.get("torch", "none"),
        coldsnap=environment.versions.get("coldsnap", "none"),
        plugin_abi=PLUGIN_ABI,
        directive_format=FORMAT,
        served_name=engine.served_model,
    )


def described_model(model: ModelIdentity) -> artifact.Model:
    """Describe the model that is served for the descriptor."""
    local = model.kind == "local"
    return artifact.Model(
        id=Path(model.model).name if local else model.model,
        revision=model.revision,
        path=os.path.abspath(model.model) if local else None,
    )


def short_name(text: str) -> str:
    """Return a text as a piece of a capture id: lower case, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:32] or "engine"
