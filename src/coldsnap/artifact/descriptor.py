"""``artifact.json``: what an artifact is, in one sealed document.

The one rule: format 9 is extended by optional fields, never reshaped; a reader that does not know a field refuses the
artifact instead of ignoring what it says. Rules: ``docs/format/descriptor.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs
from attrs import field, frozen

from coldsnap.artifact import canonical, record
from coldsnap.artifact.capsule import UNIT, WORKER, CacheSeed, Capsule, FileRecord
from coldsnap.artifact.payloads import REVISION, Weights
from coldsnap.errors import FormatError, IntegrityError

__all__ = [
    "Acceptance",
    "Calibration",
    "CalibrationUnit",
    "Compatibility",
    "CompatibilityUnit",
    "Descriptor",
    "Device",
    "Engine",
    "Graph",
    "Model",
    "Python",
    "Requires",
    "RuntimeBinding",
    "SnapshotDriver",
    "Topology",
    "TopologyUnit",
]

FORMAT = 9
MAX_DESCRIPTOR_BYTES = 8 << 20
_SEAL = "seal"


def _sorted(_: object, field: attrs.Attribute[tuple[str, ...]], value: tuple[str, ...]) -> None:
    if list(value) != sorted(set(value)):
        raise record.Broken("json.11", f"{field.name} must be sorted and without repetition")


@frozen(kw_only=True)
class SnapshotDriver:
    """Who froze it, by contract.

    Attributes:
        id: ``n580`` or ``n610``.
        abi: Version of the driver's layout inside the capsule.
        boundary: What state the capsule holds.
    """

    id: Literal["n580", "n610"]
    abi: int = field(validator=record.at_least(1))
    boundary: Literal["pre-cuda-process-template", "initialized-cuda-process-state", "initialized-process-state"]


@frozen(kw_only=True)
class Requires:
    """What a host must have passed: names of host features, sorted."""

    format: Literal[1] = 1
    features: tuple[str, ...] = field(default=(), validator=_sorted)


@frozen(kw_only=True)
class Model:
    """Which weights.

    Attributes:
        id: Hub id, or the last component of a local directory.
        revision: 40-hex commit, or the digest of a local model (see ``docs/artifacts.md``).
        metadata_sha256: Digest over config and tokenizer, when known.
        path: Where the engine reads the model from, when that is a directory.
    """

    id: str
    revision: str = field(validator=REVISION)
    metadata_sha256: str | None = field(default=None, validator=record.optional(record.sha256))
    path: str | None = None


@frozen(kw_only=True)
class Python:
    """The interpreter behind the image.

    Attributes:
        version: For example ``3.11.7``.
        executable: Path at capture.
        site_packages_sha256: Digest over the installed distributions; files that the image maps must be the same.
    """

    version: str
    executable: str
    site_packages_sha256: str = field(validator=record.sha256)


@frozen(kw_only=True)
class Engine:
    """What was running.

    Attributes:
        kind: ``vllm``, ``sglang`` or ``reference``.
        version: Of the engine.
        model: Identity of the model.
        argv: Command line, secrets refused at capture.
        environment: Environment at launch; the values of ``redacted`` are not here.
        redacted: Names whose values were secrets and allowed by ``process.secrets``.
        cwd: Working directory.
        python: Interpreter.
        torch: Version.
        coldsnap: Version inside the engine's environment.
        plugin_abi: Of the plugin inside the ranks.
        directive_format: Of the directive the ranks can read.
        served_name: The name requests use.
    """

    kind: str = field(validator=record.matching(r"[a-z][a-z0-9_-]{0,31}", "a short lowercase name"))
    version: str
    model: Model
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    redacted: tuple[str, ...] = field(default=(), validator=_sorted)
    cwd: str
    python: Python
    torch: str
    coldsnap: str
    plugin_abi: int = field(validator=record.at_least(1))
    directive_format: int = field(validator=record.at_least(1))
    served_name: str | None = None


@frozen(kw_only=True)
class Device:
    """One accelerator, as a class of machine: no UUID, no ordinal of the host.

    Attributes:
        slot: Position within the unit, from 0.
        gpu_name: As the driver calls it.
        compute_capability: For example ``9.0``.
        capacity_class_bytes: Memory, rounded down to a GiB.
    """

    slot: int = field(validator=record.at_least(0))
    gpu_name: str
    compute_capability: str = field(validator=record.matching(r"\d+\.\d+", "major.minor"))
    capacity_class_bytes: int = field(validator=record.at_least(0))


@frozen(kw_only=True)
class CompatibilityUnit:
    """What the machine of a unit must be.

    Attributes:
        unit: Name.
        architecture: ``uname -m``.
        kernel: ``uname -r``; provenance unless ``compatibility.kernel = "exact"``.
        cpu_flags: Features of the processor that the processes may use, sorted.
        nvidia_driver_captured: Version, when there was one.
        nvidia_driver_min: Lowest version that the driver's contract allows.
        cuda_userspace: CUDA version of the engine's torch.
        devices: Accelerators.
    """

    unit: str = field(validator=UNIT)
    architecture: str
    kernel: str
    cpu_flags: tuple[str, ...] = field(validator=_sorted)
    nvidia_driver_captured: str | None = None
    nvidia_driver_min: str | None = None
    cuda_userspace: str | None = None
    devices: tuple[Device, ...] = field(default=(), validator=record.one_of_each(lambda device: device.slot, "slot"))


@frozen(kw_only=True)
class Compatibility:
    """Where it may be restored."""

    policy: Literal["placement-independent-v1", "target-local-v1"] = "placement-independent-v1"
    units: tuple[CompatibilityUnit, ...] = field(validator=record.one_of_each(lambda unit: unit.unit, "unit"))


@frozen(kw_only=True)
class TopologyUnit:
    """The workers of one unit, by global rank order."""

    unit: str = field(validator=UNIT)
    workers: tuple[str, ...]

    def __attrs_post_init__(self) -> None:
        """Check the names."""
        for worker in self.workers:
            WORKER(self, attrs.fields(TopologyUnit).workers, worker)


@frozen(kw_only=True)
class Topology:
    """How the engine is spread over units and workers."""

    units: tuple[TopologyUnit, ...] = field(validator=record.one_of_each(lambda unit: unit.unit, "unit"))
    tensor_parallel_size: int = field(default=1, validator=record.at_least(1))
    pipeline_parallel_size: int = field(default=1, validator=record.at_least(1))
    data_parallel_size: int = field(default=1, validator=record.at_least(1))

    @property
    def workers(self) -> tuple[str, ...]:
        """Every worker, in rank order."""
        return tuple(worker for unit in self.units for worker in unit.workers)


@frozen(kw_only=True)
class Graph:
    """What became of the engine's CUDA graphs, and why."""

    format: Literal[1] = 1
    policy_requested: str = "disabled"
    policy_effective: str = "disabled"
    decision: str = "no_accelerator"
    plan_sha256: str | None = field(default=None, validator=record.optional(record.sha256))


@frozen(kw_only=True)
class CalibrationUnit:
    """Graph shapes of one unit: all planned ones were warmed.

    Attributes:
        unit: Name.
        engine: Whose plan it was.
        planned_shapes: Count.
        warmed_shapes: Count, the same.
        elapsed_ns: Time spent, ns.
        evidence: Digest of the engine's own record.
    """

    unit: str = field(validator=UNIT)
    engine: str
    planned_shapes: int = field(validator=record.at_least(0))
    warmed_shapes: int = field(validator=record.at_least(0))
    elapsed_ns: int = field(validator=record.at_least(0))
    evidence: str = field(validator=record.sha256)

    def __attrs_post_init__(self) -> None:
        """Check descriptor.6: nothing is left cold."""
        if self.planned_shapes != self.warmed_shapes:
            raise record.Broken("descriptor.6", f"{self.warmed_shapes} of {self.planned_shapes} shapes are warm")


@frozen(kw_only=True)
class Calibration:
    """Shape calibration at capture."""

    policy: Literal["engine-owned-v1", "none"] = "none"
    units: tuple[CalibrationUnit, ...] = ()


@frozen(kw_only=True)
class RuntimeBinding:
    """A provider that the process is bound to, by digest.

    Attributes:
        owner: For example ``collective:nccl``.
        schema: For example ``nccl:provider-v1``.
        digest: Of the provider.
    """

    owner: str
    schema: str
    digest: str = field(validator=record.sha256)


@frozen(kw_only=True)
class Acceptance:
    """The question and the answer that every restore must repeat.

    Attributes:
        accepted: The answer was checked at capture.
        prompt: The question.
        max_tokens: Asked for.
        text: The answer.
        token_ids: The answer, token by token; empty when the engine does not tell.
    """

    accepted: Literal[True] = True
    prompt: str
    max_tokens: int = field(validator=record.at_least(1))
    text: str
    token_ids: tuple[int, ...] = ()


@frozen(kw_only=True)
class Descriptor:
    """The whole of ``artifact.json``, without its seal.

    Attributes:
        capture_id: Name of the capture.
        created_unix_ns: When, ns.
        plan_digest: Digest of the plan that made it.
    """

    format: Literal[9] = 9
    kind: Literal["coldsnap-snapshot-artifact"] = "coldsnap-snapshot-artifact"
    state: Literal["committed"] = "committed"
    capture_id: str = field(validator=record.matching(r"[a-z0-9][a-z0-9-]{7,63}", "8 to 64 of a-z 0-9 -"))
    created_unix_ns: int = field(validator=record.at_least(1))
    plan_digest: str = field(validator=record.sha256)
    snapshot_driver: SnapshotDriver
    requires: Requires = Requires()
    engine: Engine
    compatibility: Compatibility
    topology: Topology
    capsule: Capsule
    graph: Graph = Graph()
    weights: Weights = field(factory=Weights)
    calibration: Calibration = Calibration()
    cache_seeds: tuple[CacheSeed, ...] = field(
        default=(), validator=record.one_of_each(lambda seed: (seed.unit, seed.name), "cache")
    )
    runtime: tuple[RuntimeBinding, ...] = ()
    acceptance: Acceptance

    def __attrs_post_init__(self) -> None:
        """Check descriptor.5: all sections speak of the same units and workers, and no file is listed twice."""
        units = sorted(unit.unit for unit in self.topology.units)
        for name, section in (("compatibility", self.compatibility.units), ("capsule", self.capsule.units)):
            if sorted(unit.unit for unit in section) != units:
                raise record.Broken("descriptor.5", f"{name} and topology do not name the same units")
        workers = self.topology.workers
        if len(set(workers)) != len(workers):
            raise record.Broken("descriptor.5", "a worker belongs to two units")
        if self.weights.workers and sorted(item.worker for item in self.weights.workers) != sorted(workers):
            raise record.Broken("descriptor.5", "weights and topology do not name the same workers")
        paths = [file.path for file in self.files]
        if len(set(paths)) != len(paths):
            raise record.Broken("json.11", "a file is listed twice")

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """Every file of the artifact besides ``artifact.json`` and ``evidence.json``."""
        capsules = (file for unit in self.capsule.units for file in unit.files)
        weights = (file for worker in self.weights.workers for file in worker.files)
        starts = () if self.weights.start_files is None else (self.weights.start_files,)
        seeds = (file for seed in self.cache_seeds for file in seed.files)
        return (*capsules, *weights, *starts, *seeds)

    def encode(self) -> bytes:
        """Return the bytes of ``artifact.json``, sealed."""
        value = record.write_object(self)
        return canonical.encode({**value, _SEAL: canonical.digest(value)})

    @property
    def digest(self) -> str:
        """``sha256:<hex>`` of the canonical descriptor without its seal: the identity of the artifact."""
        return canonical.digest(record.write(self))


def decode(data: bytes, *, path: str) -> tuple[Descriptor, str]:
    """Read the bytes of ``artifact.json``.

    Returns:
        The descriptor and its seal, which is its digest.

    Raises:
        FormatError: With the rule that was broken.
        IntegrityError: The seal does not match: a byte was changed.
    """
    value = canonical.decode(data, path=path, max_bytes=MAX_DESCRIPTOR_BYTES)
    _require_format(value, path)
    seal = value.pop(_SEAL, None)
    actual = canonical.digest(value)
    if seal != actual:
        raise IntegrityError(
            "the seal does not match (rule descriptor.3)", path=path, expected=str(seal), actual=actual
        )
    return record.read(Descriptor, value, path=path), actual


def _require_format(value: Mapping[str, canonical.Json], path: str) -> None:
    if value.get("kind") != "coldsnap-snapshot-artifact":
        raise FormatError(
            f"the kind is {value.get('kind')!r}, not coldsnap-snapshot-artifact", path=path, rule="descriptor.1"
        )
    if value.get("format") != FORMAT:
        found = value.get("format")
        raise FormatError(f"format {found!r} is not format {FORMAT}; capture anew", path=path, rule="descriptor.2")
