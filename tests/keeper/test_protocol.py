"""Whatever arrives at the socket, the keeper lives."""

import array
import fcntl
import json
import os
import random
import socket
import subprocess
import sys

import pytest

from coldsnap.errors import StepError
from coldsnap.keeper import wire
from coldsnap.keeper.client import Keeper


def dial(run_dir):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(run_dir / "keeper.sock"))
    connection.settimeout(10)
    return connection


def exchange(connection, data, fds=()):
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([data], rights)
    answer, received = wire.receive(connection)
    for fd in received:
        os.close(fd)
    return answer


@pytest.fixture
def keeper(private):
    return private.start()


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"not json", "expected one JSON object"),
        (b"[]", "expected one JSON object, found list"),
        (b"\xff\xfe\xff", "expected one JSON object"),
        (b"[" * 60000, "expected one JSON object"),
        (b"{" + b" " * 65536 + b"}", "65536 bytes"),
        (b"{}", "unknown op None"),
        (b'{"op": 7}', "unknown op 7"),
        (b'{"op": "__init__"}', "unknown op '__init__'"),
        (b'{"op": "perform"}', "unknown op 'perform'"),
        (b'{"op": "status", "extra": 1}', "status takes"),
        (b'{"op": "wait_helper", "pid": 1}', "wait_helper takes"),
        (b'{"op": "wait_helper", "pid": true, "timeout_s": 1}', "pid has the wrong type bool"),
        (b'{"op": "wait_helper", "pid": "1", "timeout_s": 1}', "pid has the wrong type str"),
        (b'{"op": "wait_helper", "pid": 1, "timeout_s": NaN}', "no helper"),
        (b'{"op": "signal", "signal": 99, "whom": "root"}', "signal 99"),
        (b'{"op": "signal", "signal": 9, "whom": "world"}', "'world'"),
        (b'{"op": "signal", "signal": 9, "whom": "root"}', "no running engine"),
        (b'{"op": "memfd_bytes", "memfd_bytes": 5}', "memfd_bytes goes with a descriptor"),
        (b'{"op": "spawn_helper", "argv": [], "env": {}, "name": "x", "fds": []}', "argv and the environment"),
        (b'{"op": "spawn_helper", "argv": [1], "env": {}, "name": "x", "fds": []}', "argv and the environment"),
        (
            b'{"op": "spawn_helper", "argv": ["a\\u0000"], "env": {}, "name": "x", "fds": []}',
            "argv and the environment",
        ),
        (b'{"op": "spawn_helper", "argv": ["a"], "env": {"A=B": ""}, "name": "x", "fds": []}', "names without ="),
        (b'{"op": "spawn_helper", "argv": ["a"], "env": {}, "name": "../x", "fds": []}', "helper's name"),
        (b'{"op": "spawn_helper", "argv": ["a"], "env": {}, "name": "x", "fds": [7]}', "fds lists"),
        (b'{"op": "spawn_helper", "argv": ["a"], "env": {}, "name": "x", "fds": [true]}', "fds lists"),
        (b'{"op": "begin", "operation": "x", "undo": [7]}', "undo entry"),
        (b'{"op": "undo", "entry": {"kind": "kill"}}', "no operation in flight: there is none"),
        (b'{"op": "end"}', "no operation in flight"),
        (b'{"op": "abort"}', "no operation in flight"),
    ],
)
def test_a_wrong_message_is_answered_with_a_sentence(private, keeper, data, sentence):
    with dial(private.run_dir) as connection:
        answer = exchange(connection, data)

        assert not answer["ok"]
        assert sentence in answer["error"]
        assert exchange(connection, b'{"op": "status"}')["ok"], "the same connection goes on"
    assert keeper.status().state == "empty"


def test_descriptors_nobody_asked_for_are_closed(private, keeper):
    reader, writer = os.pipe()
    with dial(private.run_dir) as connection:
        assert exchange(connection, b'{"op": "status"}', [writer] * 5)["ok"]
        assert not exchange(connection, b"nonsense", [writer] * 65)["ok"]
        os.close(writer)
        assert os.read(reader, 1) == b"", "no copy is open anywhere"
    os.close(reader)
    assert keeper.status().state == "empty"


def test_a_message_in_a_descriptor_must_be_a_sealed_memfd(private, keeper):
    body = b'{"op": "status"}'
    request = json.dumps({"memfd_bytes": len(body)}).encode()
    memfd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(memfd, body)
    reader, writer = os.pipe()
    with dial(private.run_dir) as connection:
        assert "must be sealed" in exchange(connection, request, [memfd])["error"]
        assert "not a memfd" in exchange(connection, request, [reader])["error"]
        fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        assert exchange(connection, request, [memfd])["ok"]
        assert "as long as announced" in exchange(connection, b'{"memfd_bytes": 3}', [memfd])["error"]
    for fd in (memfd, reader, writer):
        os.close(fd)
    assert keeper.status().state == "empty"


def test_random_bytes_never_end_a_keeper(private, keeper):
    generator = random.Random(7)
    with dial(private.run_dir) as connection:
        for _ in range(300):
            assert not exchange(connection, generator.randbytes(generator.randint(1, 200)))["ok"]
    assert keeper.status().state == "empty"


def test_a_caller_that_never_reads_is_dropped(private, keeper):
    with dial(private.run_dir) as connection:
        with pytest.raises(OSError):
            for _ in range(100000):
                connection.send(b'{"op": "status"}')
    assert keeper.status().state == "empty"


def test_too_many_callers_are_refused(private, keeper):
    connections = [dial(private.run_dir) for _ in range(70)]

    answers = [c for c in connections[:60] if exchange(c, b'{"op": "status"}')["ok"]]
    refused, _ = wire.receive(connections[-1])

    assert len(answers) == 60
    assert "64 callers already" in refused["error"]
    for connection in connections:
        connection.close()
    assert keeper.status().state == "empty"


def test_another_user_is_refused(private, keeper):
    # The modes alone keep others out; the check behind them is tested with open modes.
    for path in (private.run_dir, private.run_dir / "keeper.sock", *private.base.parents, private.base):
        if path.stat().st_uid == os.geteuid() and path.parent != path:
            path.chmod(path.stat().st_mode | 0o011 if path.is_dir() else 0o666)
    script = (
        "import os, socket, sys\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "c = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        f"c.connect({str(private.run_dir / 'keeper.sock')!r})\n"
        "print(c.recv(65536).decode(), c.recv(1))\n"
    )
    result = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, check=True)

    assert '"kind":"peer"' in result.stdout
    assert "the caller has uid 65534" in result.stdout
    assert result.stdout.endswith("b''\n")
    assert (private.run_dir / "rank").stat().st_mode & 0o777 == 0o700


def test_modes_are_private(private, keeper):
    keeper.spawn_engine(["sleep", "100"], env=private.env, cwd="/")
    found = {
        str(path.relative_to(private.base)): path.lstat().st_mode & 0o777
        for path in [private.run_dir, *private.run_dir.rglob("*")]
    }

    for name, mode in found.items():
        assert mode == (0o700 if (private.base / name).is_dir() else 0o600), name


def test_a_message_over_the_limit_is_refused_before_it_is_sent(private, keeper):
    with pytest.raises(StepError, match="4194304"):
        keeper.spawn_engine(["x" * (5 << 20)], env={}, cwd="/")
    assert keeper.status().state == "empty"


def test_hello_hands_out_the_trees_directories(private, keeper):
    for fd in (keeper.shm_fd, keeper.proc_fd, keeper.root_fd):
        assert os.path.isdir(f"/proc/self/fd/{fd}")
    assert os.listdir(keeper.proc_fd).count("1") == 1
    assert isinstance(keeper, Keeper)
    assert "private" in repr(keeper)
