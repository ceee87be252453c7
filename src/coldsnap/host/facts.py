"""Facts about machines, as data: what ``probe()`` found, saved, loaded, compared and printed.

The one rule: nothing here looks at a machine. So a plan for a remote fleet is made on a laptop, from facts that were
saved there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from attrs import field, frozen

from coldsnap.errors import AdmissionError, FileReadError
from coldsnap.host.record import canonical, digest, load_record, to_plain

FORMAT = 1
KIND = "coldsnap-facts"
GIB = 1 << 30

# CRIU needs these, found by dropping one after another from a root process on Linux 6.18 with CRIU 4.2.1:
# without SYS_ADMIN no namespace, without NET_ADMIN no start, without the other three no restore. SYS_TIME is for the
# clock offset of a time namespace, which CRIU always restores.
NEEDED_CAPABILITIES = ("CAP_NET_ADMIN", "CAP_SETPCAP", "CAP_SYS_ADMIN", "CAP_SYS_CHROOT", "CAP_SYS_TIME")


def _own_names(given: Mapping[str, str]) -> Mapping[str, str]:
    return dict(given)


def _own_hosts(given: Mapping[str, HostFacts]) -> Mapping[str, HostFacts]:
    return dict(given)


@frozen(kw_only=True)
class CpuFacts:
    """The processor.

    Attributes:
        model: Its name.
        flags: Feature flags, sorted; code compiled for a flag crashes where it is missing.
        cores: Logical processors this process may run on.
    """

    model: str
    flags: tuple[str, ...]
    cores: int


@frozen(kw_only=True)
class MemoryFacts:
    """Main memory, bytes."""

    total_bytes: int
    available_bytes: int


@frozen(kw_only=True)
class GpuFacts:
    """One GPU, as the CUDA driver describes it.

    Attributes:
        index: Ordinal among the visible devices.
        uuid: ``GPU-…``; provenance, never compared between machines.
        name: Model.
        compute_capability: For example ``9.0``.
        memory_bytes: Memory of the device.
        capacity_class_bytes: The same rounded to GiB: equal for boards of one kind with different reservations.
    """

    index: int
    uuid: str
    name: str
    compute_capability: str
    memory_bytes: int
    capacity_class_bytes: int


@frozen(kw_only=True)
class CriuFacts:
    """A CRIU executable.

    Attributes:
        path: Where it is.
        version: For example ``(4, 2, 1)``; empty when it did not say.
        sha256: Hexadecimal digest of the executable.
        libraries: Digest of every library it loads, by soname.
        build_digest: ``sha256:<hex>`` over version, executable as packaged and libraries: the identity of the build,
            the same wherever it is installed.
        check_ok: Whether ``criu check`` is content with this kernel and these privileges.
        check_message: Its last lines.
        found: How it was found: ``argument``, ``PATH`` or ``tool cache``.
    """

    path: str
    version: tuple[int, ...]
    sha256: str
    libraries: Mapping[str, str] = field(converter=_own_names)
    build_digest: str
    check_ok: bool
    check_message: str
    found: str


@frozen(kw_only=True)
class PrivilegeFacts:
    """What the probing process, and so a CRIU started by it, may do.

    Attributes:
        euid: Effective user id.
        capabilities: Effective capabilities by name, sorted.
        seccomp: ``disabled``, ``strict`` or ``filter``: inherited by every child.
        filtered_ancestors: ``name (pid N)`` of each process up to pid 1 that runs under a filter, nearest first.
        ptrace_scope: Yama's setting, 0 without Yama.
    """

    euid: int
    capabilities: tuple[str, ...]
    seccomp: str
    filtered_ancestors: tuple[str, ...]
    ptrace_scope: int

    @property
    def missing_capabilities(self) -> tuple[str, ...]:
        """What CRIU needs and this process has not."""
        needed = [*NEEDED_CAPABILITIES, *(("CAP_SYS_PTRACE",) if self.ptrace_scope else ())]
        return tuple(name for name in needed if name not in self.capabilities)


@frozen(kw_only=True)
class KernelFacts:
    """The kernel and its settings that matter to a dump.

    Attributes:
        release: As ``uname -r``.
        architecture: As ``uname -m``.
        io_uring_disabled: ``kernel.io_uring_disabled``: 0, 1 or 2; ``None`` where the kernel has no such setting.
        transparent_huge_pages: ``always``, ``madvise``, ``never`` or ``unknown``.
        last_pid_writable: Whether captured pids can be asked for through ``ns_last_pid``.
        namespaces: Kinds of private namespace this process may create, of ``ipc mount pid user``.
    """

    release: str
    architecture: str
    io_uring_disabled: int | None
    transparent_huge_pages: str
    last_pid_writable: bool
    namespaces: tuple[str, ...]


@frozen(kw_only=True)
class FilesystemFacts:
    """The filesystem behind a path.

    Attributes:
        path: The path asked about.
        type: For example ``ext4``.
        source: What is mounted.
        mountpoint: Where.
        device: ``major:minor``.
        free_bytes: Bytes an unprivileged process may still write.
        kind: ``local``, ``remote``, ``memory`` or ``unknown``.
        read_only: Whether it is mounted read-only.
    """

    path: str
    type: str
    source: str
    mountpoint: str
    device: str
    free_bytes: int
    kind: str
    read_only: bool


@frozen(kw_only=True)
class FeatureResult:
    """What a live probe found out about one host feature.

    Attributes:
        name: One of ``contracts.FEATURES``.
        status: ``passed``, ``failed``, ``unsupported`` or ``unqualified``.
        reason: Why, when it has not passed.
        failure_phase: The step of the probe that failed.
    """

    name: str
    status: str
    reason: str = ""
    failure_phase: str = ""


@frozen(kw_only=True)
class QualificationRecord:
    """What ``qualify_host()`` found, and on what.

    Attributes:
        boot_id: The boot it holds for.
        nvidia_driver: The driver it holds for, ``None`` without one.
        devices: UUIDs of the GPUs it holds for.
        criu_build_digest: The CRIU it ran.
        features: One result for each feature.
        created_unix_ns: When.
    """

    boot_id: str
    nvidia_driver: str | None
    devices: tuple[str, ...]
    criu_build_digest: str | None
    features: tuple[FeatureResult, ...]
    created_unix_ns: int

    def result(self, name: str) -> FeatureResult:
        """Return one feature's result; ``unqualified`` when the record does not know it."""
        unknown = FeatureResult(name=name, status="unqualified", reason="not probed")
        return next((result for result in self.features if result.name == name), unknown)


@frozen(kw_only=True)
class HostFacts:
    """One host.

    Attributes:
        name: Its name in plans.
        boot_id: Identifies this boot.
        gpus: Visible GPUs; see ``gpu_reason`` when there is none.
        gpu_reason: Why there is none.
        gpus_known: False when there may be GPUs but they could not be listed; no driver is chosen on a guess.
        nvidia_driver: Version of the kernel driver, ``None`` without one.
        cuda_userspace: CUDA version that the driver's library speaks, for example ``13.0``.
        criu: The CRIU found, ``None`` without one.
        listening_ports: TCP ports with a listener in this network namespace, sorted.
        filesystems: Behind the paths asked for.
        qualification: The record of ``qualify_host()`` when it holds for this boot and these devices.
        qualification_reason: Why there is none.
    """

    name: str
    boot_id: str
    kernel: KernelFacts
    cpu: CpuFacts
    memory: MemoryFacts
    gpus: tuple[GpuFacts, ...]
    gpu_reason: str
    gpus_known: bool
    nvidia_driver: str | None
    cuda_userspace: str | None
    criu: CriuFacts | None
    privileges: PrivilegeFacts
    filesystems: tuple[FilesystemFacts, ...]
    listening_ports: tuple[int, ...]
    qualification: QualificationRecord | None
    qualification_reason: str

    @property
    def driver_major(self) -> int | None:
        """Major version of the NVIDIA driver."""
        return int(self.nvidia_driver.split(".")[0]) if self.nvidia_driver else None

    def filesystem(self, path: str) -> FilesystemFacts | None:
        """Return the filesystem behind a path that was asked for."""
        return next((known for known in self.filesystems if known.path == path), None)

    def __str__(self) -> str:
        lines = [f"host {self.name}", *(f"  {title:<11} {text}" for title, text in _describe(self))]
        return "\n".join(lines)


@frozen(kw_only=True)
class PackFacts:
    """One pack in a store: its name's digest, and the identity of the file, to hold against evidence.

    Attributes:
        digest: ``sha256:<hex>``, as its name says; its contents were not read.
        size_bytes: Size.
        device, inode, mtime_ns: Identity of the file.
    """

    digest: str
    size_bytes: int
    device: int
    inode: int
    mtime_ns: int


@frozen(kw_only=True)
class StoreFacts:
    """A content-addressed store of weight packs."""

    root: str
    filesystem: FilesystemFacts
    packs: tuple[PackFacts, ...]


@frozen(kw_only=True)
class Facts:
    """Everything ``resolve`` knows about machines.

    Attributes:
        hosts: By name.
        store: The store of weight packs, ``None`` when none was asked about.
    """

    hosts: Mapping[str, HostFacts] = field(converter=_own_hosts)
    store: StoreFacts | None = None

    def host(self, name: str) -> HostFacts:
        """Return one host.

        Raises:
            AdmissionError: The facts do not have it.
        """
        if name not in self.hosts:
            known = ", ".join(sorted(self.hosts)) or "none"
            raise AdmissionError(
                f"the facts have no host {name!r} (known: {known}); probe it, or correct the placement"
            )
        return self.hosts[name]

    def merge(self, other: Facts) -> Facts:
        """Return the hosts of both, the other's winning; so facts of a fleet come together."""
        return Facts(hosts={**self.hosts, **other.hosts}, store=other.store or self.store)

    def digest(self) -> str:
        """Return ``sha256:<hex>`` over all of it; it changes with free memory and listening ports too."""
        return digest(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the facts as JSON text."""
        Path(path).write_text(canonical({"format": FORMAT, "kind": KIND, **to_plain(self)}) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Facts:
        """Read facts that were saved.

        Raises:
            FileReadError: The file cannot be read; a FileNotFoundError when there is none.
            FormatError: It is no such file.
        """
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise FileReadError.of(error, os.fspath(path), "facts file") from error
        return load_record(cls, text, where=os.fspath(path), kind=KIND, version=FORMAT)

    def __str__(self) -> str:
        store = [] if self.store is None else [f"store {self.store.root}: {len(self.store.packs)} packs"]
        return "\n".join([*map(str, self.hosts.values()), *store])


def _describe(host: HostFacts) -> list[tuple[str, str]]:
    kernel, privileges, criu = host.kernel, host.privileges, host.criu
    gpus = [
        f"{gpu.name}, compute capability {gpu.compute_capability}, {gpu.memory_bytes / GIB:.0f} GiB"
        for gpu in host.gpus
    ]
    missing = ", ".join(privileges.missing_capabilities)
    rows = [
        ("kernel", f"{kernel.release} {kernel.architecture}, boot {host.boot_id[:8]}"),
        ("processor", f"{host.cpu.model}, {host.cpu.cores} cores"),
        ("memory", f"{host.memory.total_bytes / GIB:.1f} GiB, {host.memory.available_bytes / GIB:.1f} GiB available"),
        ("gpu", "; ".join(gpus) or f"no GPU: {host.gpu_reason}"),
    ]
    if host.nvidia_driver:
        rows.append(("driver", f"NVIDIA {host.nvidia_driver}, CUDA {host.cuda_userspace or 'unknown'}"))
    if criu is None:
        rows.append(("criu", "none found"))
    else:
        verdict = "check ok" if criu.check_ok else f"check failed: {criu.check_message}"
        rows.append(("criu", f"{'.'.join(map(str, criu.version))} at {criu.path} ({criu.found}), {verdict}"))
    rows.append(("privileges", f"uid {privileges.euid}, {f'missing {missing}' if missing else 'all that CRIU needs'}"))
    rows.append(("seccomp", privileges.seccomp))
    for system in host.filesystems:
        free = f"{system.free_bytes / GIB:.1f} GiB free"
        rows.append(("filesystem", f"{system.path}: {system.type} ({system.kind}) on {system.mountpoint}, {free}"))
    record = host.qualification
    passed = [result.name for result in record.features if result.status == "passed"] if record else []
    rows.append(("qualified", ", ".join(passed) or f"nothing: {host.qualification_reason or 'no feature passed'}"))
    return rows
