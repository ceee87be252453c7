"""What keeps a host from dumping and restoring processes, in sentences that say what to do.

The one rule: it judges facts, so it works for a machine far away too; each sentence names its chapter in
``docs/deploy.md``.
"""

from __future__ import annotations

from coldsnap.host.contracts import MINIMUM_CRIU_VERSION
from coldsnap.host.facts import HostFacts


def problems(host: HostFacts, *, namespace: str = "private") -> tuple[str, ...]:
    """Return every reason why CRIU cannot work on a host; nothing when it can.

    Args:
        host: The host.
        namespace: ``process.namespace`` of the policy; ``private`` needs namespaces.
    """
    found = [*_criu_problems(host), *_privilege_problems(host)]
    if namespace == "private":
        missing = [kind for kind in ("ipc", "mount", "pid") if kind not in host.kernel.namespaces]
        if missing:
            found.append(
                f"private {', '.join(missing)} namespaces cannot be created; run as root with CAP_SYS_ADMIN, "
                "or set process.namespace to host (docs/deploy.md#privileges)"
            )
    return tuple(found)


def _criu_problems(host: HostFacts) -> list[str]:
    criu = host.criu
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


def _privilege_problems(host: HostFacts) -> list[str]:
    privileges, found = host.privileges, []
    if missing := privileges.missing_capabilities:
        found.append(
            f"capabilities that CRIU needs are missing: {', '.join(missing)} (uid {privileges.euid}); "
            "run as root, and add them to the container (docs/deploy.md#privileges)"
        )
    if privileges.seccomp != "disabled":
        # The outermost filtered process is where the filter comes from: children inherit it.
        origin = privileges.filtered_ancestors[-1] if privileges.filtered_ancestors else "a process outside"
        found.append(
            f"this process runs under a seccomp filter that comes from {origin}, and CRIU must not; "
            "start the container without a seccomp profile (docs/deploy.md#seccomp)"
        )
    return found
