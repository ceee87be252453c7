"""Thaw: the files of a capsule become a running tree.

The one rule: a thaw that fails leaves no process and no file behind, and a capsule is only ever read: many restores,
also at once, share one.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen

from coldsnap.drivers.base import TreeKeeper, end_process
from coldsnap.drivers.criu import Criu
from coldsnap.drivers.dump import IMAGES, await_stopped, opened_directory
from coldsnap.drivers.images import FilesImage, read_claims, read_pids
from coldsnap.drivers.page_images import Feed, RebuiltPages, figures, page_images, rebuild_pages
from coldsnap.drivers.page_stream import serving
from coldsnap.drivers.rebind import PortMap, Rebind, Reservation, choose_ports, move_ports
from coldsnap.drivers.sockets import TcpSocket, read_tcp, read_unix
from coldsnap.drivers.tree_record import HeldDevice, TreeRecord, read_tree_record
from coldsnap.drivers.volatile import ROOT, put_back, remove_volatile
from coldsnap.drivers.volatile_index import VolatileFiles, read_index
from coldsnap.errors import AdmissionError
from coldsnap.transfer.native_images import ImageMoved

__all__ = ["StagedTree", "ThawedTree", "stage_tree", "thaw_tree"]

PIDS_FREE_S = 3.0
"""A pid freed by a dump or a kill lingers as a zombie until its new parent reaps it, s."""

POLL_S = 0.01


@frozen(kw_only=True)
class StagedTree:
    """Everything in place for a thaw.

    Attributes:
        capsule_dir: The capsule.
        image: The open files, ports moved.
        ports: Where every port goes.
        listeners: Where the restored tree will listen.
        volatile: The files that were put back.
        record: What else is known of the tree.
        feed: How compressed pages reach CRIU.
        pages: Files of pages that were compressed, in memory.
        stage_s: How long it took, s.
    """

    capsule_dir: Path
    image: FilesImage
    ports: PortMap
    listeners: tuple[TcpSocket, ...]
    volatile: VolatileFiles
    record: TreeRecord
    feed: Feed
    pages: RebuiltPages
    stage_s: float
    _held: Reservation = field(factory=Reservation)

    def release(self) -> None:
        """Let go of the reserved ports, and of pages in memory."""
        self._held.close()
        self.pages.close()

    def discard(self, keeper: TreeKeeper) -> None:
        """Let go of the ports and remove the files that were put back: this tree will not be thawed."""
        self.release()
        remove_volatile(keeper.root_fd, self.volatile.entries)


@frozen(kw_only=True)
class ThawedTree:
    """A tree that runs again, adopted by its keeper.

    Attributes:
        root_pid: In the tree's pid namespace.
        pids: Every process, the root first.
        listeners: Where it listens.
        nvidia_pids: Processes whose device state is to be restored, children first.
        devices: Where that state was at capture.
        image_bytes: Size of CRIU's files.
        thaw_s: From the request to CRIU's answer, s.
        wait_s: How long captured pids were waited for, s.
        pages: What bringing compressed files of pages back took.
        grown: Files that have grown since the dump: the tree goes on where it had been.
    """

    root_pid: int
    pids: tuple[int, ...]
    listeners: tuple[TcpSocket, ...]
    nvidia_pids: tuple[int, ...]
    devices: tuple[HeldDevice, ...]
    image_bytes: int
    thaw_s: float
    wait_s: float
    pages: tuple[ImageMoved, ...]
    grown: tuple[str, ...]

    @property
    def details(self) -> Mapping[str, float]:
        """The figures of a receipt."""
        return {"criu_s": self.thaw_s, "pids_s": self.wait_s, **figures(self.pages)}


def stage_tree(keeper: TreeKeeper, capsule_dir: Path, *, rebind: Rebind | None, feed: Feed | None = None) -> StagedTree:
    """Put the volatile files back and choose and hold the ports; may run beside anything but the thaw.

    Args:
        keeper: Of the tree to be.
        capsule_dir: The capsule; only read.
        rebind: Where the API is to listen; ``None``: where it listened.
        feed: How compressed pages reach CRIU.

    Returns:
        What :func:`thaw_tree` takes; ``discard`` it when it is not thawed.

    Raises:
        AdmissionError: The port is taken.
        DriverError: A file is in the way, or the memory is full.
        FormatError: The capsule is broken.
        IntegrityError: An image file is not whole, or a block of its pages is not what was written.
        NativeError: Its pages cannot be read, or memory is full.
    """
    began = time.monotonic()
    feed = feed or Feed()
    held, pages = Reservation(), RebuiltPages()
    try:
        with opened_directory(capsule_dir) as capsule_fd:
            volatile, record = read_index(capsule_fd), read_tree_record(capsule_fd)
        with opened_directory(capsule_dir / IMAGES) as images_fd, opened_directory("/proc") as proc_fd:
            record.check_images(images_fd)
            image = FilesImage.read(images_fd)
            _require_names_free(keeper, image)
            ports = choose_ports(image.tcp_sockets(), lambda: read_tcp(proc_fd, os.getpid()), rebind, held)
            move_ports(image, ports)
            _make_logs(keeper, image)
            if feed.way == "rebuilt":
                pages = rebuild_pages(images_fd, feed)
        with opened_directory(capsule_dir) as capsule_fd:
            put_back(volatile, keeper.root_fd, capsule_fd)
    except BaseException:
        held.close()
        pages.close()
        raise
    return StagedTree(
        capsule_dir=capsule_dir,
        image=image,
        ports=ports,
        listeners=tuple(each for each in image.tcp_sockets() if each.listening),
        volatile=volatile,
        record=record,
        feed=feed,
        pages=pages,
        stage_s=time.monotonic() - began,
        held=held,
    )


def _require_names_free(keeper: TreeKeeper, image: FilesImage) -> None:
    """Refuse names of Unix sockets that somebody here listens on, as a rule the original or another clone.

    CRIU would unlink a path before it binds it, and so take the name away from a living process; an abstract name
    belongs to the network namespace, which the tree shares with everybody.
    """
    living = {each.name for each in read_unix().values()}
    taken = [
        name
        for name in image.unix_names()
        if name in living
        and not (keeper.private and name.startswith(f"{ROOT}/".encode()))
        and (name[:1] == b"\0" or _is_socket(keeper.root_fd, os.fsdecode(name)))
    ]
    if taken:
        raise AdmissionError(
            "the captured processes listen on Unix sockets whose names are taken here; end who has them, or let the "
            "engine make its sockets below TMPDIR, which every restore has to itself:",
            [os.fsdecode(name.replace(b"\0", b"@")) for name in taken],
        )


def _is_socket(root_fd: int, path: str) -> bool:
    found = _stat(root_fd, path)
    return found is not None and stat.S_ISSOCK(found.st_mode)


def _stat(root_fd: int, path: str) -> os.stat_result | None:
    try:
        return os.stat(path.lstrip("/"), dir_fd=root_fd)
    except OSError:
        return None


def _make_logs(keeper: TreeKeeper, image: FilesImage) -> None:
    """Make the logs that the tree held open in its run directory: a fresh one has none yet, and CRIU opens by path."""
    for file in image.regular_files():
        directory, _, name = file.path.rpartition("/")
        if file.writable and directory == keeper.tree_dir:
            os.close(os.open(keeper.rank_dir / name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
            image.forget_sizes([file.path])


def _check_files(keeper: TreeKeeper, image: FilesImage) -> tuple[str, ...]:
    """Compare the files that the tree holds with those of its capture; return those that have grown.

    CRIU compares sizes too, one file at a time and only after it has begun.
    """
    grown, mismatches = [], []
    for file in image.regular_files():
        if file.path.startswith(("/proc/", "/sys/")):
            continue
        found = _stat(keeper.root_fd, file.path)
        if found is None or not stat.S_ISREG(found.st_mode):
            mismatches.append(f"{file.path}: expected the regular file that was open, found none")
        elif file.size_bytes is None:
            continue
        elif found.st_size > file.size_bytes and file.writable:
            grown.append(file.path)
        elif found.st_size != file.size_bytes:
            mismatches.append(f"{file.path}: expected {file.size_bytes} bytes, found {found.st_size}")
    if mismatches:
        raise AdmissionError("files that the captured processes had open are not what they were:", mismatches)
    return tuple(grown)


def _exists(proc_fd: int, pid: int) -> bool:
    try:
        os.stat(str(pid), dir_fd=proc_fd)
    except FileNotFoundError:
        return False
    return True


def _await_pids(proc_fd: int, pids: Iterable[int]) -> None:
    deadline = time.monotonic() + PIDS_FREE_S
    while taken := [pid for pid in pids if _exists(proc_fd, pid)]:
        if time.monotonic() > deadline:
            raise AdmissionError(
                f"captured pids are taken by other processes: {', '.join(map(str, taken[:8]))}; end them, or capture "
                'anew with process.namespace = "private", where every captured pid is free'
            )
        time.sleep(POLL_S)


def _parent(proc_fd: int, pid: int) -> int:
    try:
        fd = os.open(f"{pid}/stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc_fd)
        with os.fdopen(fd, encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _end_restored(keeper: TreeKeeper, pids: Iterable[int]) -> None:
    """Kill what a thaw has left: processes with a captured pid that descend from the keeper."""
    owners = {1} if keeper.private else {keeper.keeper_pid, keeper.guard_pid}
    for pid in pids:
        above = pid
        while above > 1 and above not in owners:
            above = _parent(keeper.proc_fd, above)
        if above in owners and pid not in owners:
            end_process(keeper.proc_fd, pid)


def _restore(
    criu: Criu, staged: StagedTree, images_fd: int, work_fd: int, *, timeout_s: float, stopped: bool
) -> tuple[int, tuple[ImageMoved, ...]]:
    """Have CRIU restore; return the root's pid, and what bringing its pages took."""
    replace = {FilesImage.NAME: staged.image.encode()} if staged.image.edited else {}
    if staged.feed.way == "rebuilt" or not page_images(images_fd):
        how: dict[str, Any] = {"work_fd": work_fd, "timeout_s": timeout_s, "stopped": stopped}
        root = criu.restore(images_fd=images_fd, replace=replace, pages=staged.pages.fds, **how)
        return root, staged.pages.moved
    with serving(images_fd, work_fd, replace, staged.feed) as server:
        shown = server.directory_fd
        root = criu.restore_streamed(images_fd=shown, work_fd=work_fd, timeout_s=timeout_s, stopped=stopped)
    return root, tuple(server.moved)


def thaw_tree(
    keeper: TreeKeeper,
    criu: str | Path,
    staged: StagedTree,
    *,
    timeout_s: float,
    leave: Literal["running", "stopped"] = "running",
) -> ThawedTree:
    """Bring a staged tree back under its keeper.

    Args:
        keeper: With an operation of ours in flight.
        criu: The executable.
        staged: From :func:`stage_tree`.
        timeout_s: Deadline, s.
        leave: What becomes of it; stopped: by SIGSTOP, before it has run an instruction of its own, so that what it
            has in memory can be compared with what was dumped.

    Returns:
        The tree. The keeper has adopted its root.

    Raises:
        AdmissionError: Captured pids are taken, or files it had open have changed.
        DriverError: CRIU refused.
        StepTimeout: The deadline passed.
    """
    began = time.monotonic()
    pids: tuple[int, ...] = ()
    try:
        with opened_directory(staged.capsule_dir / IMAGES) as images_fd, opened_directory(keeper.work_dir) as work_fd:
            captured = read_pids(images_fd)
            claims = read_claims(images_fd)
            grown = _check_files(keeper, staged.image)
            staged.image.forget_sizes(grown)
            _await_pids(keeper.proc_fd, claims)
            pids, waited = captured, time.monotonic()
            root, moved = _restore(
                Criu(criu, keeper), staged, images_fd, work_fd, timeout_s=timeout_s, stopped=leave == "stopped"
            )
            thawed = time.monotonic()
            keeper.adopt(root)
            if leave == "stopped":
                await_stopped(keeper)
    except BaseException:
        _end_restored(keeper, pids)
        staged.discard(keeper)
        raise
    finally:
        staged.release()
    return ThawedTree(
        root_pid=root,
        pids=captured,
        listeners=staged.listeners,
        nvidia_pids=staged.record.nvidia_pids,
        devices=staged.record.devices,
        image_bytes=sum(staged.record.image_bytes.values()),
        thaw_s=thawed - waited,
        wait_s=waited - began,
        pages=moved,
        grown=grown,
    )
