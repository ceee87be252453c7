"""Sockets of living processes: TCP from ``/proc/<pid>/net``, peers of Unix sockets from socket diagnostics.

The one rule: only look. Addresses are written as people write them, and an IPv4 address inside an IPv6 one is an IPv4
address, so that both ends of one connection compare equal.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator, Sequence

from attrs import frozen

from coldsnap.host import diagnostics

__all__ = ["TcpSocket", "UnixSocket", "plain", "read_tcp", "read_unix", "to_address", "to_words"]

TCP_ESTABLISHED, TCP_TIME_WAIT, TCP_CLOSE, TCP_LISTEN = 1, 6, 7, 10

# linux/unix_diag.h
UDIAG_SHOW_NAME, UDIAG_SHOW_PEER, UDIAG_SHOW_ICONS = 0x1, 0x4, 0x8
UNIX_DIAG_NAME, UNIX_DIAG_PEER, UNIX_DIAG_ICONS = 0, 2, 3
UNIX_REQUEST = struct.Struct("=BBHIIIII")
UNIX_ANSWER = struct.Struct("=BBBBIII")
ATTRIBUTE = struct.Struct("=HH")


@frozen(kw_only=True)
class TcpSocket:
    """A TCP socket, of an image or of a living process.

    Attributes:
        inode: Names it: CRIU's ``ino``, the kernel's inode; 0 when no process holds it.
        state: The kernel's number: 1 established, 6 waiting, 7 closed, 10 listening.
        address: Local address.
        port: Local port; 0 when not bound.
        peer_address: Remote address.
        peer_port: Remote port; 0 when not connected.
        only_v6: Whether a socket of IPv6 takes no IPv4.
    """

    inode: int
    state: int
    address: str
    port: int
    peer_address: str
    peer_port: int
    only_v6: bool = False

    @property
    def listening(self) -> bool:
        """Whether it accepts connections."""
        return self.state == TCP_LISTEN

    @property
    def connected(self) -> bool:
        """Whether it has a peer, be the connection half closed."""
        return self.state not in {TCP_LISTEN, TCP_CLOSE, TCP_TIME_WAIT} and self.peer_port != 0

    @property
    def ends(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """Local and remote end, comparable across address families."""
        return (plain(self.address), self.port), (plain(self.peer_address), self.peer_port)


def plain(address: str) -> str:
    """Return the IPv4 address inside an IPv6 address, or the address itself."""
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(mapped or parsed)


def to_address(words: Sequence[int]) -> str:
    """Read an address kept as 32-bit words.

    Args:
        words: One or four, as the kernel and CRIU print them: network byte order inside native integers.
    """
    return str(ipaddress.ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words)))


def to_words(address: str) -> list[int]:
    """Write an address as 32-bit words; see :func:`to_address`."""
    packed = ipaddress.ip_address(address).packed
    return [int.from_bytes(packed[i : i + 4], sys.byteorder) for i in range(0, len(packed), 4)]


def _endpoint(text: str) -> tuple[str, int]:
    address, port = text.split(":")
    return to_address([int(address[i : i + 8], 16) for i in range(0, len(address), 8)]), int(port, 16)


def read_tcp(proc_fd: int, pid: int) -> tuple[TcpSocket, ...]:
    """Read every TCP socket of a process's network namespace.

    Args:
        proc_fd: The tree's ``/proc``.
        pid: Any process of the namespace.
    """
    found = []
    for table in ("tcp", "tcp6"):
        try:
            fd = os.open(f"{pid}/net/{table}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc_fd)
        except FileNotFoundError:  # a kernel without IPv6
            continue
        with os.fdopen(fd) as lines:
            next(lines)
            for line in lines:
                _, local, remote, state, *_, inode = line.split()[:10]
                (address, port), (peer_address, peer_port) = _endpoint(local), _endpoint(remote)
                found.append(
                    TcpSocket(
                        inode=int(inode),
                        state=int(state, 16),
                        address=address,
                        port=port,
                        peer_address=peer_address,
                        peer_port=peer_port,
                    )
                )
    return tuple(found)


@frozen(kw_only=True)
class UnixSocket:
    """A Unix socket of the caller's network namespace.

    Attributes:
        peer: Inode of its peer; 0 when that has not been accepted yet, ``None`` when it has none.
        pending: Inodes of the sockets that wait to be accepted by it.
        name: What it is bound to: a path, or an abstract name behind a NUL; empty when it is not bound.
    """

    name: bytes = b""
    peer: int | None = None
    pending: tuple[int, ...] = ()


def read_unix() -> dict[int, UnixSocket]:
    """Return every Unix socket of the caller's network namespace by its inode."""
    found = {}
    show = UDIAG_SHOW_NAME | UDIAG_SHOW_PEER | UDIAG_SHOW_ICONS
    request = UNIX_REQUEST.pack(socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, show, 0xFFFFFFFF, 0xFFFFFFFF)
    for answer in diagnostics.answers(request):
        attributes = dict(_attributes(answer[UNIX_ANSWER.size :]))
        peer, pending = attributes.get(UNIX_DIAG_PEER), attributes.get(UNIX_DIAG_ICONS, b"")
        name = attributes.get(UNIX_DIAG_NAME, b"")
        found[UNIX_ANSWER.unpack_from(answer)[4]] = UnixSocket(
            name=name if name[:1] == b"\0" else name.rstrip(b"\0"),
            peer=None if peer is None else struct.unpack("=I", peer)[0],
            pending=struct.unpack(f"={len(pending) // 4}I", pending),
        )
    return found


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= ATTRIBUTE.size:
        length, kind = ATTRIBUTE.unpack_from(data)
        yield kind, data[ATTRIBUTE.size : length]
        data = data[max((length + 3) & ~3, ATTRIBUTE.size) :]
