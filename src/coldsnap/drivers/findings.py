"""What can be wrong with a process tree: one table of kinds, each with what it does to a capture and what to do.

The one rule: whatever is said of a tree is of a kind in ``KINDS``; ``docs/doctor.md`` prints the same table, and a test
compares the two. What blocks was tried with CRIU 4.2 and the options of ``coldsnap.drivers.criu``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from attrs import frozen

__all__ = ["KINDS", "Finding", "Kind", "Severity", "host_finding"]

Severity = Literal["blocks", "spoils", "note"]


@frozen
class Kind:
    """A row of the table.

    Attributes:
        severity: blocks a capture, spoils what is restored, or is only noted.
        found: What it is, in general.
        why: What would come of it.
        remedy: What to do.
    """

    severity: Severity
    found: str
    why: str
    remedy: str


@frozen(kw_only=True)
class Finding:
    """One thing that would block or spoil a capture.

    Attributes:
        kind: Its row in ``KINDS``.
        severity: blocks, spoils or note.
        pid: The process; 0 when it is about the machine.
        comm: Its name.
        fd: The descriptor; ``None`` when it is not about one.
        path: The file; empty when it is not about one.
        what: What was found.
        why: What would come of it.
        remedy: What to do.
        passing: Whether it may go by itself soon: a connection whose client has just gone.
    """

    kind: str
    severity: str
    pid: int
    comm: str
    fd: int | None
    path: str
    what: str
    why: str
    remedy: str
    passing: bool

    def __str__(self) -> str:
        """Say it in one line."""
        if not self.pid:
            return self.what
        where = "" if self.fd is None else f", descriptor {self.fd}"
        return f"process {self.pid} ({self.comm}){where}: {self.what}; {self.remedy}"


def host_finding(kind: str, what: str) -> Finding:
    """Name something about the machine; the sentence says what to do."""
    row = KINDS[kind]
    return Finding(
        kind=kind,
        severity=row.severity,
        pid=0,
        comm="",
        fd=None,
        path="",
        what=what,
        why=row.why,
        remedy=row.remedy,
        passing=False,
    )


KINDS: Mapping[str, Kind] = {
    "foreign": Kind(
        "blocks",
        "a server that ColdSnap did not launch",
        "it has no keeper to stop and continue it, and no control socket to bring it to rest",
        "start it with Launch, capture it through its handle",
    ),
    "criu": Kind("blocks", "no CRIU that works here", "CRIU writes and reads the process images", "install CRIU 4.2"),
    "capability": Kind(
        "blocks",
        "a capability that CRIU needs is missing",
        "CRIU cannot put back what the capability is about",
        "run as root, and add it to the container",
    ),
    "seccomp": Kind(
        "blocks",
        "CRIU's own chain of processes is under a seccomp filter",
        "a filtered process may not suspend the filters of the processes it dumps",
        "start the container without a seccomp profile",
    ),
    "io-uring": Kind(
        "blocks",
        "an io_uring ring: descriptor, mapping or thread",
        "the kernel lets nobody read or make again the state of a ring",
        "start the engine under the keeper, which denies io_uring to it",
    ),
    "userfaultfd": Kind(
        "blocks",
        "a userfaultfd",
        "who waits for page faults, and on what, cannot be read",
        "switch off the feature that uses it",
    ),
    "anonymous-file": Kind(
        "blocks",
        "an anonymous file of a kind that CRIU does not know, such as perf_event, bpf-map or landlock-ruleset",
        "what is behind it cannot be read or made again",
        "end the profiler or switch off the feature that opened it",
    ),
    "pidfd": Kind(
        "blocks",
        "a pidfd of a process outside the tree",
        "that process is not restored, so the descriptor would have nothing to be about",
        "close it before the capture",
    ),
    "terminal": Kind(
        "blocks",
        "a terminal",
        "its other end belongs to whoever looks at it",
        "start the engine with stdin from /dev/null and output to a file",
    ),
    "session": Kind(
        "blocks",
        "a process whose session began outside the tree",
        "a session is restored by its leader, and the leader is not there",
        "start the engine under the keeper, or with setsid",
    ),
    "tracer": Kind(
        "blocks",
        "a tracer, for example a debugger",
        "a process has one tracer, and CRIU must be it",
        "detach the debugger or profiler",
    ),
    "namespace": Kind(
        "blocks",
        "a process in namespaces of its own",
        "CRIU does not dump namespaces inside those of the tree",
        "switch off the sandbox that makes them",
    ),
    "network": Kind(
        "blocks",
        "a tree in another network namespace",
        "its connections cannot be seen from here",
        "run this beside it, in the same container",
    ),
    "outside-file": Kind(
        "blocks",
        "a file opened outside the tree's mount namespace",
        "it has no path under which a restored process could open it",
        "start the engine under the keeper, which closes inherited descriptors",
    ),
    "device": Kind(
        "blocks",
        "a device other than /dev/null and its like, and NVIDIA's",
        "a device's state is in the device",
        "switch off the feature that opens it",
    ),
    "huge-unlinked": Kind(
        "blocks",
        "an unlinked file above 128 MiB",
        "the image would hold its contents, and this is CRIU's limit for that",
        "let the engine keep such data in memory",
    ),
    "hugetlb": Kind(
        "blocks",
        "memory in huge pages of the reserved pool (hugetlb)",
        "CRIU does not find the kernel's own mount behind it",
        "use transparent huge pages instead",
    ),
    "sysv-memory": Kind(
        "blocks",
        "a shared memory segment of System V",
        "CRIU dumps it with its whole IPC namespace or not at all",
        "use POSIX shared memory instead",
    ),
    "inotify": Kind(
        "blocks",
        "a watch (inotify) of a file that has no usable handle, as in /proc, /sys and overlays",
        "CRIU finds watched files by their handles",
        "switch off the watching, or watch a directory of another filesystem",
    ),
    "socket-kind": Kind(
        "blocks",
        "a socket of another kind than TCP, UDP, raw, packet, Unix and netlink",
        "CRIU knows no others",
        "switch off the feature that opens it; for MPTCP, use TCP",
    ),
    "tcp-peer": Kind(
        "blocks",
        "a TCP connection to a process outside the tree",
        "its other end does not go back in time",
        "close it: let clients finish and drop kept-alive connections",
    ),
    "unix-peer": Kind(
        "blocks",
        "a Unix socket connected to one outside the tree",
        "half a connection cannot be dumped",
        "close it before the capture",
    ),
    "unix-waiting": Kind(
        "blocks",
        "a Unix socket on which a process outside the tree waits to be accepted",
        "half a connection cannot be dumped",
        "let it accept, or end the other process",
    ),
    "driver-breakpoint": Kind(
        "blocks",
        "a breakpoint or uprobe in a library of the NVIDIA driver",
        "every CUDA call of a restored process would hang in it",
        "detach what traces the driver, and start the engine again",
    ),
    "secret-name": Kind(
        "blocks",
        "environment names that look secret",
        "the image holds the environment, so the values could be read from the artifact",
        'launch it without them, or set process.secrets = "allow"',
    ),
    "pipe": Kind(
        "spoils",
        "a pipe whose other end is outside the tree",
        "a restored writer is killed by SIGPIPE, a restored reader finds the end",
        "start the engine with output to a file",
    ),
    "growing-file": Kind(
        "spoils",
        "a file that is written to while we look",
        "a restore needs it at least as long as it was, and goes on writing where it was",
        "send the output to the engine's log, or stop what writes",
    ),
    "memory-mount": Kind(
        "spoils",
        "a file on a filesystem in memory other than /dev/shm",
        "after a reboot, or on another machine, it is not there",
        "put it on a disk, or into the engine's TMPDIR",
    ),
    "gpu-shared": Kind(
        "spoils",
        "processes of the tree that share a GPU",
        "a restore needs the memory of all of them on one device",
        "give every rank a GPU of its own",
    ),
    "managed-memory": Kind(
        "note",
        "mappings of /dev/nvidia-uvm; which are managed memory is known to the driver only",
        "the driver refuses to checkpoint managed memory (cudaMallocManaged)",
        "qualify the engine by a capture; allocate with cudaMalloc",
    ),
    "huge-pages": Kind(
        "note",
        "transparent huge pages that only those get who ask (`madvise`), or nobody",
        "a restore faults in every 4 KiB by itself; on an H200 it took 1.9 s, and 1.5 s with `always`",
        "on a machine that is there for restores, set them to always in /sys/kernel/mm/transparent_hugepage/enabled",
    ),
    "criu-cache": Kind(
        "note",
        "a /run that is not a tmpfs",
        "CRIU keeps what it learns of the kernel only there, and probes anew each time",
        "mount a tmpfs at /run",
    ),
    "deleted-file": Kind(
        "note",
        "an unlinked file",
        "the image holds its contents",
        "nothing; close it if it is large",
    ),
    "written-file": Kind(
        "note",
        "a file open for writing",
        "a restore needs it at least as long as it was; a clone writes to the same file",
        "nothing for one restore at a time; for clones, write below TMPDIR",
    ),
    "lock": Kind(
        "note",
        "a file lock",
        "a restore takes it again, and fails while another process, the original for one, holds it",
        "nothing for one restore at a time; for clones, switch off the lock",
    ),
}
