"""Messages between a caller, the keeper and the guard: one JSON object each, with file descriptors.

The one rule: a message is whole or refused. SEQPACKET keeps its bounds; one that is larger than a packet travels in a
sealed memfd, so that nobody can change it while it is read.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

PACKET_BYTES = 64 << 10
BODY_BYTES = 4 << 20  # argv and the environment together are at most 2 MiB on Linux (execve(2))
MAX_FDS = 64

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class WireError(Exception):
    """A message broke the protocol; ``str`` is the sentence for its sender."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(connection: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = (), *, flags: int = 0) -> None:
    """Send one message.

    Args:
        connection: A SEQPACKET socket.
        message: What to say.
        fds: Descriptors that go with it.
        flags: Of sendmsg(2).

    Raises:
        WireError: The message is larger than 4 MiB, or has too many descriptors.
        OSError: The peer is gone.
    """
    data = json.dumps(message, separators=(",", ":")).encode("ascii")
    if len(data) > BODY_BYTES or len(fds) > MAX_FDS:
        raise WireError(
            f"a message has {len(data)} bytes and {len(fds)} descriptors; at most {BODY_BYTES} and {MAX_FDS} go"
        )
    if len(data) <= PACKET_BYTES:
        _send(connection, data, fds, flags)
        return
    body = os.memfd_create("coldsnap-message", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(body, data)
        fcntl.fcntl(body, fcntl.F_ADD_SEALS, _SEALS)
        _send(connection, json.dumps({"memfd_bytes": len(data)}).encode("ascii"), (body, *fds), flags)
    finally:
        os.close(body)


def _send(connection: socket.socket, data: bytes, fds: Sequence[int], flags: int) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([data], rights, flags | socket.MSG_NOSIGNAL)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive one message.

    Returns:
        The message and its descriptors (close-on-exec, the receiver's to close); None at the end of the connection.

    Raises:
        WireError: It is too long, not a JSON object, or its memfd is not sealed. No descriptor stays open.
        OSError: The connection failed, or its timeout passed.
    """
    # One byte more than a packet may have, and room for one descriptor more: what fills it was too long.
    space = socket.CMSG_SPACE((MAX_FDS + 1) * array.array("i").itemsize)
    data, ancillary, flags, _ = connection.recvmsg(PACKET_BYTES + 1, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if not data and not fds:
        return None
    try:
        if len(data) > PACKET_BYTES or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise WireError(  # noqa: TRY301 - one place closes the descriptors
                f"a message may have {PACKET_BYTES} bytes and {MAX_FDS} descriptors, this one has more"
            )
        message = _decode(data)
        if "memfd_bytes" in message:
            message = _decode(_sealed(fds, message["memfd_bytes"]))
            os.close(fds.pop(0))
    except WireError:
        for fd in fds:
            os.close(fd)
        raise
    return message, list(fds)


def _decode(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WireError(f"expected one JSON object: {error}") from None
    if not isinstance(value, dict):
        raise WireError(f"expected one JSON object, found {type(value).__name__}")
    return value


def _sealed(fds: Sequence[int], size: object) -> bytes:
    if not fds or type(size) is not int or not 0 < size <= BODY_BYTES:
        raise WireError(f"memfd_bytes goes with a descriptor and is at most {BODY_BYTES}")
    try:
        # Only a memfd (or a file of tmpfs) has seals; reading anything else could block for ever.
        seals = fcntl.fcntl(fds[0], fcntl.F_GET_SEALS)
    except OSError as error:
        raise WireError(f"the message's descriptor is not a memfd: {error.strerror}") from None
    if seals & _SEALS != _SEALS or os.fstat(fds[0]).st_size != size:
        raise WireError("the message's memfd must be sealed and as long as announced")
    return os.pread(fds[0], size, 0)
