"""Look at this machine and say what it is.

The one rule: a probe is light and changes nothing: no CUDA in the caller's process, no file but its own cache, and
what takes long (``qualify_host``) is only read back.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

from coldsnap.errors import FormatError
from coldsnap.host import private
from coldsnap.host.criu import find_criu
from coldsnap.host.facts import (
    CpuFacts,
    Facts,
    GpuFacts,
    HostFacts,
    KernelFacts,
    MemoryFacts,
    PackFacts,
    PrivilegeFacts,
    QualificationRecord,
    StoreFacts,
)
from coldsnap.host.gpus import nvidia_driver, probe_gpus
from coldsnap.host.kernel import KernelFiles, capability_names, listening_ports
from coldsnap.host.mounts import filesystem_of
from coldsnap.host.record import from_plain

QUALIFICATION = "qualification.json"
SECCOMP_MODES = {"0": "disabled", "1": "strict", "2": "filter"}
PACKS = Path("model-payloads") / "sha256"


def probe(
    *,
    name: str = "local",
    paths: Sequence[str | os.PathLike[str]] = (),
    criu: str | os.PathLike[str] | None = None,
    store: str | os.PathLike[str] | None = None,
    ports: Sequence[int] = (),
    kernel: KernelFiles | None = None,
    cache: Path | None = None,
    tools: Path | None = None,
) -> Facts:
    """Describe this machine.

    Args:
        name: What plans call it.
        paths: Paths whose filesystems matter.
        criu: The CRIU executable to use; otherwise PATH and then the cache of ``tools/get_criu.py`` are searched.
        store: Root of the store of weight packs.
        ports: TCP ports to report listeners of; all when empty.
        kernel: Where to read ``/proc`` and ``/sys``.
        cache: Directory for private records, ``~/.cache/coldsnap`` by default.
        tools: Where ``tools/get_criu.py`` installed.

    Raises:
        AdmissionError: The cache directory or a record in it could have been written by someone else.
    """
    kernel = kernel or KernelFiles()
    host = probe_host(name=name, paths=paths, criu=criu, ports=ports, kernel=kernel, cache=cache, tools=tools)
    return Facts(hosts={name: host}, store=None if store is None else probe_store(store, kernel))


def probe_host(
    *,
    name: str,
    paths: Sequence[str | os.PathLike[str]],
    criu: str | os.PathLike[str] | None,
    ports: Sequence[int],
    kernel: KernelFiles,
    cache: Path | None,
    tools: Path | None,
) -> HostFacts:
    """Describe this machine without its store; the arguments are those of :func:`probe`."""
    boot_id = kernel.text("/proc/sys/kernel/random/boot_id") or "unknown"
    privileges = probe_privileges(kernel)
    driver = nvidia_driver(kernel)
    gpus = probe_gpus(kernel, cache)
    devices = tuple(GpuFacts(**gpu) for gpu in gpus["gpus"])
    record, reason = read_qualification(boot_id, driver, tuple(gpu.uuid for gpu in devices), cache)
    listeners = listening_ports(kernel)
    return HostFacts(
        name=name,
        boot_id=boot_id,
        kernel=probe_kernel(kernel, privileges),
        cpu=probe_cpu(kernel),
        memory=probe_memory(kernel),
        gpus=devices,
        gpu_reason=gpus["reason"],
        gpus_known=gpus["known"],
        nvidia_driver=driver,
        cuda_userspace=gpus["cuda"],
        criu=find_criu(criu, boot_id=boot_id, privileges=privileges, cache=cache, tools=tools),
        privileges=privileges,
        filesystems=tuple(filesystem_of(path, kernel) for path in paths),
        listening_ports=tuple(port for port in listeners if not ports or port in ports),
        qualification=record,
        qualification_reason=reason,
    )


def probe_kernel(kernel: KernelFiles, privileges: PrivilegeFacts) -> KernelFacts:
    """Read the kernel's release and the settings that matter to a dump."""
    modes = kernel.text("/sys/kernel/mm/transparent_hugepage/enabled") or ""
    chosen = re.search(r"\[(\w+)\]", modes)
    return KernelFacts(
        release=kernel.text("/proc/sys/kernel/osrelease") or platform.release(),
        architecture=platform.machine(),
        io_uring_disabled=kernel.number("/proc/sys/kernel/io_uring_disabled"),
        transparent_huge_pages=chosen[1] if chosen else "unknown",
        last_pid_writable=kernel.writable("/proc/sys/kernel/ns_last_pid"),
        namespaces=_namespaces(kernel, privileges),
    )


def _namespaces(kernel: KernelFiles, privileges: PrivilegeFacts) -> tuple[str, ...]:
    present = {"mnt" if name == "mount" else name: name for name in ("ipc", "mount", "pid")}
    entries = kernel.names("/proc/self/ns")
    admin = "CAP_SYS_ADMIN" in privileges.capabilities
    kinds = [name for entry, name in present.items() if entry in entries and admin]
    # Debian's kernels have a second switch for user namespaces of unprivileged users.
    allowed = admin or kernel.number("/proc/sys/kernel/unprivileged_userns_clone") != 0
    if "user" in entries and allowed and kernel.number("/proc/sys/user/max_user_namespaces") != 0:
        kinds.append("user")
    return tuple(sorted(kinds))


def probe_cpu(kernel: KernelFiles) -> CpuFacts:
    """Read the first processor's model and flags (``Features`` on arm64)."""
    text = kernel.text("/proc/cpuinfo") or ""
    fields: dict[str, str] = dict(re.findall(r"^([^\t:]+?)\s*:\s*(.*)$", text.split("\n\n")[0], re.MULTILINE))
    flags = fields.get("flags", fields.get("Features", ""))
    model = fields.get("model name") or fields.get("CPU part") or platform.machine()
    return CpuFacts(model=model, flags=tuple(sorted(set(flags.split()))), cores=len(os.sched_getaffinity(0)))


def probe_memory(kernel: KernelFiles) -> MemoryFacts:
    """Read total and available memory; the kernel gives KiB."""
    text = kernel.text("/proc/meminfo") or ""
    kib = {name: int(number) for name, number in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    return MemoryFacts(
        total_bytes=kib.get("MemTotal", 0) * 1024,
        available_bytes=kib.get("MemAvailable", 0) * 1024,
    )


def probe_privileges(kernel: KernelFiles) -> PrivilegeFacts:
    """Read what this process may do, and under which filters its ancestors run."""
    status = kernel.status()
    return PrivilegeFacts(
        # Real, effective, saved, filesystem.
        euid=int(status["Uid"].split()[1]) if "Uid" in status else os.geteuid(),
        capabilities=capability_names(status.get("CapEff", "0")),
        seccomp=SECCOMP_MODES.get(status.get("Seccomp", "0"), "filter"),
        filtered_ancestors=_filtered(kernel, status),
        ptrace_scope=kernel.number("/proc/sys/kernel/yama/ptrace_scope") or 0,
    )


def _filtered(kernel: KernelFiles, status: dict[str, str]) -> tuple[str, ...]:
    filtered, seen = [], set()
    while status and status.get("Pid") not in seen:
        seen.add(status.get("Pid"))
        if status.get("Seccomp", "0") != "0":
            filtered.append(f"{status.get('Name')} (pid {status.get('Pid')})")
        parent = status.get("PPid", "0")
        status = kernel.status(parent) if parent != "0" else {}
    return tuple(filtered)


def read_qualification(
    boot_id: str, driver: str | None, devices: tuple[str, ...], cache: Path | None = None
) -> tuple[QualificationRecord | None, str]:
    """Return the record of ``qualify_host()`` when it holds here and now, else ``None`` and the reason."""
    plain = private.read(QUALIFICATION, cache)
    if not plain:
        return None, "this host was never qualified"
    try:
        record: QualificationRecord = from_plain(QualificationRecord, plain, QUALIFICATION)
    except FormatError as error:
        return None, f"the record cannot be read: {error}"
    if record.boot_id != boot_id:
        return None, "the record is of another boot"
    if record.nvidia_driver != driver:
        return None, f"the record is for NVIDIA driver {record.nvidia_driver or 'none'}, this is {driver or 'none'}"
    if record.devices != devices:
        return None, f"the record is for other devices ({len(record.devices)} then, {len(devices)} now)"
    return record, ""


def probe_store(root: str | os.PathLike[str], kernel: KernelFiles) -> StoreFacts:
    """List the packs of a store by name; their bytes are not read."""
    packs = []
    for path in sorted((Path(root) / PACKS).glob("*.pack")):
        if re.fullmatch(r"[0-9a-f]{64}", path.stem):
            status = path.lstat()
            packs.append(
                PackFacts(
                    digest=f"sha256:{path.stem}",
                    size_bytes=status.st_size,
                    device=status.st_dev,
                    inode=status.st_ino,
                    mtime_ns=status.st_mtime_ns,
                )
            )
    return StoreFacts(root=os.fspath(root), filesystem=filesystem_of(root, kernel), packs=tuple(packs))
