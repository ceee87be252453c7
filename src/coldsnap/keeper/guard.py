"""The guard: parent of the keeper, outside the tree's namespaces, which cleans up when the keeper is gone.

The one rule: it does nothing but wait. What it does not do it cannot die of, and whatever ends the keeper, the run
directory says so or is gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import stat
import sys
import time
from typing import Any, NoReturn

from coldsnap.keeper import aftermath, keeper, kernel, layout, namespaces, wire
from coldsnap.keeper.birth import Birth
from coldsnap.keeper.tree import Tree, describe, start_time


class _Refused(Exception):
    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


def main(bootstrap_fd: int) -> NoReturn:
    """Become a guard, in the background.

    Args:
        bootstrap_fd: The caller's connection: the first message says what to keep, the first answer whether it is kept.
    """
    os.chdir("/")
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    first = socket.socket(fileno=bootstrap_fd)
    received = wire.receive(first)  # it may have been started before anybody knew whether there is something to keep
    if received is None or os.fork():
        os._exit(0)  # the guard is nobody's child: notebooks kill their children when they end
    try:
        _guard(first, **received[0])
    except _Refused as refused:
        _answer(first, refused.kind, str(refused))
    except OSError as error:
        _answer(first, *_told(error, received[0]["run_dir"]))
    os._exit(0)


def _told(error: OSError, run_dir: str) -> tuple[str, str]:
    """Say what is wrong with a place for a run directory."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        sentence = f"there is no room left for the run directory {run_dir} ({error.strerror}); {layout.ELSEWHERE}"
        return "busy", sentence
    return "os", str(error)


def _answer(first: socket.socket, kind: str, sentence: str) -> None:
    with contextlib.suppress(OSError):
        wire.send(first, {"ok": False, "kind": kind, "error": sentence})


def _guard(first: socket.socket, *, run_dir: str, private: bool, labels: dict[str, str]) -> None:
    dir_fd = _claim(run_dir)
    try:
        birth, link = _prepare(first, run_dir, dir_fd, private=private, labels=labels)
        child = _fork(birth, link)
    except BaseException:
        _remove(run_dir, dir_fd)
        raise
    final = _await_end(birth, link, child)
    _conclude(birth, child, final)


# The run directory


def _claim(run_dir: str) -> int:
    """Make the run directory, or take a dead one over; it is locked for as long as guard or keeper live."""
    parent = os.path.dirname(run_dir)
    try:
        os.makedirs(parent, 0o700, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        found = error.filename if isinstance(error, FileExistsError) else parent
        raise _Refused(
            "busy", f"{found} is not a directory, so that {run_dir} cannot be made; choose another run directory"
        ) from None
    _check_parent(parent)
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(run_dir, 0o700)
        try:
            dir_fd = layout.open_directory(run_dir)
        except NotADirectoryError:
            raise _Refused("busy", f"{run_dir} is not a directory; choose another run directory") from None
        _check_owner(run_dir, dir_fd)
        if not layout.lock(dir_fd):
            raise _Refused(
                "busy", f"{run_dir} belongs to an engine that is running; stop it, attach to it, or choose another name"
            )
        # The one who held the lock a moment ago may have removed the name: then this is nobody's directory.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(run_dir), os.fstat(dir_fd)):
                break
        os.close(dir_fd)
    if others := layout.foreign(dir_fd):
        raise _Refused(
            "busy", f"{run_dir} is not a run directory, it holds {', '.join(others[:3])}; choose another one"
        )
    if os.listdir(dir_fd):
        aftermath.settle_once(run_dir, dir_fd, _open_root(), cause="its guard and keeper were killed")
        layout.empty(dir_fd)
    return dir_fd


def _check_owner(run_dir: str, dir_fd: int) -> None:
    status = os.fstat(dir_fd)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        mode = f"uid {status.st_uid}, mode {status.st_mode & 0o7777:o}"
        raise _Refused(
            "busy", f"{run_dir} must belong to uid {os.geteuid()} and be writable by nobody else, found {mode}"
        )


def _check_parent(parent: str) -> None:
    # Who may rename in the parent could put another directory in this one's place.
    status = os.stat(parent)
    open_to_all = status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
    if status.st_uid not in {0, os.geteuid()} or open_to_all:
        mode = f"uid {status.st_uid}, mode {status.st_mode & 0o7777:o}"
        raise _Refused(
            "busy", f"{parent} must belong to uid {os.geteuid()} or root, and not be writable by all, found {mode}"
        )


def _remove(run_dir: str, dir_fd: int) -> None:
    layout.empty(dir_fd)
    with contextlib.suppress(OSError):  # something that is not ours lies in it
        os.rmdir(run_dir)


def _open_root() -> int:
    return os.open("/", layout.DIRECTORY)


def _prepare(
    first: socket.socket, run_dir: str, dir_fd: int, *, private: bool, labels: dict[str, str]
) -> tuple[Birth, socket.socket]:
    for name in (layout.RANK, layout.WORK):
        os.mkdir(name, 0o700, dir_fd=dir_fd)
    rank_fd = layout.open_directory(layout.RANK, dir_fd=dir_fd)
    for name in (layout.ACK, layout.CONTROL, *(() if private else (layout.TMP,))):
        os.mkdir(name, 0o700, dir_fd=rank_fd)
    # A restored tree finds its log by name, as it had it open, and the same mode: CRIU compares it.
    os.close(os.open(layout.ENGINE_LOG, os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=rank_fd))
    work_fd = layout.open_directory(layout.WORK, dir_fd=dir_fd)
    log = os.open(layout.KEEPER_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600, dir_fd=work_fd)
    os.dup2(log, 2)
    os.close(log)
    link, theirs = wire.pair()
    # Guard and keeper hold it open for writing: when both are gone every caller knows that all is done.
    life, _held_open = os.pipe()
    birth = Birth(
        run_dir=run_dir,
        dir_fd=dir_fd,
        rank_fd=rank_fd,
        work_fd=work_fd,
        root_fd=_open_root(),
        private=private,
        labels=labels,
        listener=_listen(dir_fd),
        first=first,
        link=theirs,
        life_fd=life,
        guard_pid=os.getpid(),
    )
    return birth, link


def _listen(dir_fd: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mask = os.umask(0o177)
    try:
        # sun_path has 108 bytes, a run directory may have a longer name (unix(7)).
        listener.bind(f"/proc/self/fd/{dir_fd}/{layout.KEEPER_SOCKET}")
    finally:
        os.umask(mask)
    listener.listen(keeper.MAX_CONNECTIONS)
    return listener


# The keeper


def _fork(birth: Birth, link: socket.socket) -> int:
    if birth.private:
        try:
            kernel.unshare(kernel.CLONE_NEWPID)
        except PermissionError as error:
            raise _Refused("privilege", f"{error}; {namespaces.NEED}") from None
    else:
        kernel.become_subreaper()
    child = os.fork()
    if child == 0:
        link.close()
        keeper.main(birth)
    for one in (birth.link, birth.listener):
        one.close()
    os.close(birth.life_fd)
    return child


def _await_end(birth: Birth, link: socket.socket, child: int) -> dict[str, Any] | None:
    """Tell the world of the keeper, then wait for its last word; None when it died without one."""

    def on_term(_number: int, _frame: object) -> None:
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, on_term)
    word = _hear(link)
    if word is None or "failed" in word:
        reason = "the keeper died while it started" if word is None else word["failed"]
        refused = word is not None and word["privilege"]
        _answer(
            birth.first, "privilege" if refused else "os", f"{reason}; {namespaces.NEED}" if refused else str(reason)
        )
        return {"final": "stopped"}
    try:
        _introduce(birth, child)
    except OSError as error:
        os.kill(child, signal.SIGKILL)
        _answer(birth.first, *_told(error, birth.run_dir))
        return {"final": "stopped"}
    birth.first.close()
    with contextlib.suppress(OSError):  # when the keeper is dead already, the next line says so
        wire.send(link, {"keeper_pid": child})
    return _hear(link)


def _hear(link: socket.socket) -> dict[str, Any] | None:
    try:
        received = wire.receive(link)
    except (OSError, wire.WireError):
        return None
    return None if received is None else received[0]


def _introduce(birth: Birth, child: int) -> None:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
        boot_id = stream.read().strip()
    value = {
        "format": layout.FORMAT,
        "name": os.path.basename(birth.run_dir),
        "guard": {"pid": os.getpid(), "start_ticks": start_time(os.getpid())},
        "keeper": {"pid": child, "start_ticks": start_time(child)},
        "boot_id": boot_id,
        "namespace": "private" if birth.private else "host",
        "labels": birth.labels,
        "created_unix_ns": time.time_ns(),
    }
    layout.write_json(birth.dir_fd, layout.KEEPER_FILE, value)


def _conclude(birth: Birth, child: int, final: dict[str, Any] | None) -> None:
    # Of a private keeper this returns when the last process of its namespace is gone (pid_namespaces(7)).
    _, status = os.waitpid(child, 0)
    if not birth.private:
        Tree(private=False).kill()
    if final is not None and final["final"] == "stopped":
        _remove(birth.run_dir, birth.dir_fd)
    elif final is not None:
        aftermath.settle(
            birth.run_dir, birth.dir_fd, birth.root_fd, state="exited", cause=final["cause"], end=final["exit"]
        )
    else:
        cause = _cause(os.waitstatus_to_exitcode(status), birth.work_fd)
        aftermath.settle(birth.run_dir, birth.dir_fd, birth.root_fd, state="killed", cause=cause)
    layout.unlock(birth.dir_fd)
    sys.stderr.flush()


def _cause(end: int, work_fd: int) -> str:
    if end < 0:
        return f"its keeper was killed: {describe(end)}"
    return f"its keeper failed: {layout.tail(layout.KEEPER_LOG, 1, dir_fd=work_fd) or describe(end)}"
