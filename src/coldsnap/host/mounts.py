"""Which filesystem lies behind a path, and whether reading around the page cache pays there.

The one rule: the kernel is asked about the opened file (its mount id), and names are compared only where the kernel
does not say; so symbolic links, bind mounts and subvolumes cannot mislead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

from coldsnap.host.facts import FilesystemFacts
from coldsnap.host.kernel import KernelFiles

LOCAL = frozenset({"btrfs", "ext2", "ext3", "ext4", "xfs"})
REMOTE = frozenset({"9p", "afs", "ceph", "cifs", "fuse.sshfs", "glusterfs", "lustre", "nfs", "nfs4", "smb2", "smb3"})
MEMORY = frozenset({"devtmpfs", "hugetlbfs", "ramfs", "tmpfs"})


@frozen(kw_only=True)
class Mount:
    """One line of mountinfo (proc_pid_mountinfo(5))."""

    mount_id: int
    device: str
    root: str
    mountpoint: str
    options: tuple[str, ...]
    type: str
    source: str


def parse_mountinfo(text: str) -> tuple[Mount, ...]:
    """Read ``/proc/PID/mountinfo``; a number of optional fields before the dash is allowed for."""
    mounts = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        before, after = left.split(" "), right.split(" ")
        if len(before) < 6 or len(after) < 2:
            continue
        mounts.append(
            Mount(
                mount_id=int(before[0]),
                device=before[2],
                root=_unescape(before[3]),
                mountpoint=_unescape(before[4]),
                options=tuple(before[5].split(",")),
                type=after[0],
                source=_unescape(after[1]),
            )
        )
    return tuple(mounts)


def _unescape(text: str) -> str:
    """Undo the kernel's octal escapes of space, tab, newline and backslash."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def kind_of(filesystem_type: str) -> str:
    """Return ``local``, ``remote``, ``memory`` or ``unknown``."""
    if filesystem_type in REMOTE or filesystem_type.startswith("fuse."):
        return "remote"
    if filesystem_type in MEMORY:
        return "memory"
    return "local" if filesystem_type in LOCAL else "unknown"


def choose_io(filesystem: FilesystemFacts, requested: str = "auto") -> tuple[str, str]:
    """Choose between direct and buffered reads.

    Args:
        filesystem: Where the file lies.
        requested: ``auto``, or what the user insists on.

    Returns:
        The effective choice, and the reason for it.
    """
    if requested != "auto":
        return requested, "explicit-policy"
    return {
        "remote": ("buffered", "remote-filesystem-prefers-page-cache"),
        "local": ("direct", "qualified-local-filesystem"),
        "memory": ("buffered", "memory-filesystem-is-the-page-cache"),
    }.get(filesystem.kind, ("buffered", "unknown-filesystem-safe-default"))


def filesystem_of(path: str | os.PathLike[str], kernel: KernelFiles | None = None) -> FilesystemFacts:
    """Find the filesystem behind a path, or behind its nearest ancestor that exists.

    Args:
        path: Any path; symbolic links are followed, since model files are links to blobs.
        kernel: Where to read mountinfo.

    Raises:
        OSError: The path may not be looked at.
    """
    real = Path(os.path.realpath(path))
    while not real.exists() and real != real.parent:
        real = real.parent
    # O_NOFOLLOW: the name was resolved above; a link put there since is an error rather than another file.
    descriptor = os.open(real, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return filesystem_behind(descriptor, path=os.fspath(path), real=str(real), kernel=kernel)
    finally:
        os.close(descriptor)


def filesystem_behind(
    descriptor: int, *, path: str, real: str | None = None, kernel: KernelFiles | None = None
) -> FilesystemFacts:
    """Find the filesystem behind an open file.

    Args:
        descriptor: The open file.
        path: Its name, for the result.
        real: Its name without symbolic links, when known.
        kernel: Where to read mountinfo.
    """
    kernel = kernel or KernelFiles()
    mounts = parse_mountinfo(kernel.text("/proc/self/mountinfo") or "")
    info = kernel.text(f"/proc/self/fdinfo/{descriptor}") or ""
    match = re.search(r"^mnt_id:\s*(\d+)", info, re.MULTILINE)
    status, space = os.fstat(descriptor), os.statvfs(descriptor)
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    mount = find_mount(mounts, real or os.path.realpath(path), device, int(match[1]) if match else None)
    return FilesystemFacts(
        path=path,
        type=mount.type if mount else "unknown",
        source=mount.source if mount else "unknown",
        mountpoint=mount.mountpoint if mount else "unknown",
        device=device,
        free_bytes=space.f_bavail * space.f_frsize,
        kind=kind_of(mount.type) if mount else "unknown",
        read_only=bool(space.f_flag & os.ST_RDONLY),
    )


def find_mount(mounts: Sequence[Mount], real: str, device: str, mount_id: int | None) -> Mount | None:
    """Return the mount with this id; without one, the longest mount point above ``real``, same device first.

    The device alone does not do: a btrfs subvolume reports one that mountinfo does not list.
    """
    by_id = [mount for mount in mounts if mount.mount_id == mount_id]
    if by_id:
        return by_id[0]
    above = [mount for mount in mounts if _contains(mount.mountpoint, real)]
    above = [mount for mount in above if mount.device == device] or above
    # Of two mounts on one point the later covers the earlier.
    return max(enumerate(above), key=lambda item: (len(item[1].mountpoint), item[0]), default=(0, None))[1]


def _contains(mountpoint: str, real: str) -> bool:
    return mountpoint in {"/", real} or real.startswith(mountpoint + "/")
