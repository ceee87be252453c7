"""What the kernel says of sockets over netlink (sock_diag(7)): those that are asked for, not all there are.

The one rule: only look, and only in the caller's own network namespace.

``/proc/net/tcp`` walks the kernel's whole table of connections, whose size goes with the memory of the machine, however
few there are: 5 to 40 ms for each of its two files. Listening sockets have a small table of their own.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

__all__ = ["answers", "listening_ports"]

# linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY = 4, 20
NLM_F_REQUEST_DUMP = 0x1 | 0x300
NLMSG_ERROR, NLMSG_DONE = 2, 3
NETLINK_HEADER = struct.Struct("=IHHII")
INET_REQUEST = struct.Struct("=BBBBI48x")
INET_ANSWER = struct.Struct("=BBBB")
PORT = struct.Struct("!H")
TCP_LISTEN = 10


def answers(request: bytes) -> Iterator[bytes]:
    """Ask for a dump of sockets, and yield the payload of each answer.

    Args:
        request: As the family's header file has it.

    Raises:
        OSError: The kernel does not answer such questions.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as diag:
        size = NETLINK_HEADER.size + len(request)
        diag.send(NETLINK_HEADER.pack(size, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST_DUMP, 1, 0) + request)
        while True:
            data = diag.recv(1 << 18)
            while data:
                length, kind, *_ = NETLINK_HEADER.unpack_from(data)
                if kind == NLMSG_DONE:
                    return
                if kind == NLMSG_ERROR:
                    code = -struct.unpack_from("=i", data, NETLINK_HEADER.size)[0]
                    raise OSError(code, f"socket diagnostics: {os.strerror(code)}")
                yield data[NETLINK_HEADER.size : length]
                data = data[(length + 3) & ~3 :]


def listening_ports() -> tuple[int, ...]:
    """Return the TCP ports with a listener, sorted.

    Raises:
        OSError: The kernel does not tell; ``/proc/net/tcp`` does.
    """
    ports = set[int]()
    for family in (socket.AF_INET, socket.AF_INET6):
        for answer in answers(INET_REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 1 << TCP_LISTEN)):
            ports.update(PORT.unpack_from(answer, INET_ANSWER.size))  # its own port stands first
    return tuple(sorted(ports))
