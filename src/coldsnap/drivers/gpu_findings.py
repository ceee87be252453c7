"""What is wrong about the GPU, as far as the kernel's files tell without asking the driver.

The one rule: nothing here loads or calls a library of NVIDIA's; each sentence says how what it says is known.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator

from coldsnap.drivers.findings import Finding
from coldsnap.drivers.subject import Subject

__all__ = ["gpu_findings", "holds_driver", "loads_cuda"]

_NVIDIA = "/dev/nvidia"
_DEVICE = re.compile(r"/dev/nvidia\d+")
_UVM = "/dev/nvidia-uvm"
_LIBRARIES = ("libcuda.so", "libcudadebugger.so", "libnvidia-")
_HEADER = re.compile(r"^[0-9a-f]+-[0-9a-f]+ r-xp .*?(/.*)$")
_COPIED = re.compile(r"^Anonymous:\s+(\d+) kB")


def holds_driver(subject: Subject) -> bool:
    """Say whether a process holds a device of the NVIDIA driver open."""
    return any(link.startswith(_NVIDIA) for link in subject.links.values())


def loads_cuda(subject: Subject) -> bool:
    """Say whether a process has the library of the CUDA driver in memory; one that only asks NVML has not."""
    return any(posixpath.basename(each.path).startswith("libcuda.so") for each in subject.mapped)


def gpu_findings(subjects: Iterable[Subject]) -> Iterator[Finding]:
    """Yield what is wrong about the GPUs of a tree."""
    users: dict[str, list[Subject]] = {}
    for subject in subjects:
        # A context maps registers of its device; a process that merely loaded the driver holds it open and maps none.
        for path in sorted({each.path for each in subject.mapped if _DEVICE.fullmatch(each.path)}):
            users.setdefault(path, []).append(subject)
        if managed := [each.bytes for each in subject.mapped if each.path == _UVM]:
            what = (
                f"{sum(managed)} bytes in {len(managed)} mappings of {_UVM} (from /proc/{subject.process.pid}/maps; "
                "every context has small ones, managed memory shows as large ones)"
            )
            yield subject.finding("managed-memory", what, path=_UVM)
        yield from _breakpoints(subject)
    for path, sharing in users.items():
        if len(sharing) > 1:
            pids = ", ".join(str(each.process.pid) for each in sharing)
            yield sharing[0].finding("gpu-shared", f"{path} is mapped by the processes {pids} of the tree", path=path)


def _breakpoints(subject: Subject) -> Iterator[Finding]:
    """Find code of the driver's libraries that is not as it is in the file: somebody wrote into a page of it.

    A uprobe and a debugger's breakpoint both replace an instruction, which gives the process a copy of the page, and
    the kernel counts such copies; the first hit of a uprobe maps ``[uprobes]`` besides.
    """
    names = {each.path for each in subject.mapped}
    if "[uprobes]" in names:
        yield subject.finding("driver-breakpoint", "a uprobe was hit in it (it maps [uprobes])")
    if not any(posixpath.basename(name).startswith(_LIBRARIES) for name in names):
        return
    path, told = "", set[str]()
    for line in subject.read("smaps").splitlines():
        if (header := _HEADER.match(line)) is not None:
            path = header[1] if posixpath.basename(header[1]).startswith(_LIBRARIES) else ""
        elif line[:1] in "0123456789abcdef":
            path = ""
        elif path and path not in told and (copied := _COPIED.match(line)) and copied[1] != "0":
            told.add(path)
            what = f"a breakpoint or uprobe in {path} ({copied[1]} KiB of its code differ from the file)"
            yield subject.finding("driver-breakpoint", what, path=path)
