"""One mapping for the whole tree, over any sockets; and real ports of this machine."""

import ipaddress
import os
import socket
from contextlib import closing

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from coldsnap.drivers.images import FilesImage
from coldsnap.drivers.messages import enum_value, message
from coldsnap.drivers.rebind import PortMap, Rebind, Reservation, choose_ports, move_ports
from coldsnap.drivers.sockets import TcpSocket, plain, read_tcp, to_address, to_words
from coldsnap.errors import AdmissionError

ESTABLISHED, LISTEN = 1, 10
ports = st.integers(min_value=1, max_value=65535)
MAPPED = str(ipaddress.ip_address("::ffff:127.0.0.1"))  # its text differs between versions of Python
loopback = st.sampled_from(["127.0.0.1", "127.0.0.2", "::1", MAPPED])


def listener(inode, port, address="127.0.0.1"):
    nowhere = "::" if ":" in address else "0.0.0.0"
    return TcpSocket(inode=inode, state=LISTEN, address=address, port=port, peer_address=nowhere, peer_port=0)


def connection(inode, here, there):
    return TcpSocket(
        inode=inode, state=ESTABLISHED, address=here[0], port=here[1], peer_address=there[0], peer_port=there[1]
    )


def image_of(*sockets):
    entries = []
    for each in sockets:
        entry = message("file_entry")(type=enum_value("fd_types", "INETSK"), id=each.inode)
        isk = entry.isk
        isk.ino, isk.proto, isk.state = each.inode, 6, each.state
        isk.src_port, isk.dst_port = each.port, each.peer_port
        isk.src_addr.extend(to_words(each.address))
        isk.dst_addr.extend(to_words(each.peer_address))
        entries.append(entry)
    return FilesImage(entries, frozenset())


def nobody():
    return ()


def taken_port():
    held = socket.create_server(("127.0.0.1", 0))
    return held, held.getsockname()[1]


@given(st.data())
def test_both_ends_of_a_connection_move_alike_and_an_outside_end_stays(data):
    used = data.draw(st.lists(ports, min_size=3, max_size=9, unique=True))
    mapping = dict(zip(used, data.draw(st.permutations(used)), strict=True))
    server, client, elsewhere = used[:3]
    address = data.draw(loopback)
    sockets = [
        listener(1, server, address),
        connection(2, (address, server), (address, client)),
        connection(3, (address, client), (address, server)),
        connection(4, (address, client), ("10.9.8.7" if "." in plain(address) else "fd00::7", elsewhere)),
    ]
    image = image_of(*sockets)
    move_ports(image, PortMap(ports=mapping))
    moved = {each.inode: each for each in image.tcp_sockets()}
    assert moved[1].port == moved[2].port == mapping[server]
    assert moved[2].ends == moved[3].ends[::-1]
    assert moved[4].port == mapping[client]
    assert moved[4].peer_port == elsewhere
    assert {each.address for each in moved.values()} == {address}
    back = {new: old for old, new in mapping.items()}
    move_ports(image, PortMap(ports=back))
    assert image.tcp_sockets() == tuple(sockets)


def test_only_the_listener_of_the_api_gets_another_address():
    image = image_of(
        listener(1, 8000, "0.0.0.0"), listener(2, 9000, "0.0.0.0"), connection(3, ("127.0.0.1", 8000), ("127.0.0.1", 1))
    )
    move_ports(image, PortMap(ports={8000: 8001}, rebind=Rebind(port=8000, to_port=8001, to_address="127.0.0.1")))
    assert [(each.address, each.port) for each in image.tcp_sockets()] == [
        ("127.0.0.1", 8001), ("0.0.0.0", 9000), ("127.0.0.1", 8001),
    ]  # fmt: skip


def test_an_image_that_need_not_move_is_not_edited():
    image = image_of(listener(1, 8000))
    move_ports(image, PortMap(ports={8000: 8000}, rebind=Rebind(port=8000, to_port=8000, to_address="127.0.0.1")))
    assert not image.edited


def test_free_ports_stay_and_taken_ones_move_to_free_ones():
    holder, taken = taken_port()
    spare, free = taken_port()
    spare.close()
    with closing(holder), Reservation() as held:
        chosen = choose_ports([listener(1, taken), listener(2, free)], nobody, None, held)
        assert chosen.ports[free] == free
        assert chosen.ports[taken] not in {taken, free}
        assert chosen.moved == {taken: chosen.ports[taken]}
        with pytest.raises(OSError), closing(socket.socket()) as other:
            other.bind(("127.0.0.1", chosen.ports[taken]))  # held until the restore is over
    with closing(socket.create_server(("127.0.0.1", chosen.ports[taken]))):
        pass


def test_a_reserved_port_can_be_bound_and_listened_on_by_one_who_reuses_addresses():
    with Reservation() as held:
        port = held.try_bind("127.0.0.1", 0, only_v6=False)
        with closing(socket.socket()) as like_criu:
            like_criu.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            like_criu.bind(("127.0.0.1", port))
            like_criu.listen()


def test_ports_of_a_connection_that_lives_on_move_on_both_ends():
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        with closing(socket.create_connection(server.getsockname())) as client, closing(server.accept()[0]):
            here, there = client.getsockname(), client.getpeername()
            captured = [
                listener(1, there[1]),
                connection(2, here, there),
                connection(3, there, here),
            ]
            fd = os.open("/proc", os.O_DIRECTORY)
            living = read_tcp(fd, os.getpid())
            os.close(fd)
            with Reservation() as held:
                chosen = choose_ports(captured, lambda: living, None, held)
            assert set(chosen.moved) == {here[1], there[1]}
            assert len(set(chosen.ports.values())) == 2


def test_the_living_are_looked_at_when_the_captured_ports_are_held_already():
    here, there = ("127.0.0.1", taken_and_left()), ("127.0.0.1", taken_and_left())
    pair = [connection(1, here, there), connection(2, there, here)]

    def another_restore_was_faster():
        with Reservation() as late:
            assert late.try_bind(*here, only_v6=False) is None, "nobody else can hold the port by now"
        return pair

    with Reservation() as held:
        chosen = choose_ports(pair, another_restore_was_faster, None, held)

    assert set(chosen.moved) == {here[1], there[1]}


def taken_and_left():
    spare, port = taken_port()
    spare.close()
    return port


def test_ports_of_a_connection_that_has_just_ended_move_on_both_ends():
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()
    here, there = client.getsockname(), client.getpeername()
    with Reservation() as held:
        for each in (client, accepted, server):
            each.close()
        pair = [connection(1, here, there), connection(2, there, here)]
        fd = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        living = read_tcp(fd, os.getpid())
        os.close(fd)
        assert any(each.ends in {(here, there), (there, here)} for each in living)  # in TIME_WAIT

        mapping = choose_ports(pair, lambda: living, None, held)

    assert set(mapping.moved) == {here[1], there[1]}


def test_the_port_of_the_api_is_given_or_refused_but_never_replaced():
    holder, taken = taken_port()
    with closing(holder), Reservation() as held:
        with pytest.raises(AdmissionError, match=f"port {taken} .* is taken"):
            choose_ports([listener(1, 8000)], nobody, Rebind(port=8000, to_port=taken), held)
        with pytest.raises(AdmissionError, match=r"no listener on port 7000: it listens on \[8000\]"):
            choose_ports([listener(1, 8000)], nobody, Rebind(port=7000, to_port=7001), held)
        with pytest.raises(AdmissionError, match="same family"):
            choose_ports([listener(1, 8000)], nobody, Rebind(port=8000, to_port=0, to_address="::1"), held)


def test_the_port_of_the_api_may_be_one_that_another_listener_had():
    spare, free = taken_port()
    spare.close()
    with Reservation() as held:
        chosen = choose_ports([listener(1, 8000), listener(2, free)], nobody, Rebind(port=8000, to_port=free), held)
    assert chosen.ports[8000] == free
    assert chosen.ports[free] != free


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=1)
    | st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4)
)
def test_addresses_as_words_and_as_text_are_the_same(words):
    assert to_words(to_address(words)) == words


def test_a_socket_compares_equal_whether_its_address_is_mapped_into_ipv6_or_not():
    ours = connection(1, ("127.0.0.1", 5), ("127.0.0.1", 6))
    mapped = evolve(ours, address="::ffff:127.0.0.1", peer_address="::ffff:127.0.0.1")
    assert ours.ends == mapped.ends
