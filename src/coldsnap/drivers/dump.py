"""Dump: a running tree becomes the files of a capsule.

The one rule: whatever goes wrong, the tree runs on. CRIU continues it when a dump fails, and this module makes sure.

A capsule's directory holds ``images/`` (CRIU's files), ``volatile.json``, ``volatile.blob`` and ``tree.json``.
"""

from __future__ import annotations

import os
import posixpath
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from attrs import frozen

from coldsnap.drivers.audit import audit_tree
from coldsnap.drivers.base import TreeKeeper
from coldsnap.drivers.criu import Criu
from coldsnap.drivers.images import DumpStats, FilesImage, read_pids, read_stats
from coldsnap.drivers.sockets import TcpSocket
from coldsnap.drivers.tree_record import HeldDevice, TreeRecord, write_tree_record
from coldsnap.drivers.volatile import ROOT, save_volatile
from coldsnap.drivers.volatile_index import VolatileFiles
from coldsnap.errors import ColdSnapError, DriverError

__all__ = ["IMAGES", "DumpedTree", "await_stopped", "dump_tree", "opened_directory"]

IMAGES = "images"
LINK_REMAP = "link_remap."
"""CRIU gives a file whose name is gone, but not its inode, a name that starts like this."""

STOPPED_S = 5.0
POLL_S = 0.002


@frozen(kw_only=True)
class DumpedTree:
    """A tree that is a capsule now.

    Attributes:
        root_pid: In the tree's pid namespace.
        pids: Every process, the root first.
        nvidia_pids: Processes whose device state was checkpointed, children first.
        listeners: TCP sockets that accept connections.
        image_bytes: Size of CRIU's files.
        volatile: The files from /dev/shm.
        criu_version: Major, minor, sublevel.
        dump_s: From the request to CRIU's answer, s.
        volatile_s: The part of it that copied the volatile files, s.
        stats: CRIU's own figures.
    """

    root_pid: int
    pids: tuple[int, ...]
    nvidia_pids: tuple[int, ...]
    listeners: tuple[TcpSocket, ...]
    image_bytes: int
    volatile: VolatileFiles
    criu_version: tuple[int, int, int]
    dump_s: float
    volatile_s: float
    stats: DumpStats | None

    @property
    def volatile_bytes(self) -> int:
        """Size of the copied volatile files."""
        return self.volatile.data_bytes

    @property
    def details(self) -> Mapping[str, float]:
        """The figures of a receipt."""
        frozen_s = {} if self.stats is None else {"freezing_s": self.stats.freezing_s, "frozen_s": self.stats.frozen_s}
        return {"criu_s": self.dump_s, "volatile_s": self.volatile_s, **frozen_s}


@contextmanager
def opened_directory(path: Path | str) -> Iterator[int]:
    """Provide a descriptor of a directory."""
    fd = os.open(path, os.O_DIRECTORY | os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


class _WhileFrozen:
    """What is done when CRIU says that the image is complete, and everything still stands still."""

    def __init__(self, keeper: TreeKeeper, images_fd: int, capsule_fd: int, *, stop: bool) -> None:
        self._keeper, self._images_fd, self._capsule_fd, self._stop = keeper, images_fd, capsule_fd, stop
        self.saved = VolatileFiles(entries=())
        self.seconds = 0.0

    def __call__(self, _pid: int) -> None:
        began = time.monotonic()
        skip = (self._keeper.tree_dir,)
        self.saved = save_volatile(self._keeper.root_fd, self._capsule_fd, self._paths(), skip=skip)
        self.seconds = time.monotonic() - began
        if self._stop:
            # Taken when CRIU lets go of the processes, before they do anything else. CRIU's own leave-stopped keeps TCP
            # connections in repair mode, dead for a tree that is to run on (see Criu.dump).
            self._keeper.signal(signal.SIGSTOP, whom="tree")

    def _paths(self) -> set[str]:
        opened = {file.path for file in FilesImage.read(self._images_fd).regular_files()}
        remapped = {path for path in opened if posixpath.basename(path).startswith(LINK_REMAP)}
        if self._keeper.private:
            return {ROOT, *(path for path in remapped if not path.startswith(f"{ROOT}/"))}
        # In the host's /dev/shm only what the tree maps or holds open is known to be its own; its TMPDIR is its own.
        known = remapped | {path for path in opened if path.startswith(f"{ROOT}/")}
        return {self._keeper.tmp_dir} | known | _other_names(known)


def _other_names(paths: set[str]) -> set[str]:
    """Return the names in the host's /dev/shm of the same files: a semaphore is open under a name that is gone."""
    inodes = {os.lstat(path).st_ino for path in paths if path.startswith(f"{ROOT}/")}
    with os.scandir(ROOT) as entries:
        return {entry.path for entry in entries if entry.inode() in inodes}


def await_stopped(keeper: TreeKeeper) -> None:
    """Wait until every process of a tree to which SIGSTOP was sent stands still.

    Raises:
        DriverError: One does not.
    """
    deadline = time.monotonic() + STOPPED_S
    while running := [process.pid for process in keeper.tree() if process.state not in "TZ"]:
        if time.monotonic() > deadline:
            raise DriverError(f"the processes {running} did not stop", command="stop the tree")
        time.sleep(POLL_S)


@contextmanager
def _running_unless_dumped(keeper: TreeKeeper) -> Iterator[None]:
    """Continue the tree when the dump fails: CRIU lets it go, but SIGSTOP may have been sent already."""
    try:
        yield
    except BaseException:
        with suppress(ColdSnapError):  # the error in flight is the one to tell of
            keeper.signal(signal.SIGCONT, whom="tree")
        raise


def _record(
    capsule_fd: int, images_fd: int, nvidia_pids: tuple[int, ...], devices: tuple[HeldDevice, ...]
) -> TreeRecord:
    sizes = {name: os.stat(name, dir_fd=images_fd).st_size for name in sorted(os.listdir(images_fd))}
    record = TreeRecord(nvidia_pids=nvidia_pids, image_bytes=sizes, devices=devices)
    write_tree_record(capsule_fd, record)
    return record


def dump_tree(
    keeper: TreeKeeper,
    criu: str | Path,
    capsule_dir: Path,
    *,
    leave: Literal["stopped", "running"],
    timeout_s: float,
    nvidia_pids: tuple[int, ...] = (),
    devices: tuple[HeldDevice, ...] = (),
) -> DumpedTree:
    """Write the image of a tree, and its volatile files, into a capsule.

    Args:
        keeper: The tree's, with an operation of ours in flight. For ``leave="stopped"`` it must hold the undo entry
            that continues the tree when the caller dies.
        criu: The executable.
        capsule_dir: An empty directory.
        leave: What becomes of the tree afterwards.
        timeout_s: Deadline, s.
        nvidia_pids: Processes whose device state was checkpointed before, children first.
        devices: Where that state was.

    Returns:
        What was dumped.

    Raises:
        AdmissionError: The audit found obstacles; nothing was frozen.
        DriverError: CRIU or the copying failed; the tree runs on.
        StepTimeout: The deadline passed; the tree runs on.
    """
    audit = audit_tree(keeper)
    audit.require()
    os.mkdir(capsule_dir / IMAGES, 0o700)
    with (
        opened_directory(capsule_dir) as capsule_fd,
        opened_directory(capsule_dir / IMAGES) as images_fd,
        opened_directory(keeper.work_dir) as work_fd,
    ):
        frozen = _WhileFrozen(keeper, images_fd, capsule_fd, stop=leave == "stopped")
        directories = {"images_fd": images_fd, "work_fd": work_fd}
        began = time.monotonic()
        with _running_unless_dumped(keeper):
            Criu(criu, keeper).dump(audit.pids[0], **directories, timeout_s=timeout_s, notify={"post-dump": frozen})
            if leave == "stopped":
                await_stopped(keeper)
        dump_s = time.monotonic() - began
        return DumpedTree(
            root_pid=audit.pids[0],
            pids=read_pids(images_fd),
            nvidia_pids=nvidia_pids,
            listeners=tuple(each for each in FilesImage.read(images_fd).tcp_sockets() if each.listening),
            image_bytes=sum(_record(capsule_fd, images_fd, nvidia_pids, devices).image_bytes.values()),
            volatile=frozen.saved,
            criu_version=Criu(criu).version(),
            dump_s=dump_s,
            volatile_s=frozen.seconds,
            stats=read_stats(work_fd),
        )
