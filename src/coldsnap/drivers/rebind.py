"""Other ports (and another address) for a restored tree, chosen by asking the kernel.

The one rule: one mapping for the whole tree. A port moves everywhere or nowhere: every listener on it, and both ends of
every connection inside the tree; a connection whose other end is elsewhere keeps the port of that end.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Self

from attrs import evolve, field, frozen

from coldsnap.drivers.images import FilesImage
from coldsnap.drivers.sockets import TcpSocket
from coldsnap.errors import AdmissionError, DriverError

__all__ = ["PortMap", "Rebind", "Reservation", "choose_ports", "move_ports"]

ATTEMPTS = 64


@frozen(kw_only=True)
class Rebind:
    """Where the API is to listen.

    Attributes:
        port: The captured port.
        to_port: The port wanted; may be the captured one.
        to_address: The address wanted, of the captured address's family; ``None`` keeps it.
    """

    port: int
    to_port: int
    to_address: str | None = None


@frozen(kw_only=True)
class PortMap:
    """What moves.

    Attributes:
        ports: Captured port → port now, the unmoved ones too.
        rebind: What the caller asked for.
    """

    ports: Mapping[int, int]
    rebind: Rebind | None = None

    @property
    def moved(self) -> Mapping[int, int]:
        """Only the ports that change."""
        return {old: new for old, new in self.ports.items() if old != new}


@frozen
class Reservation:
    """Ports held for a restore: bound, not listening, so that nobody is given one in the meantime.

    A socket with SO_REUSEADDR that does not listen does not keep another such socket from binding (socket(7)); CRIU
    sets the option while it restores. A name says of each port that it is held: an abstract Unix socket, which belongs
    to the network namespace as the port does, and goes with the process.
    """

    _sockets: list[socket.socket] = field(factory=list)
    _named: set[int] = field(factory=set)

    def try_bind(self, address: str, port: int, *, only_v6: bool) -> int | None:
        """Reserve one port.

        Args:
            address: Local address.
            port: The port; 0 for any.
            only_v6: Whether an IPv6 socket leaves IPv4 alone.

        Returns:
            The port, or ``None`` when it is taken or the address is not of this host.
        """
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        probe = socket.socket(family, socket.SOCK_STREAM)
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(only_v6))
            probe.bind((address, port))
            port = int(probe.getsockname()[1])
            self._name(port)
        except OSError:
            probe.close()
            return None
        self._sockets.append(probe)
        return port

    def _name(self, port: int) -> None:
        """Say that a port is held; another restore that holds it makes this fail with EADDRINUSE."""
        if port in self._named:
            return
        name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            name.bind(f"\0coldsnap-port-{port}")
        except OSError:
            name.close()
            raise
        self._sockets.append(name)
        self._named.add(port)

    def close(self) -> None:
        """Let go of the ports."""
        self._named.clear()
        while self._sockets:
            self._sockets.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _binds(sockets: Iterable[TcpSocket], rebind: Rebind | None) -> dict[int, dict[str, bool]]:
    """Return, for each local port, the addresses it must be free on."""
    found: dict[int, dict[str, bool]] = {}
    for each in sockets:
        moved = rebind is not None and each.listening and each.port == rebind.port
        address = (rebind.to_address if moved and rebind is not None else None) or each.address
        found.setdefault(each.port, {})[address] = each.only_v6
    return found


def _reserve(held: Reservation, port: int, addresses: Mapping[str, bool]) -> int | None:
    """Reserve one port on several addresses; 0 lets the kernel choose."""
    for address, only_v6 in addresses.items():
        found = held.try_bind(address, port, only_v6=only_v6)
        if found is None:
            return None
        port = found
    return port


def choose_ports(
    sockets: Iterable[TcpSocket], living: Callable[[], Iterable[TcpSocket]], rebind: Rebind | None, held: Reservation
) -> PortMap:
    """Decide on a port for each captured one, and hold it.

    Args:
        sockets: Of the image.
        living: Looks at those of the host: a connection cannot be restored while another with the same ends exists.
            Called when the captured ports are held, so that no other restore can make one of them any more, and only
            if the image has a connection.
        rebind: Where the API is to listen; without it, where it listened.
        held: Takes the reservations.

    Returns:
        The mapping. Ports other than the API's move only when they are taken.

    Raises:
        AdmissionError: The API's port is taken, or was not captured.
        DriverError: No free port was found.
    """
    sockets = list(sockets)
    wanted = _binds(sockets, rebind)
    ports: dict[int, int] = {}
    if rebind is not None:
        if not any(each.listening and each.port == rebind.port for each in sockets):
            listening = sorted({each.port for each in sockets if each.listening})
            raise AdmissionError(f"the image has no listener on port {rebind.port}: it listens on {listening}")
        _require_family(sockets, rebind)
        ports[rebind.port] = _api_port(held, rebind, wanted.pop(rebind.port))
    for old, addresses in wanted.items():
        found = _reserve(held, old, addresses) if old not in ports.values() else None
        ports[old] = found or _other_port(held, old, addresses, {*ports.values(), *wanted})
    # Only a captured connection can meet a living one; without any, the host's table need not be read.
    for old in _tied(sockets, living()) if any(each.connected for each in sockets) else ():
        if ports[old] == old and old in wanted:
            ports[old] = _other_port(held, old, wanted[old], {*ports.values(), *wanted})
    return PortMap(ports=ports, rebind=rebind)


def _tied(sockets: Iterable[TcpSocket], living: Iterable[TcpSocket]) -> set[int]:
    """Return the ports of captured connections whose two ends are those of a living one."""
    # TIME_WAIT counts: the kernel lets a connection take the place of one that waits only after a second, and a restore
    # may follow sooner upon the end of the same tree (tcp_twsk_unique in net/ipv4/tcp_ipv4.c).
    connected = {each.ends for each in living if each.peer_port}
    return {each.port for each in sockets if each.connected and connected & {each.ends, each.ends[::-1]}}


def _require_family(sockets: Iterable[TcpSocket], rebind: Rebind) -> None:
    for each in sockets:
        captured, wanted = ipaddress.ip_address(each.address), ipaddress.ip_address(rebind.to_address or each.address)
        if each.listening and each.port == rebind.port and captured.version != wanted.version:
            raise AdmissionError(
                f"the captured engine listens on {captured}, an IPv{captured.version} address, and cannot be moved to "
                f"{wanted}; choose an address of the same family"
            )


def _api_port(held: Reservation, rebind: Rebind, addresses: Mapping[str, bool]) -> int:
    if _reserve(held, rebind.to_port, addresses) is None:
        where = ", ".join(sorted(addresses))
        raise AdmissionError(
            f"port {rebind.to_port} on {where} cannot be used: it is taken, another restore is taking it, or the "
            "address is not of this host; choose another port or stop what listens there"
        )
    return rebind.to_port


def _other_port(held: Reservation, old: int, addresses: Mapping[str, bool], taken: set[int]) -> int:
    for _ in range(ATTEMPTS):
        found = _reserve(held, 0, addresses)
        if found is not None and found not in taken:
            return found
    raise DriverError(
        f"no free port was found in place of {old} on {', '.join(sorted(addresses))}: is each an address of this host?",
        command="rebind",
    )


def move_ports(image: FilesImage, mapping: PortMap) -> None:
    """Write a mapping into the image of open files.

    Args:
        image: Edited in place.
        mapping: What moves.
    """
    sockets = image.tcp_sockets()
    ends = {each.ends for each in sockets if each.connected}
    for each in sockets:
        inside = each.connected and each.ends[::-1] in ends
        peer_port = mapping.ports.get(each.peer_port, each.peer_port) if inside else each.peer_port
        moved = evolve(each, port=mapping.ports.get(each.port, each.port), peer_port=peer_port)
        rebind = mapping.rebind
        if rebind is not None and each.listening and each.port == rebind.port and rebind.to_address is not None:
            moved = evolve(moved, address=rebind.to_address)
        if moved != each:
            image.move_socket(moved)
