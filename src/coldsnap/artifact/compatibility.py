"""Whether an artifact may be restored on given machines, and if not, why: every reason at once.

The one rule: a pure comparison of what was captured with what is there. Nothing is read here; the caller collects a
:class:`Target` from host facts and from the engine's environment. Values that could be secret are never named.

Never compared: host names, addresses, GPU UUIDs, device ordinals, interfaces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, Protocol

from attrs import frozen

from coldsnap.artifact.descriptor import CompatibilityUnit, Descriptor, Device, Model

__all__ = [
    "Comparison",
    "CompatibilityPolicy",
    "Target",
    "TargetCriu",
    "TargetEngine",
    "TargetUnit",
    "compare",
    "mismatches",
]


class CompatibilityPolicy(Protocol):
    """The leaves of ``compatibility`` in a policy."""

    @property
    def kernel(self) -> Literal["capability", "exact"]:
        """Whether another kernel release is admitted."""

    @property
    def driver(self) -> Literal["release", "probed", "n580"]:
        """Whether a contract's minimum NVIDIA release counts, or the probe of this boot."""

    @property
    def enforce_captured_driver_floor(self) -> bool:
        """Whether an NVIDIA driver older than the captured one is refused."""


@frozen(kw_only=True)
class TargetCriu:
    """The CRIU that would thaw.

    Attributes:
        version: As it says.
        sha256: Of the executable.
        check_passed: The outcome of ``criu check``.
    """

    version: str
    sha256: str
    check_passed: bool


@frozen(kw_only=True)
class TargetUnit:
    """The machine placed for one unit.

    Attributes:
        unit: Name.
        architecture: ``uname -m``.
        kernel: ``uname -r``.
        cpu_flags: Features of its processor.
        criu: None when there is none.
        nvidia_driver: Version, when there is one.
        devices: Placed accelerators, by slot.
        features: Names of host features that passed.
    """

    unit: str
    architecture: str
    kernel: str
    cpu_flags: frozenset[str]
    criu: TargetCriu | None = None
    nvidia_driver: str | None = None
    devices: tuple[Device, ...] = ()
    features: frozenset[str] = frozenset()


@frozen(kw_only=True)
class TargetEngine:
    """The environment that the image would find behind its file mappings.

    Attributes:
        kind: ``vllm``, ``sglang``, ``reference``.
        version: Of the engine.
        torch: Version.
        python: Version.
        site_packages_sha256: Digest over the installed distributions.
        coldsnap: Version inside that environment.
        cuda_userspace: CUDA version of its torch.
        model: Identity of the model that is asked for; None: whatever was captured.
        plugin_abis: Which the calling library can talk to.
        directive_formats: Which the calling library can write.
    """

    kind: str
    version: str
    torch: str
    python: str
    site_packages_sha256: str
    coldsnap: str
    cuda_userspace: str | None = None
    model: Model | None = None
    plugin_abis: tuple[int, ...]
    directive_formats: tuple[int, ...]


@frozen(kw_only=True)
class Target:
    """Where and with what an artifact would be restored.

    Attributes:
        units: One machine for each unit, by name.
        engine: Its environment, None to leave that comparison to the machine that has it.
        tensor_parallel_size: Asked for; None: whatever was captured.
    """

    units: tuple[TargetUnit, ...]
    engine: TargetEngine | None = None
    tensor_parallel_size: int | None = None


@frozen(kw_only=True)
class Comparison:
    """The outcome.

    Attributes:
        mismatches: Why not; empty: admitted.
        notes: What differs and is admitted, for the receipt.
    """

    mismatches: tuple[str, ...]
    notes: tuple[str, ...]


def mismatches(descriptor: Descriptor, target: Target, policy: CompatibilityPolicy) -> list[str]:
    """Return every reason why ``descriptor`` cannot be restored on ``target``; empty when it can."""
    return list(compare(descriptor, target, policy).mismatches)


def compare(descriptor: Descriptor, target: Target, policy: CompatibilityPolicy) -> Comparison:
    """Compare what was captured with what is there.

    Args:
        descriptor: The artifact's.
        target: The machines and the environment.
        policy: What may differ.
    """
    findings = [*_units(descriptor, target, policy)]
    if target.engine is not None:
        findings += _engine(descriptor, target.engine)
    size = descriptor.topology.tensor_parallel_size
    if target.tensor_parallel_size not in {None, size}:
        findings.append(_no(f"captured with {size} tensor-parallel workers, asked for {target.tensor_parallel_size}"))
    return Comparison(
        mismatches=tuple(text for kind, text in findings if kind == "no"),
        notes=tuple(text for kind, text in findings if kind == "note"),
    )


_Finding = tuple[Literal["no", "note"], str]


def _no(text: str) -> _Finding:
    return "no", text


def _differs(what: str, captured: object, found: object) -> Iterator[_Finding]:
    if captured != found:
        yield _no(f"{what}: captured {captured}, found {found}")


def _units(descriptor: Descriptor, target: Target, policy: CompatibilityPolicy) -> Iterator[_Finding]:
    placed = {unit.unit: unit for unit in target.units}
    for unit in descriptor.compatibility.units:
        found = placed.pop(unit.unit, None)
        if found is None:
            yield _no(f"unit {unit.unit} has no machine")
            continue
        yield from _machine(unit, found, policy)
        yield from _criu(descriptor, unit.unit, found.criu, policy)
        yield from _accelerators(unit, found, policy)
        if descriptor.compatibility.policy == "target-local-v1" and unit.nvidia_driver_captured is not None:
            # The image maps the libraries of this very release.
            release = f"unit {unit.unit}: NVIDIA driver of a target-local template"
            yield from _differs(release, unit.nvidia_driver_captured, found.nvidia_driver)
        # With "release" the number of the NVIDIA driver vouches for its features, with "probed" the probe of this boot.
        for feature in descriptor.requires.features if policy.driver == "probed" else ():
            if feature not in found.features:
                yield _no(f"unit {unit.unit}: the host feature {feature} has not passed its probe")
    for name in placed:
        yield _no(f"unit {name} is not in the artifact")


def _machine(unit: CompatibilityUnit, found: TargetUnit, policy: CompatibilityPolicy) -> Iterator[_Finding]:
    yield from _differs(f"unit {unit.unit}: architecture", unit.architecture, found.architecture)
    if policy.kernel == "exact":
        yield from _differs(f"unit {unit.unit}: kernel release", unit.kernel, found.kernel)
    elif unit.kernel != found.kernel:
        yield "note", f"unit {unit.unit}: kernel {unit.kernel} at capture, {found.kernel} here; criu check decides"
    absent = sorted(set(unit.cpu_flags) - found.cpu_flags)
    if absent and unit.architecture == found.architecture:
        yield _no(f"unit {unit.unit}: the processor lacks {' '.join(absent)}")


def _criu(
    descriptor: Descriptor, unit: str, found: TargetCriu | None, policy: CompatibilityPolicy
) -> Iterator[_Finding]:
    captured = next(item.criu for item in descriptor.capsule.units if item.unit == unit)
    if found is None:
        yield _no(f"unit {unit}: there is no CRIU; {captured.version} made the images")
        return
    if not found.check_passed:
        yield _no(f"unit {unit}: criu check fails with CRIU {found.version}")
    if found.sha256 == captured.sha256:
        return
    if policy.kernel == "exact":
        yield _no(f"unit {unit}: CRIU {found.version} is another build than the captured {captured.version}")
    elif version_of(found.version) < version_of(captured.version):
        yield _no(f"unit {unit}: CRIU {found.version} is older than {captured.version}, which made the images")
    else:
        yield "note", f"unit {unit}: CRIU {found.version} restores images of another build of {captured.version}"


def _accelerators(unit: CompatibilityUnit, found: TargetUnit, policy: CompatibilityPolicy) -> Iterator[_Finding]:
    if not unit.devices:
        return
    devices = {device.slot: device for device in found.devices}
    for captured in unit.devices:
        device = devices.get(captured.slot)
        where = f"unit {unit.unit}, device {captured.slot}"
        if device is None:
            yield _no(f"{where}: captured on {captured.gpu_name}, no GPU placed")
            continue
        yield from _differs(f"{where}: GPU", captured.gpu_name, device.gpu_name)
        yield from _differs(f"{where}: compute capability", captured.compute_capability, device.compute_capability)
        yield from _differs(f"{where}: memory class, bytes", captured.capacity_class_bytes, device.capacity_class_bytes)
    if found.nvidia_driver is None:
        yield _no(f"unit {unit.unit}: there is no NVIDIA driver")
        return
    floors = [("the contract needs", unit.nvidia_driver_min if policy.driver != "probed" else None)]
    if policy.enforce_captured_driver_floor:
        floors.append(("the capture had", unit.nvidia_driver_captured))
    for reason, floor in floors:
        if floor is not None and version_of(found.nvidia_driver) < version_of(floor):
            yield _no(f"unit {unit.unit}: NVIDIA driver {found.nvidia_driver} is too old, {reason} {floor}")


def _engine(descriptor: Descriptor, found: TargetEngine) -> Iterator[_Finding]:
    captured = descriptor.engine
    yield from _differs("engine", captured.kind, found.kind)
    if captured.kind == found.kind:
        yield from _differs(f"{captured.kind} version", captured.version, found.version)
    yield from _differs("torch version", captured.torch, found.torch)
    yield from _differs("python version", captured.python.version, found.python)
    yield from _differs("coldsnap version in the engine's environment", captured.coldsnap, found.coldsnap)
    if captured.python.site_packages_sha256 != found.site_packages_sha256:
        yield _no("the distributions installed in the engine's environment are not those of the capture")
    if captured.plugin_abi not in found.plugin_abis:
        known = " or ".join(map(str, found.plugin_abis))
        yield _no(f"plugin_abi: captured {captured.plugin_abi}, this library speaks {known}; capture anew")
    if captured.directive_format not in found.directive_formats:
        known = " or ".join(map(str, found.directive_formats))
        yield _no(f"directive_format: captured {captured.directive_format}, this library writes {known}; capture anew")
    userspace = {unit.cuda_userspace for unit in descriptor.compatibility.units} - {None}
    for version in sorted(filter(None, userspace)):
        yield from _differs("CUDA userspace", version, found.cuda_userspace)
    if found.model is not None:
        yield from _model(captured.model, found.model)


def _model(captured: Model, found: Model) -> Iterator[_Finding]:
    yield from _differs("model", captured.id, found.id)
    yield from _differs("model revision", captured.revision, found.revision)
    if captured.metadata_sha256 and found.metadata_sha256:
        yield from _differs("model metadata digest", captured.metadata_sha256, found.metadata_sha256)


def version_of(text: str) -> tuple[int, ...]:
    """Return the numbers at the start of a version, for comparison: ``4.2.1-3`` → ``(4, 2, 1)``."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()
