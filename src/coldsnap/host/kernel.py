"""The files through which a kernel describes itself, below one root.

The one rule: whatever in this package reads ``/proc`` or ``/sys`` does it here, so that a test can give another root.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from attrs import frozen

from coldsnap.host import diagnostics

# include/uapi/linux/capability.h, by number.
# fmt: off
CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
    "LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER",
    "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE",
    "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP",
    "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF",
    "CHECKPOINT_RESTORE",
)
# fmt: on

# include/net/tcp_states.h
TCP_LISTEN = "0A"


@frozen(kw_only=True)
class KernelFiles:
    """Read the kernel's files below ``root``.

    Attributes:
        root: Directory that holds ``proc`` and ``sys``.
    """

    root: Path = Path("/")

    def text(self, path: str) -> str | None:
        """Return a file's text without surrounding white space; ``None`` when it is absent or may not be read."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace").strip()
        except OSError:
            return None

    def number(self, path: str) -> int | None:
        """Return a file's text as an integer; ``None`` when it is absent or no number."""
        text = self.text(path)
        return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else None

    def exists(self, path: str) -> bool:
        """Say whether a path exists below the root."""
        return (self.root / path.lstrip("/")).exists()

    def writable(self, path: str) -> bool:
        """Say whether this process may open a file for writing; nothing is written."""
        try:
            os.close(os.open(self.root / path.lstrip("/"), os.O_WRONLY | os.O_CLOEXEC))
        except OSError:
            return False
        return True

    def names(self, path: str) -> tuple[str, ...]:
        """Return the sorted names in a directory, empty when it is absent."""
        try:
            return tuple(sorted(os.listdir(self.root / path.lstrip("/"))))
        except OSError:
            return ()

    def status(self, pid: int | str = "self") -> dict[str, str]:
        """Return ``/proc/PID/status`` by field; empty when the process is gone (proc_pid_status(5))."""
        text = self.text(f"/proc/{pid}/status") or ""
        pairs = (line.partition(":") for line in text.splitlines())
        return {name: value.strip() for name, colon, value in pairs if colon}


def capability_names(mask: str) -> tuple[str, ...]:
    """Read a capability mask in hexadecimal: the names of its bits, with ``CAP_``, sorted."""
    bits = int(mask, 16)
    return tuple(sorted(f"CAP_{name}" for number, name in enumerate(CAPABILITIES) if bits >> number & 1))


def listening_ports(kernel: KernelFiles) -> tuple[int, ...]:
    """Return the TCP ports of this network namespace with a listener, sorted."""
    if kernel.root == Path("/"):
        with suppress(OSError):  # a kernel without that module
            return diagnostics.listening_ports()
    return ports_in_tables(*(kernel.text(f"/proc/net/{name}") or "" for name in ("tcp", "tcp6")))


def ports_in_tables(*tables: str) -> tuple[int, ...]:
    """Return the ports in state LISTEN in the text of ``/proc/net/tcp`` and ``tcp6``, sorted (proc_pid_net(5))."""
    ports = set()
    for table in tables:
        for line in table.splitlines()[1:]:
            fields = line.split()
            if len(fields) > 3 and fields[3] == TCP_LISTEN:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return tuple(sorted(ports))
