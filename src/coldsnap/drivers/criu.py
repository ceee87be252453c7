"""CRIU: version, check, features, dump and restore, each one conversation with one ``criu swrk`` process.

The one rule: the answer decides. CRIU writes ``Error`` lines about things that do not matter (a resource limit it may
not raise) and none about some that do, so a log is quoted, never searched.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from attrs import field, frozen

from coldsnap.drivers.base import Spawner, end_process
from coldsnap.drivers.messages import enum_value, message
from coldsnap.drivers.swrk import IMAGES_FD, PAGES_FD, SHARED_FD, WORK_FD, Session, local_spawner
from coldsnap.errors import DriverError, StepTimeout

__all__ = ["Criu", "Features", "log_tail"]

GHOST_LIMIT_BYTES = 128 << 20
"""Unlinked files up to this size travel in the image; NCCL's proxy shared memory is 65 MiB."""

FREEZE_TIMEOUT_S = 10
LOG_LEVEL = 4
LOG_TAIL_LINES = 20
LOG_READ_BYTES = 4 << 20
COMPLAINT = "Error ("
NOISE = "Can't setup RLIMIT_NOFILE"
"""Without CAP_SYS_RESOURCE CRIU complains that it cannot raise its own file limit, and goes on."""

CHECK_TIMEOUT_S = 20.0
PIDFILE = "restored.pid"

Notify = Callable[[int], None]


@frozen(kw_only=True)
class Features:
    """What CRIU says it can do on this kernel."""

    mem_track: bool
    lazy_pages: bool
    pidfd_store: bool


@frozen(kw_only=True)
class _Work:
    """What one request needs beyond its options."""

    fds: Mapping[int, int] = field(factory=dict)
    timeout_s: float = CHECK_TIMEOUT_S
    notify: Mapping[str, Notify] = field(factory=dict)
    started: Notify = lambda _pid: None


_NO_WORK = _Work()


def _lines(directory_fd: int, name: str) -> list[str]:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
    except OSError:
        return []
    with os.fdopen(fd, "rb") as log:
        log.seek(max(0, os.fstat(fd).st_size - LOG_READ_BYTES))
        lines = log.read().decode("utf-8", "replace").splitlines()
    return [line for line in lines if NOISE not in line]


def log_tail(directory_fd: int, name: str) -> str:
    """Return what a log of CRIU ends with, and the complaints before that.

    Processes that CRIU restores write beside each other, so the reason often stands far above the end.

    Args:
        directory_fd: The directory it lies in.
        name: Its name.
    """
    lines = _lines(directory_fd, name)
    complaints = [line for line in lines[:-LOG_TAIL_LINES] if COMPLAINT in line]
    return "\n".join([*complaints[:LOG_TAIL_LINES], *lines[-LOG_TAIL_LINES:]])


def _reason(answer: Any, tail: str) -> str:
    """Say in CRIU's words why it failed: its first error, unless that is the one that means nothing."""
    first = answer.cr_errmsg.strip()
    if not first or NOISE in first:
        first = next((line for line in tail.splitlines() if COMPLAINT in line), "")
    return first or os.strerror(answer.cr_errno or errno.EIO)


class Criu:
    """One CRIU executable.

    Args:
        path: The executable.
        spawner: Starts it beside the tree; without one it runs in the caller's namespaces, which is enough for
            ``version``, ``check`` and ``features``.
    """

    def __init__(self, path: str | Path, spawner: Spawner | None = None) -> None:
        self.path = str(path)
        self._spawner = spawner

    def version(self) -> tuple[int, int, int]:
        """Return major, minor and sublevel."""
        found = self._ask("VERSION").version
        return found.major_number, found.minor_number, found.sublevel

    def check(self) -> None:
        """Have CRIU check kernel and privileges.

        Raises:
            DriverError: They do not suffice.
        """
        self._ask("CHECK")

    def features(self) -> Features:
        """Ask which optional features CRIU has on this kernel."""
        request = message("criu_req")()
        for name in ("mem_track", "lazy_pages", "pidfd_store"):
            setattr(request.features, name, True)
        found = self._ask("FEATURE_CHECK", request).features
        return Features(mem_track=found.mem_track, lazy_pages=found.lazy_pages, pidfd_store=found.pidfd_store)

    def dump(
        self,
        pid: int,
        *,
        images_fd: int,
        work_fd: int,
        timeout_s: float,
        notify: Mapping[str, Notify] | None = None,
    ) -> None:
        """Write the image of a process tree; the tree runs on, whatever happens.

        CRIU could kill the tree or leave it stopped, but then its TCP connections stay in repair mode: a tree that is
        continued later, because its artifact could not be committed, would find them dead. Who wants it stopped sends
        SIGSTOP in ``post-dump``, while it is frozen; who wants it dead kills it when the artifact exists.

        Args:
            pid: The root, in the tree's pid namespace.
            images_fd: Directory for the image files.
            work_fd: Directory for ``dump.log`` and ``stats-dump``.
            timeout_s: Deadline, s.
            notify: By notification: ``pre-dump``, ``post-dump`` (the tree is frozen) and others. One that raises
                undoes the dump; its exception is raised here.

        Raises:
            DriverError: CRIU refused.
            StepTimeout: The deadline passed.
        """
        options = {"pid": pid, "log_file": "dump.log", "timeout": max(1, min(FREEZE_TIMEOUT_S, int(timeout_s)))}
        # A connection that nobody accepted yet would make the dump fail: its client sees a reset instead.
        options |= {"leave_running": True, "tcp_skip_in_flight": True, "ghost_limit": GHOST_LIMIT_BYTES}
        fds = {IMAGES_FD: images_fd, WORK_FD: work_fd}
        self._work("DUMP", options, _Work(fds=fds, timeout_s=timeout_s, notify=notify or {}))

    def restore(
        self,
        *,
        images_fd: int,
        work_fd: int,
        timeout_s: float,
        replace: Mapping[str, bytes] | None = None,
        pages: Mapping[str, int] | None = None,
        notify: Mapping[str, Notify] | None = None,
        stopped: bool = False,
    ) -> int:
        """Bring a process tree back.

        Args:
            images_fd: Directory of the image files; only read.
            work_fd: Directory for ``restore.log`` and ``stats-restore``; with ``replace``, for ``images`` too.
            timeout_s: Deadline, s.
            replace: Image files that CRIU is to see in place of those of the directory.
            pages: Descriptors of files of pages that the directory does not have; CRIU takes from them what it has
                restored, so that no page is there twice.
            notify: By notification; ``post-restore`` brings the root's pid.
            stopped: Leave every process stopped by SIGSTOP, before it has run an instruction of its own.

        Returns:
            The root's pid. It is a child of the spawner.

        Raises:
            DriverError: CRIU refused, and killed what it had restored.
            StepTimeout: The deadline passed; what was restored may still be there.
        """
        # The root becomes a child of CRIU's parent, the keeper: nobody else could reap it or see it end.
        options = {"log_file": "restore.log", "rst_sibling": True, "auto_dedup": bool(pages)}
        options |= {"leave_stopped": True} if stopped else {}
        numbers = {name: PAGES_FD + index for index, name in enumerate(pages or {})}
        with _composed(images_fd, work_fd, replace or {}, numbers) as (seen_fd, started):
            fds = {IMAGES_FD: seen_fd, WORK_FD: work_fd, SHARED_FD: images_fd}
            fds |= {numbers[name]: fd for name, fd in (pages or {}).items()}
            work = _Work(fds=fds, timeout_s=timeout_s, notify=notify or {}, started=started)
            return int(self._work("RESTORE", options, work).restore.pid)

    def restore_streamed(self, *, images_fd: int, work_fd: int, timeout_s: float, stopped: bool = False) -> int:
        """Bring a process tree back whose images somebody serves on a socket in their directory (``page_stream``).

        Args:
            images_fd: The directory with the socket.
            work_fd: Directory for ``restore.log`` and the root's pid.
            timeout_s: Deadline, s.
            stopped: Leave every process stopped.

        Returns:
            The root's pid. It is a child of the spawner.

        Raises:
            DriverError: CRIU refused, and killed what it had restored.
            StepTimeout: The deadline passed; what was restored may still be there.
        """
        # As a command: criu swrk that is told to stream aborts (cr-service.c opens the directory for neither way).
        options = "--restore-detached --restore-sibling --stream --file-locks --link-remap --tcp-established -v4"
        options += f" --images-dir /proc/self/fd/{IMAGES_FD} --work-dir /proc/self/fd/{WORK_FD} --log-file restore.log"
        options += f" --libdir /proc/self/fd/{WORK_FD} --network-lock skip --manage-cgroups=ignore --pidfile {PIDFILE}"
        options += " --leave-stopped" if stopped else ""
        argv = (self.path, "restore", "--no-default-config", *options.split())
        with local_spawner() if self._spawner is None else nullcontext(self._spawner) as spawner:
            fds = {IMAGES_FD: images_fd, WORK_FD: work_fd}
            env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
            pid = spawner.spawn_helper(argv, env=env, name="criu-restore", fds=fds)
            try:
                status = spawner.wait_helper(pid, timeout_s=timeout_s)
            except TimeoutError as error:
                end_process(spawner.proc_fd, pid)
                text = f"criu restore did not end within {timeout_s:g} s and was stopped"
                raise StepTimeout(text, seconds=timeout_s) from error
        tail = log_tail(work_fd, "restore.log")
        if status:
            reason = next((line for line in tail.splitlines() if COMPLAINT in line), f"it ended with status {status}")
            raise DriverError(f"criu restore failed: {reason}", command=f"{self.path} restore", log_tail=tail)
        with open(os.open(PIDFILE, os.O_RDONLY | os.O_CLOEXEC, dir_fd=work_fd)) as file:
            root = int(file.read())
        os.unlink(PIDFILE, dir_fd=work_fd)
        return root

    def _work(self, command: str, options: Mapping[str, Any], work: _Work) -> Any:
        request = message("criu_req")()
        request.opts.images_dir_fd = -1
        request.opts.images_dir = f"/proc/self/fd/{IMAGES_FD}"
        request.opts.log_level = LOG_LEVEL
        request.opts.notify_scripts = True
        request.opts.manage_cgroups_mode = enum_value("criu_cg_mode", "IGNORE")
        request.opts.network_lock = enum_value("criu_network_lock_method", "SKIP")
        for name in ("file_locks", "link_remap", "tcp_established"):
            setattr(request.opts, name, True)
        for name, value in options.items():
            setattr(request.opts, name, value)
        return self._ask(command, request, work)

    def _ask(self, command: str, request: Any = None, work: _Work = _NO_WORK) -> Any:
        request = request if request is not None else message("criu_req")()
        request.type = enum_value("criu_req_type", command)
        verb = command.lower().replace("_", "-")
        failure: str | None = None
        with local_spawner() if self._spawner is None else nullcontext(self._spawner) as spawner:
            session = Session(spawner, self.path, verb, work.timeout_s, work.fds)
            try:
                work.started(session.pid)
                answer, raised = session.converse(request, work.notify)
            except ConnectionError as error:
                failure = f"its process ended without an answer ({error})"
            finally:
                session.end()
        tail = log_tail(work.fds[WORK_FD], f"{verb}.log") if WORK_FD in work.fds else ""
        if failure is None:
            if raised is not None:
                raise raised
            failure = None if answer.success else _reason(answer, tail)
        if failure is not None:
            raise DriverError(f"criu {verb} failed: {failure}", command=f"{self.path} {verb}", log_tail=tail)
        return answer


@contextmanager
def _composed(
    images_fd: int, work_fd: int, replace: Mapping[str, bytes], pages: Mapping[str, int]
) -> Iterator[tuple[int, Notify]]:
    """Make a directory that shows some image files replaced, the others shared; it lives as long as the restore.

    Args:
        images_fd: The files that are shared.
        work_fd: Where to make it.
        replace: Content of files in place of shared ones.
        pages: Further files: number of CRIU's descriptor.

    Yields:
        The directory's descriptor, and what to call with CRIU's pid once that is known.
    """
    if not replace and not pages:
        yield images_fd, lambda _pid: None
        return
    name = f"images-{secrets.token_hex(4)}"
    os.mkdir(name, 0o700, dir_fd=work_fd)
    fd = os.open(name, os.O_DIRECTORY | os.O_RDONLY | os.O_CLOEXEC, dir_fd=work_fd)

    def share(criu_pid: int) -> None:
        # Through CRIU's own descriptor: the artifact's path may be hidden in the tree's mount namespace, may be on
        # another filesystem (no hard links), and CRIU's children close their copies before they read their pages.
        for image in os.listdir(images_fd):
            if image not in replace:
                os.symlink(f"/proc/{criu_pid}/fd/{SHARED_FD}/{image}", image, dir_fd=fd)
        for image, number in pages.items():
            os.symlink(f"/proc/{criu_pid}/fd/{number}", image, dir_fd=fd)

    try:
        for image, data in replace.items():
            with os.fdopen(os.open(image, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=fd), "wb") as file:
                file.write(data)
        yield fd, share
    finally:
        for image in os.listdir(fd):
            os.unlink(image, dir_fd=fd)
        os.rmdir(name, dir_fd=work_fd)
        os.close(fd)
