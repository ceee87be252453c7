"""A machine made of files."""

from pathlib import Path

import pytest

from coldsnap.host.facts import (
    NEEDED_CAPABILITIES,
    CpuFacts,
    CriuFacts,
    GpuFacts,
    HostFacts,
    KernelFacts,
    MemoryFacts,
    PrivilegeFacts,
)
from coldsnap.host.kernel import KernelFiles

STATUS = """\
Name:\t{name}
Pid:\t{pid}
PPid:\t{ppid}
Uid:\t1000\t{euid}\t1000\t1000
CapEff:\t{capabilities}
Seccomp:\t{seccomp}
"""


class Machine:
    """Files below a root, written one by one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.kernel = KernelFiles(root=root)

    def put(self, path: str, text: str) -> None:
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def process(self, pid, *, own=False, name="python", ppid=0, euid=0, capabilities="0", seccomp=0):
        text = STATUS.format(name=name, pid=pid, ppid=ppid, euid=euid, capabilities=capabilities, seccomp=seccomp)
        self.put(f"/proc/{'self' if own else pid}/status", text)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path / "machine")


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


GPU = GpuFacts(
    index=0,
    uuid="GPU-0",
    name="NVIDIA H200",
    compute_capability="9.0",
    memory_bytes=150_000_000_000,
    capacity_class_bytes=140 << 30,
)
CRIU = CriuFacts(
    path="/opt/criu",
    version=(4, 2, 1),
    sha256="ab",
    libraries={"libc.so.6": "cd"},
    build_digest="sha256:ef",
    check_ok=True,
    check_message="Looks good.",
    found="PATH",
)
PRIVILEGES = PrivilegeFacts(
    euid=0, capabilities=NEEDED_CAPABILITIES, seccomp="disabled", filtered_ancestors=(), ptrace_scope=0
)
KERNEL = KernelFacts(
    release="6.18",
    architecture="x86_64",
    io_uring_disabled=0,
    transparent_huge_pages="madvise",
    last_pid_writable=True,
    namespaces=("ipc", "mount", "pid", "user"),
)


@pytest.fixture
def host():
    """A maker of host facts: one sound machine without a GPU, changed by keyword."""

    def make(name="local", *, driver=None, gpus=None, **changes):
        fields = {
            "name": name,
            "boot_id": "b",
            "kernel": KERNEL,
            "cpu": CpuFacts(model="cpu", flags=("avx2",), cores=2),
            "memory": MemoryFacts(total_bytes=8 << 30, available_bytes=4 << 30),
            "gpus": ((GPU,) if driver else ()) if gpus is None else gpus,
            "gpu_reason": "" if driver else "no NVIDIA driver is loaded",
            "gpus_known": True,
            "nvidia_driver": driver,
            "cuda_userspace": "13.0" if driver else None,
            "criu": CRIU,
            "privileges": PRIVILEGES,
            "filesystems": (),
            "listening_ports": (),
            "qualification": None,
            "qualification_reason": "this host was never qualified",
        }
        return HostFacts(**{**fields, **changes})

    return make
