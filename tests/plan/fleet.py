"""Machines, engines and artifacts that never change, so that plans made of them are the same everywhere."""

import json
from pathlib import Path

from attrs import evolve

from coldsnap import artifact as format9
from coldsnap.artifact import Artifact
from coldsnap.artifact.payloads import ModelPayloads, PayloadObject, Recovery, WorkerWeights
from coldsnap.describe import compatibility_unit
from coldsnap.engines.specs import COMMAND, RELEASING, SPEC, spec_to_text
from coldsnap.engines.vllm import VLLM
from coldsnap.host.contracts import FEATURES
from coldsnap.host.facts import (
    NEEDED_CAPABILITIES,
    CpuFacts,
    CriuFacts,
    Facts,
    FeatureResult,
    GpuFacts,
    HostFacts,
    KernelFacts,
    MemoryFacts,
    PrivilegeFacts,
    QualificationRecord,
)
from coldsnap.keeper.directive import FORMAT, PLUGIN_ABI
from coldsnap.operation import Capture, Launch, Restore, local
from coldsnap.testing.reference import ReferenceEngine

DIGEST = "sha256:" + "ab" * 32
REVISION = "0123456789abcdef0123456789abcdef01234567"
OUTPUT = "/artifacts/tiny"
CRIU = CriuFacts(
    path="/opt/criu/criu",
    version=(4, 2, 1),
    sha256="cd" * 32,
    libraries={"libc.so.6": "ef" * 32},
    build_digest=DIGEST,
    check_ok=True,
    check_message="Looks good.",
    found="argument",
)
PRIVILEGES = PrivilegeFacts(
    euid=0, capabilities=NEEDED_CAPABILITIES, seccomp="disabled", filtered_ancestors=(), ptrace_scope=0
)
KERNEL = KernelFacts(
    release="6.12.0",
    architecture="x86_64",
    io_uring_disabled=0,
    transparent_huge_pages="madvise",
    last_pid_writable=True,
    namespaces=("ipc", "mount", "pid", "user"),
)


def cpu_host(**changes):
    """A sound machine without a GPU."""
    host = HostFacts(
        name="local",
        boot_id="4e7b2a90-0000-4000-8000-000000000001",
        kernel=KERNEL,
        cpu=CpuFacts(model="a processor", flags=("avx2", "fma", "sse2"), cores=8),
        memory=MemoryFacts(total_bytes=64 << 30, available_bytes=60 << 30),
        gpus=(),
        gpu_reason="no NVIDIA driver is loaded",
        gpus_known=True,
        nvidia_driver=None,
        cuda_userspace=None,
        criu=CRIU,
        privileges=PRIVILEGES,
        filesystems=(),
        listening_ports=(22,),
        qualification=None,
        qualification_reason="this host was never qualified",
    )
    return evolve(host, **changes)


def gpu_host(driver="610.43.02", *, qualified=True, count=1, **changes):
    """A sound machine with GPUs."""
    gpus = tuple(
        GpuFacts(
            index=index,
            uuid=f"GPU-{index}",
            name="NVIDIA H200",
            compute_capability="9.0",
            memory_bytes=150_000_000_000,
            capacity_class_bytes=140 << 30,
        )
        for index in range(count)
    )
    host = cpu_host(gpus=gpus, gpu_reason="", nvidia_driver=driver, cuda_userspace="13.0")
    record = QualificationRecord(
        boot_id=host.boot_id,
        nvidia_driver=driver,
        devices=tuple(gpu.uuid for gpu in gpus),
        criu_build_digest=DIGEST,
        features=tuple(FeatureResult(name=name, status="passed") for name in FEATURES),
        created_unix_ns=0,
    )
    return evolve(host, qualification=record if qualified else None, **changes)


def facts(host):
    """What is known of a fleet of one machine."""
    return Facts(hosts={host.name: host})


class Handle:
    """A running engine, as far as a plan is concerned."""

    run_dir = Path("/run/coldsnap/tiny")

    @property
    def labels(self):
        """What its launch has written down."""
        return {SPEC: spec_to_text(engine()), COMMAND: json.dumps({"environment": RELEASING})}


def engine(**changes):
    """The engine of every plan here."""
    return evolve(
        VLLM(
            "example/tiny-qwen3",
            revision=REVISION,
            args=("--max-model-len", "2048"),
            python="/opt/vllm/bin/python",
        ),
        **changes,
    )


def reference(**changes):
    """The engine of the tests, with weights that can leave it."""
    return ReferenceEngine(python="/opt/torch/bin/python", weights="/models/tiny.safetensors", **changes)


def captured_on(host, **changes):
    """The artifact of :func:`engine`, captured on a machine; never on a disk."""
    spec = engine()
    unit = format9.CapsuleUnit(
        unit="unit-0",
        path="capsule/unit-0",
        images="capsule/unit-0/images",
        criu=format9.Criu(version="4.2.1", sha256=DIGEST),
        root_pid=601,
        pids=(601, 640, 655),
        listeners=(format9.Listener(address="127.0.0.1", port=8000, role="api"),),
        namespace=changes.pop("namespace", "private"),
        run_dir=changes.pop("run_dir", "/dev/shm/coldsnap/run"),
        files=(format9.FileRecord(path="capsule/unit-0/engine.json", bytes=2, sha256=DIGEST),),
    )
    environment = format9.Engine(
        kind=spec.kind,
        version="0.32.0",
        model=format9.Model(id=spec.model, revision=spec.revision),
        argv=("/opt/vllm/bin/python",),
        environment={},
        cwd="/",
        python=format9.Python(version="3.11.9", executable="/opt/vllm/bin/python", site_packages_sha256=DIGEST),
        torch="2.13.0",
        coldsnap="0.1.0",
        plugin_abi=PLUGIN_ABI,
        directive_format=FORMAT,
    )
    document = format9.Descriptor(
        capture_id="tiny-qwen3-1a2b3c4d",
        created_unix_ns=1_790_000_000_000_000_000,
        plan_digest=DIGEST,
        snapshot_driver=format9.SnapshotDriver(
            id="n610",
            abi=1,
            boundary="initialized-cuda-process-state" if host.gpus else "initialized-process-state",
        ),
        engine=environment,
        compatibility=format9.Compatibility(units=(compatibility_unit("unit-0", host, (), "n610"),)),
        topology=format9.Topology(units=(format9.TopologyUnit(unit="unit-0", workers=("worker-0",)),)),
        capsule=format9.Capsule(units=(unit,)),
        acceptance=format9.Acceptance(prompt="Hello", max_tokens=2, text=" you", token_ids=(1, 2)),
    )
    return Artifact(Path(OUTPUT), evolve(document, **changes), DIGEST)


def template_of(host, *, local=False):
    """The same artifact as if it had been captured as a template."""
    captured = captured_on(host)
    (unit,) = captured.descriptor.capsule.units
    document = evolve(
        captured.descriptor,
        snapshot_driver=format9.SnapshotDriver(id="n580", abi=1, boundary="pre-cuda-process-template"),
        compatibility=format9.Compatibility(
            policy="target-local-v1" if local else "placement-independent-v1",
            units=(compatibility_unit("unit-0", host, (), "n580"),),
        ),
        capsule=format9.Capsule(units=(evolve(unit, pids=(601,), listeners=()),)),
        weights=format9.Weights(kind="checkpoint"),
    )
    return Artifact(Path(OUTPUT), document, DIGEST)


def with_packs(host, *, recoverable=True, repository=None, **changes):
    """The same artifact as if its weights had been put into a pack, and its checkpoint were pinned."""
    listed = {
        name: format9.FileRecord(path=f"weights/worker-0/{name}", bytes=4096, sha256=DIGEST)
        for name in ("weights.blob", "native-manifest.json", "recovery-manifest.json")
    }
    path = f"model-payloads/sha256/{DIGEST.removeprefix('sha256:')}.pack"
    item = PayloadObject(worker="worker-0", path=path, bytes=1 << 30, sha256=DIGEST)
    weights = format9.Weights(
        kind="packs",
        payloads=ModelPayloads(objects=(item,), repository=repository, revision=repository and REVISION),
        recovery=Recovery(model_id="example/tiny-qwen3", revision=REVISION) if recoverable else None,
        workers=(
            WorkerWeights(
                worker="worker-0",
                residual=listed["weights.blob"],
                native_manifest=listed["native-manifest.json"],
                recovery_manifest=listed["recovery-manifest.json"],
            ),
        ),
    )
    return captured_on(host, weights=weights, **changes)


def launch(**options):
    """Launch it."""
    return Launch(
        options.pop("spec", None) or engine(), placement=local(port=8000, name=options.pop("name", None)), **options
    )


def capture(**options):
    """Capture it, launched for that."""
    spec = options.pop("spec", None) or engine()
    return Capture(spec, output=OUTPUT, placement=local(port=8000), **options)


def capture_handle(**options):
    """Capture one that serves."""
    return Capture(Handle(), output=OUTPUT, **options)


def restore(artifact, *, port=8001, placement=None, **options):
    """Restore it."""
    return Restore(artifact, placement=placement or local(port=port), **options)
