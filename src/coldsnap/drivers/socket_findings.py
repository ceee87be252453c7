"""What is wrong with sockets: kinds that CRIU does not know, and connections that leave the tree.

The one rule: a connection is inside when both its ends are descriptors of the tree; addresses prove nothing.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from coldsnap.drivers.findings import Finding
from coldsnap.drivers.sockets import TcpSocket, read_unix
from coldsnap.drivers.subject import Subject

__all__ = ["Held", "held_sockets", "kind_findings", "tcp_findings", "unix_findings"]

Held = Mapping[int, tuple[Subject, int]]
"""Inode of a socket → who holds it, and as which descriptor."""

_SOCKET = re.compile(r"socket:\[(\d+)\]")
_KNOWN = frozenset(
    {
        "TCP",
        "TCPv6",
        "UDP",
        "UDPv6",
        "UDP-Lite",
        "UDPLITEv6",
        "RAW",
        "RAWv6",
        "UNIX",
        "UNIX-STREAM",
        "NETLINK",
        "PACKET",
    }
)


def held_sockets(subjects: Iterable[Subject]) -> Held:
    """Return the sockets of a tree."""
    found: dict[int, tuple[Subject, int]] = {}
    for subject in subjects:
        for fd, link in subject.links.items():
            if (match := _SOCKET.fullmatch(link)) is not None:
                found.setdefault(int(match[1]), (subject, fd))
    return found


def kind_findings(ours: Held) -> Iterator[Finding]:
    """Yield the sockets of kinds that CRIU does not dump."""
    for subject, fd in ours.values():
        try:
            name = os.getxattr(subject.path(f"fd/{fd}"), "system.sockprotoname").rstrip(b"\0").decode()
        except FileNotFoundError:
            continue  # closed in the meantime
        except OSError as error:
            if error.errno in (errno.ENODATA, errno.EOPNOTSUPP):
                continue
            raise
        if name not in _KNOWN:
            yield subject.finding("socket-kind", f"a socket of the kind {name}", fd=fd)


def tcp_findings(ours: Held, sockets: Sequence[TcpSocket]) -> Iterator[Finding]:
    """Yield the TCP connections whose other end is not in the tree, with who holds it when that can be seen."""
    connections = [found for found in sockets if found.connected and found.inode in ours]
    ends = {found.ends for found in connections}
    outside = [found for found in connections if found.ends[::-1] not in ends]
    peers = {found.ends: found.inode for found in sockets if found.inode}
    owners = _owners({peers.get(found.ends[::-1], 0) for found in outside} - {0}) if outside else {}
    for found in outside:
        (address, port), (peer, peer_port) = found.ends
        subject, fd = ours[found.inode]
        owner = owners.get(peers.get(found.ends[::-1], 0), "held by nobody seen here")
        what = f"a TCP connection of {address}:{port} with {peer}:{peer_port}, outside the tree ({owner})"
        yield subject.finding("tcp-peer", what, fd=fd, passing=True)


def unix_findings(ours: Held) -> Iterator[Finding]:
    """Yield the Unix sockets with a peer, or with somebody waiting, outside the tree."""
    sockets = {inode: found for inode, found in read_unix().items() if inode in ours}
    waiting = {inode for found in sockets.values() for inode in found.pending}
    # A peer of 0 waits to be accepted: by a listener of the tree, which knows it, or by one outside.
    outside = {
        inode: found.peer
        for inode, found in sockets.items()
        if found.peer is not None and found.peer not in ours and not (found.peer == 0 and inode in waiting)
    }
    owners = _owners(set(outside.values()) - {0}) if outside else {}
    for inode, peer in outside.items():
        subject, fd = ours[inode]
        owner = owners.get(peer, "held by nobody seen here")
        what = f"a Unix socket connected to one outside the tree ({owner})"
        yield subject.finding("unix-peer", what, fd=fd, passing=True)
    for inode, found in sockets.items():
        if set(found.pending) - ours.keys():
            subject, fd = ours[inode]
            yield subject.finding("unix-waiting", fd=fd, passing=True)


def _owners(inodes: set[int]) -> Mapping[int, str]:
    """Find who on this machine holds sockets; looks through every process, so it is asked for strangers only."""
    found: dict[int, str] = {}
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    for pid in filter(str.isdigit, os.listdir("/proc") if wanted else ()):
        for link in _links(pid):
            if (inode := wanted.get(link)) is not None:
                found.setdefault(inode, f"held by process {pid}, {_name(pid)}")
    return found


def _links(pid: str) -> Iterator[str]:
    """Yield what the descriptors of a process are; a descriptor that was closed meanwhile hides no other."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return  # gone, or another user's
    for name in names:
        with suppress(OSError):
            yield os.readlink(f"/proc/{pid}/fd/{name}")


def _name(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as comm:
            return comm.read().strip()
    except OSError:
        return "which has just ended"
