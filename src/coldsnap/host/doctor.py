"""What keeps a host from dumping and restoring processes, in sentences that say what to do.

The one rule: it judges facts, so it works for a machine far away too; each sentence names its chapter in
``docs/deploy.md``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from coldsnap.host.contracts import MINIMUM_CRIU_VERSION
from coldsnap.host.facts import CriuFacts, HostFacts, PrivilegeFacts


def problems(host: HostFacts, *, namespace: str = "private") -> tuple[str, ...]:
    """Return every reason why CRIU cannot work on a host; nothing when it can.

    Args:
        host: The host.
        namespace: ``process.namespace`` of the policy; ``private`` needs namespaces.
    """
    kinds = named_problems(host.criu, host.privileges, host.kernel.namespaces, namespace=namespace)
    return tuple(sentence for _, sentence in kinds)


def named_problems(
    criu: CriuFacts | None, privileges: PrivilegeFacts, namespaces: Sequence[str], *, namespace: str = "private"
) -> Iterator[tuple[str, str]]:
    """Yield what :func:`problems` returns, each with its kind: criu, capability or seccomp."""
    yield from (("criu", sentence) for sentence in _criu_problems(criu))
    yield from (("capability", sentence) for sentence in _capability_problems(privileges))
    yield from (("seccomp", sentence) for sentence in _seccomp_problems(privileges))
    missing = [kind for kind in ("ipc", "mount", "pid") if kind not in namespaces]
    if namespace == "private" and missing:
        sentence = (
            f"private {', '.join(missing)} namespaces cannot be created; run as root with CAP_SYS_ADMIN, "
            "or set process.namespace to host (docs/deploy.md#privileges)"
        )
        yield "capability", sentence


def slow_restores(transparent_huge_pages: str, run_type: str) -> Iterator[tuple[str, str]]:
    """Yield what makes every restore of a machine slower, each with its kind: huge-pages or criu-cache.

    They are settings of the whole machine, which this library never changes.

    Args:
        transparent_huge_pages: The kernel's choice: always, madvise, never; or unknown.
        run_type: The type of the filesystem behind ``/run``.
    """
    if transparent_huge_pages in {"madvise", "never"}:
        yield (
            "huge-pages",
            (
                f"transparent huge pages are {transparent_huge_pages!r} here; on a machine that is there for restores, "
                "write always to /sys/kernel/mm/transparent_hugepage/enabled"
            ),
        )
    if run_type != "tmpfs":
        yield "criu-cache", f"/run is on {run_type}, where CRIU keeps nothing of what it learns; mount a tmpfs there"


def _criu_problems(criu: CriuFacts | None) -> list[str]:
    needed = ".".join(map(str, MINIMUM_CRIU_VERSION))
    if criu is None:
        return [f"no criu executable was found; install CRIU {needed} or newer or name one (docs/deploy.md#criu)"]
    if not criu.version:
        return [f"criu at {criu.path} cannot be used: {criu.check_message} (docs/deploy.md#criu)"]
    if criu.version < MINIMUM_CRIU_VERSION:
        version = ".".join(map(str, criu.version))
        return [
            f"criu at {criu.path} is {version}, needed {needed} or newer; install a newer one (docs/deploy.md#criu)"
        ]
    if not criu.check_ok:
        return [f"criu check fails with {criu.path}: {criu.check_message} (docs/deploy.md#kernel)"]
    return []


def _capability_problems(privileges: PrivilegeFacts) -> list[str]:
    if not (missing := privileges.missing_capabilities):
        return []
    sentence = (
        f"capabilities that CRIU needs are missing: {', '.join(missing)} (uid {privileges.euid}); "
        "run as root, and add them to the container (docs/deploy.md#privileges)"
    )
    return [sentence]


def _seccomp_problems(privileges: PrivilegeFacts) -> list[str]:
    if privileges.seccomp == "disabled":
        return []
    # The outermost filtered process is where the filter comes from: children inherit it.
    origin = privileges.filtered_ancestors[-1] if privileges.filtered_ancestors else "a process outside"
    sentence = (
        f"this process runs under a seccomp filter that comes from {origin}, and CRIU must not; "
        "start the container without a seccomp profile (docs/deploy.md#seccomp)"
    )
    return [sentence]
