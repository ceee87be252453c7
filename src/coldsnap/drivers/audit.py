"""The audit of a tree: everything in it that would block or spoil a capture, found while it runs.

The one rule: it is a gate. A dump that is going to fail costs the engine a freeze, and CRIU's reason for it speaks of
inodes; so each finding is named here with process, descriptor and remedy, all at once, before anything is frozen.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence

from attrs import frozen

from coldsnap.drivers.base import Process, TreeKeeper
from coldsnap.drivers.file_findings import file_findings, file_sizes, growing, pipe_findings
from coldsnap.drivers.findings import Finding, Severity
from coldsnap.drivers.gpu_findings import gpu_findings, holds_driver, loads_cuda
from coldsnap.drivers.process_findings import process_findings
from coldsnap.drivers.socket_findings import held_sockets, kind_findings, tcp_findings, unix_findings
from coldsnap.drivers.sockets import TcpSocket, read_tcp
from coldsnap.drivers.subject import Subject
from coldsnap.errors import AdmissionError, DriverError

__all__ = ["Audit", "audit_tree", "look"]

PATIENCE_S = 2.0
"""How long a server may take to notice that a client has closed its connection, s."""

POLL_S = 0.02


@frozen(kw_only=True)
class Audit:
    """What was found.

    Attributes:
        pids: Every process of the tree, the root first.
        nvidia_pids: Those that hold the NVIDIA driver open, children before their parents.
        cuda_pids: Those that have the CUDA driver's library in memory.
        listeners: TCP sockets that accept connections.
        findings: All that would block or spoil a capture, or is worth a note.
    """

    pids: tuple[int, ...]
    nvidia_pids: tuple[int, ...]
    cuda_pids: tuple[int, ...]
    listeners: tuple[TcpSocket, ...]
    findings: tuple[Finding, ...]

    @property
    def obstacles(self) -> tuple[Finding, ...]:
        """Return what blocks; empty when a dump can be tried."""
        return tuple(found for found in self.findings if found.severity == "blocks")

    @property
    def notes(self) -> tuple[Finding, ...]:
        """Return what does not block, the worse first."""
        rest = (found for found in self.findings if found.severity != "blocks")
        return tuple(sorted(rest, key=lambda found: found.severity == "note"))

    def require(self, *, patient: bool = False) -> None:
        """Refuse to go on when there are obstacles.

        Args:
            patient: Leave out what may pass by itself: it will be looked at again.

        Raises:
            AdmissionError: Every obstacle.
        """
        obstacles = [found for found in self.obstacles if not (patient and found.passing)]
        if obstacles:
            raise AdmissionError(
                f"the process tree of {self.pids[0]} cannot be dumped; it was left running", list(map(str, obstacles))
            )


def _children_first(subjects: Iterable[Subject]) -> list[int]:
    parents = {subject.process.pid: subject.process.ppid for subject in subjects}

    def depth(pid: int) -> int:
        return 0 if pid not in parents else 1 + depth(parents[pid])

    return sorted(parents, key=lambda pid: (-depth(pid), pid))


def audit_tree(keeper: TreeKeeper, *, secrets: Severity = "note", patience_s: float = PATIENCE_S) -> Audit:
    """Look at every process of a tree that runs; connections that are just closing get a moment to do so.

    Args:
        keeper: The tree's.
        secrets: How severe an environment name is that looks secret: ``blocks`` or ``note``.
        patience_s: How long that moment is, s.

    Raises:
        DriverError: There is no tree, or it lives in a network namespace that cannot be seen from here.
    """
    deadline = time.monotonic() + patience_s
    while True:
        processes = [process for process in keeper.tree() if process.state != "Z"]
        if not processes:
            raise DriverError("there is no process to dump: the engine has ended", command="audit")
        audit = look(processes, keeper.proc_fd, secrets=secrets, own=(keeper.tree_dir, keeper.tmp_dir))
        if any(found.kind == "network" for found in audit.findings):
            raise DriverError(
                "the engine lives in another network namespace, where its connections cannot be seen: "
                "run this beside it",
                command="audit",
            )
        lasting = [found for found in audit.obstacles if not found.passing]
        if lasting or not audit.obstacles or time.monotonic() > deadline:
            return audit
        time.sleep(POLL_S)


def look(processes: Sequence[Process], proc_fd: int, *, secrets: Severity, own: Sequence[str] = ()) -> Audit:
    """Look once at the processes of a tree.

    Args:
        processes: The tree's, the root first.
        proc_fd: A descriptor of the ``/proc`` in which they have these pids.
        secrets: How severe an environment name is that looks secret.
        own: Directories whose files travel with the tree.
    """
    subjects = [Subject(process, proc_fd) for process in processes]
    root, pids = subjects[0], tuple(process.pid for process in processes)
    sizes, ours = file_sizes(subjects), held_sockets(subjects)
    findings: list[Finding] = []
    for subject in subjects:
        findings += process_findings(subject, root, pids, secrets)
        findings += file_findings(subject, pids, own)
    findings += [*pipe_findings(subjects), *kind_findings(ours), *gpu_findings(subjects)]
    sockets = read_tcp(proc_fd, root.process.pid)
    if root.link("ns/net") == os.readlink("/proc/self/ns/net"):
        findings += [*tcp_findings(ours, sockets), *unix_findings(ours)]
    else:
        findings.append(root.finding("network"))
    findings += growing(sizes, own)
    holders = {subject.process.pid for subject in subjects if holds_driver(subject)}
    return Audit(
        pids=pids,
        nvidia_pids=tuple(pid for pid in _children_first(subjects) if pid in holders),
        cuda_pids=tuple(subject.process.pid for subject in subjects if loads_cuda(subject)),
        listeners=tuple(found for found in sockets if found.listening and found.inode in ours),
        findings=tuple(findings),
    )
