"""File handles: whether a file that is known by its handle can be opened again.

The one rule: it opens with O_PATH, which neither reads nor wakes anything. Python's ``os`` has no such call.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

__all__ = ["can_be_found"]

_libc = ctypes.CDLL(None, use_errno=True)


def can_be_found(mount: str, kind: int, handle: bytes) -> bool:
    """Open a file by its handle (open_by_handle_at(2)).

    Args:
        mount: A directory of its filesystem.
        kind: The handle's type.
        handle: The handle.

    Returns:
        Whether it could be opened; also true when this process may not try.
    """
    try:
        directory = os.open(mount, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return True  # nothing is known: a mount on a file, or one we may not enter
    try:
        whole = struct.pack("=Ii", len(handle), kind) + handle
        fd = _libc.open_by_handle_at(directory, ctypes.create_string_buffer(whole), os.O_PATH | os.O_CLOEXEC)
        if fd >= 0:
            os.close(fd)
        return fd >= 0 or ctypes.get_errno() == errno.EPERM
    finally:
        os.close(directory)
