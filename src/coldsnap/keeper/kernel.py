"""The system calls that Python 3.11 has no function for: namespaces, mounts, prctl, the seccomp filter.

The one rule: each function is one call, and raises OSError with the call's name and what it was about.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000

MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18

_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
KEEPER = "coldsnap-keeper"
_PR_SET_SECCOMP = 22
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _prctl(option: int, argument: int | ctypes.c_void_p, what: str) -> None:
    # prctl(2) takes longs; ctypes would pass an int of 32 bits for a plain number.
    value = argument if isinstance(argument, ctypes.c_void_p) else ctypes.c_ulong(argument)
    zero = ctypes.c_ulong(0)
    _check(_libc.prctl(option, value, zero, zero, zero), what)


def unshare(flags: int) -> None:
    """Move this process (for CLONE_NEWPID: its next child) into new namespaces."""
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def mount(source: str, target: str, filesystem: str | None, flags: int, data: str | None = None) -> None:
    """Mount ``source`` on ``target``."""
    arguments = [None if text is None else os.fsencode(text) for text in (source, target, filesystem)]
    options = None if data is None else os.fsencode(data)
    _check(_libc.mount(*arguments, ctypes.c_ulong(flags), options), f"mount({source} on {target})")


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Give back the space of a part of a file, which then reads as zeros; its size stays."""
    _check(
        _libc.fallocate(
            fd, _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, ctypes.c_int64(offset), ctypes.c_int64(length)
        ),
        f"fallocate(PUNCH_HOLE, {offset}, {length})",
    )


def die_with_parent(signal: int) -> None:
    """Receive ``signal`` when the parent ends, however it ends (PR_SET_PDEATHSIG)."""
    _prctl(_PR_SET_PDEATHSIG, signal, "prctl(PR_SET_PDEATHSIG)")


def become_subreaper() -> None:
    """Become the parent of every orphan below (PR_SET_CHILD_SUBREAPER)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, "prctl(PR_SET_CHILD_SUBREAPER)")


def set_name(name: str) -> None:
    """Set this process's name, at most 15 bytes of it."""
    buffer = ctypes.create_string_buffer(os.fsencode(name))
    _prctl(_PR_SET_NAME, ctypes.cast(buffer, ctypes.c_void_p), "prctl(PR_SET_NAME)")


def _without_io_uring() -> bytes:
    # io_uring_setup, _enter and _register are 425 to 427 on every architecture that engines run on (since 424 they
    # share one table), so the filter looks at the number alone; bit 30 marks the x32 calls of x86_64 and is masked.
    # seccomp(2).
    load, both, not_below, above, answer = 0x20, 0x54, 0x35, 0x25, 0x06
    allow, fail = 0x7FFF0000, 0x00050000 | errno.ENOSYS
    program = [
        (load, 0, 0, 0),
        (both, 0, 0, 0xBFFFFFFF),
        (not_below, 0, 2, 425),
        (above, 1, 0, 427),
        (answer, 0, 0, fail),
        (answer, 0, 0, allow),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def deny_io_uring() -> None:
    """Make io_uring answer ENOSYS to this process and all that it will start.

    CRIU cannot dump a ring, and libuv makes one even when told not to; every user of io_uring has a path for ENOSYS.
    Only without CAP_SYS_ADMIN does the kernel demand no_new_privs for a filter, so it is set only then.
    """
    code = _without_io_uring()
    buffer = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer)))
    for retry in (False, True):
        # PR_SET_SECCOMP takes the mode first; the second argument is struct sock_fprog.
        result = _libc.prctl(
            _PR_SET_SECCOMP,
            ctypes.c_ulong(_SECCOMP_MODE_FILTER),
            ctypes.byref(program),
            ctypes.c_ulong(0),
            ctypes.c_ulong(0),
        )
        if result == 0:
            return
        if retry or ctypes.get_errno() != errno.EACCES:
            _check(result, "prctl(PR_SET_SECCOMP)")
        _prctl(_PR_SET_NO_NEW_PRIVS, 1, "prctl(PR_SET_NO_NEW_PRIVS)")
