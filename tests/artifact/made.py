"""Artifacts, descriptors and targets for the tests of this directory, made by the real writer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import attrs

import coldsnap
from coldsnap.artifact import (
    Acceptance,
    Artifact,
    ArtifactWriter,
    Capsule,
    CapsuleUnit,
    Compatibility,
    CompatibilityUnit,
    Criu,
    Descriptor,
    Device,
    Engine,
    FileRecord,
    Listener,
    Model,
    Python,
    SnapshotDriver,
    Target,
    TargetCriu,
    TargetEngine,
    TargetUnit,
    Topology,
    TopologyUnit,
    VolatileFile,
)
from coldsnap.artifact.durable import unharmed

ZERO = "sha256:" + "0" * 64
ONE = "sha256:" + "1" * 64
GPU = Device(slot=0, gpu_name="NVIDIA H200", compute_capability="9.0", capacity_class_bytes=139 << 30)

FILES = {
    "capsule/rank0/images/pages-1.img": b"p" * 70_000,
    "capsule/rank0/images/core-1.img": b"core of one",
    "capsule/rank0/volatile/psm_1": b"ring",
}


@attrs.frozen(kw_only=True)
class Rules:
    """The leaves of ``compatibility`` of a policy."""

    kernel: str = "capability"
    driver: str = "release"
    enforce_captured_driver_floor: bool = True


def descriptor(files: tuple[FileRecord, ...] = (), **changes: object) -> Descriptor:
    """Return a descriptor of one unit with one worker."""
    unit = CapsuleUnit(
        unit="rank0",
        path="capsule/rank0",
        images="capsule/rank0/images",
        criu=Criu(version="4.2.1", sha256=ZERO),
        root_pid=600,
        pids=(600, 601),
        listeners=(Listener(address="127.0.0.1", port=8000, role="api"),),
        volatile=tuple(
            VolatileFile(target=f"/dev/shm/{file.path.rsplit('/')[-1]}", path=file.path, bytes=4)
            for file in files
            if "/volatile/" in file.path
        ),
        namespace="private",
        run_dir="/dev/shm/coldsnap/run",
        files=files,
    )
    made = Descriptor(
        capture_id="capture-0001",
        created_unix_ns=1_790_000_000_000_000_001,
        plan_digest=ZERO,
        snapshot_driver=SnapshotDriver(id="n610", abi=1, boundary="initialized-process-state"),
        engine=Engine(
            kind="reference",
            version="1.0",
            model=Model(id="tiny", revision="a" * 40),
            argv=("python", "-m", "serve", "--naïve"),
            environment={"OMP_NUM_THREADS": "2"},
            cwd="/",
            python=Python(version="3.11.7", executable="/usr/bin/python3", site_packages_sha256=ONE),
            torch="2.13.0",
            coldsnap="0.1.0",
            plugin_abi=1,
            directive_format=1,
        ),
        compatibility=Compatibility(
            units=(CompatibilityUnit(unit="rank0", architecture="x86_64", kernel="6.1.0", cpu_flags=("avx2", "fma")),)
        ),
        topology=Topology(units=(TopologyUnit(unit="rank0", workers=("0",)),)),
        capsule=Capsule(units=(unit,)),
        acceptance=Acceptance(prompt="The capital of France is", max_tokens=2, text=" Paris.", token_ids=(12095, 13)),
    )
    return attrs.evolve(made, **changes)


def write_artifact(output: Path, *, at=unharmed, files: dict[str, bytes] = FILES) -> Artifact:
    """Write a small artifact as a capture does."""
    with ArtifactWriter.create(output, at=at) as writer:
        for name, data in files.items():
            writer.directory(os.path.dirname(name))
            (writer.path / name).write_bytes(data)
        return writer.commit(descriptor(writer.seal("capsule/rank0")))


def target(**changes: object) -> Target:
    """Return the target on which :func:`descriptor` was captured; ``unit_*`` and ``engine_*`` change its parts."""
    unit = TargetUnit(
        unit="rank0",
        architecture="x86_64",
        kernel="6.1.0",
        cpu_flags=frozenset({"avx2", "fma", "sse2"}),
        criu=TargetCriu(version="4.2.1", sha256=ZERO, check_passed=True),
    )
    engine = TargetEngine(
        kind="reference",
        version="1.0",
        torch="2.13.0",
        python="3.11.7",
        site_packages_sha256=ONE,
        coldsnap="0.1.0",
        model=Model(id="tiny", revision="a" * 40),
        plugin_abis=(1,),
        directive_formats=(1,),
    )
    parts = {"unit": unit, "engine": engine}
    for name, part in parts.items():
        own = {key.removeprefix(f"{name}_"): value for key, value in changes.items() if key.startswith(f"{name}_")}
        parts[name] = attrs.evolve(part, **own)
    return Target(units=(parts["unit"],), engine=parts["engine"])


def in_mounts_of_its_own(script: str) -> tuple[int, str, str]:
    """Run Python that mounts what nobody else is to see; return its status and what it wrote."""
    ended = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(coldsnap.__file__).parents[1])},
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr
