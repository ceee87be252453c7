"""What is wrong with a process itself: tracer, session, namespaces, memory, environment.

The one rule: names of the environment are compared, values never kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from coldsnap.drivers.findings import Finding, Severity
from coldsnap.drivers.subject import Mapped, Subject
from coldsnap.host.secrets import secret_names

__all__ = ["process_findings"]

NAMESPACES = ("ipc", "mnt", "pid", "pid_for_children", "user", "uts")
"""Those that CRIU refuses to dump when a process has its own; a network namespace of its own it dumps."""

POOL = "/anon_hugepage"
RINGS = {"anon_inode:[io_uring]": "io-uring", "anon_inode:[userfaultfd]": "userfaultfd"}


def process_findings(subject: Subject, root: Subject, pids: Sequence[int], secrets: Severity) -> Iterator[Finding]:
    """Yield what is wrong with one process.

    Args:
        subject: The process.
        root: The root of its tree.
        pids: Every process of the tree.
        secrets: How severe a name that looks secret is.
    """
    if (tracer := subject.status.get("TracerPid", "0")) != "0":
        yield subject.finding("tracer", f"it is traced by process {tracer}")
    if subject.session not in pids:
        yield subject.finding("session", f"its session {subject.session} began outside the tree")
    own = [kind for kind in NAMESPACES if subject.link(f"ns/{kind}") != root.link(f"ns/{kind}")]
    if own:
        yield subject.finding("namespace", f"it has its own {', '.join(own)} namespace")
    for thread in subject.list("task"):
        if (name := subject.read(f"task/{thread}/comm").strip()).startswith("iou-"):
            yield subject.finding("io-uring", f"an io_uring ring (thread {name})")
    if names := secret_names(subject.environment_names):
        yield subject.finding(
            "secret-name", f"environment names that look secret: {', '.join(names)}", severity=secrets
        )
    yield from _memory(subject)


def _memory(subject: Subject) -> Iterator[Finding]:
    told = set(subject.links.values())
    for mapping in subject.mapped:
        if mapping.path in told:
            continue
        if (kind := RINGS.get(mapping.path)) is not None:
            what = "an io_uring ring" if kind == "io-uring" else "a userfaultfd"
            yield subject.finding(kind, f"{what}, mapped")
        elif mapping.path.startswith("/SYSV"):
            yield subject.finding("sysv-memory", f"a shared memory segment of System V, {_size(mapping)}")
        elif mapping.path.startswith(POOL) or _in_pool(subject, mapping):
            what = f"memory in huge pages of the reserved pool, {_size(mapping)}"
            yield subject.finding("hugetlb", what, path=mapping.path)
        else:
            continue
        told.add(mapping.path)


def _in_pool(subject: Subject, mapping: Mapped) -> bool:
    pools = (mount.path for mount in subject.mounts if mount.type == "hugetlbfs")
    return any(mapping.path.startswith(f"{pool}/") for pool in pools)


def _size(mapping: Mapped) -> str:
    return f"{mapping.bytes} bytes at {mapping.addresses.partition('-')[0]}"
