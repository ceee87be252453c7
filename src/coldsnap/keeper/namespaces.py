"""The private world of one tree: its own pids, mounts, System V IPC, ``/proc`` and ``/dev/shm``.

The one rule: after :func:`enter`, nothing that the tree opens comes from outside its mount namespace; CRIU refuses to
dump a descriptor whose mount it cannot find.
"""

from __future__ import annotations

import os

from coldsnap.keeper import kernel, layout

NEED = "a private namespace needs CAP_SYS_ADMIN; run as root, grant it, or set process.namespace to host"


def enter(rank_path: str, rank_fd: int) -> None:
    """Take new mount and IPC namespaces; the pid namespace is new already, and this process is its pid 1.

    Args:
        rank_path: Absolute path of the run directory's ``rank``.
        rank_fd: The same directory, opened outside.

    Raises:
        OSError: A call was refused; the sentence names it.
    """
    kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC)
    # Without this a mount below would show up in the host's tree, where / is usually shared.
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    # Opened anew here: a bind mount's source must belong to this mount namespace, and the run directory may well lie in
    # the /dev/shm that is about to be covered.
    inside = os.open(rank_path, layout.DIRECTORY)
    if not os.path.samestat(os.fstat(inside), os.fstat(rank_fd)):
        raise FileNotFoundError(f"{rank_path} is not the directory that was made a moment ago; somebody moved it")
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    host = os.statvfs(layout.SHM)
    # Never noexec: TMPDIR lies here, and compilers of graphs load what they have just built.
    options = f"size={host.f_blocks * host.f_frsize},mode=1777"
    kernel.mount("tmpfs", layout.SHM, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    for path in (os.path.dirname(layout.IN_PROCESS_DIR), layout.IN_PROCESS_DIR, layout.TMP_DIR):
        os.mkdir(path, 0o700)
    kernel.mount(f"/proc/self/fd/{inside}", layout.IN_PROCESS_DIR, None, kernel.MS_BIND)
    os.close(inside)


def set_pid_floor(floor: int) -> None:
    """Let the next process of this pid namespace have a pid above ``floor``.

    A fresh namespace hands out small pids to helpers; the engine's begin well above them, so that a restore into
    another fresh namespace finds the captured ones free.
    """
    with open("/proc/sys/kernel/ns_last_pid", "r+", encoding="ascii") as last:
        if int(last.read()) < floor:
            last.seek(0)
            last.write(str(floor))
