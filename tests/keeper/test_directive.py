"""The directive and the acknowledgements; asking ranks."""

import json
import os
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldsnap.artifact import canonical, record
from coldsnap.errors import EngineError, FormatError, StepTimeout
from coldsnap.keeper.control import request_control
from coldsnap.keeper.directive import (
    ACCEPTED_ABIS,
    FORMAT,
    IN_PROCESS_DIR,
    PLUGIN_ABI,
    Ack,
    Directive,
    Endpoint,
    Hydration,
    Start,
    WorkerSource,
    new_incarnation,
    read_acks,
    read_directive,
    write_directive,
)

ENDPOINT = Endpoint(host="127.0.0.1", port=8000)
SOURCE = WorkerSource(
    worker="worker-0", directory="/a/weights/worker-0", manifest_sha256=f"sha256:{'0' * 64}", pack="/s/p.pack"
)
HYDRATION = Hydration(
    backend="auto",
    read_mode="direct",
    verify_mode="inline",
    verify="none",
    queue_depth=4,
    chunk_bytes=1 << 26,
    workers=(SOURCE,),
)
START = Start(
    unit="unit-0", phase="pre_exec", load_format="coldsnap", environment={"A": "1"}, transport="transport.json"
)
HEX = "0123456789abcdef"


@given(
    directive=st.builds(
        Directive,
        plugin_abi=st.integers(1, 99),
        incarnation=st.text(HEX, min_size=32, max_size=32),
        operation=st.sampled_from(["launch", "restore"]),
        seed=st.text(HEX, min_size=16, max_size=16),
        provider=st.sampled_from(["image", "native", "recovery", "checkpoint"]),
        endpoint=st.builds(Endpoint, host=st.text(max_size=50), port=st.integers(1, 65535)),
        start=st.sampled_from([None, START, Start(unit="u", phase="imported")]),
        hydration=st.sampled_from([None, HYDRATION]),
        created_unix_ns=st.integers(0, 2**63),
    )
)
def test_a_directive_is_read_as_it_was_written(tmp_path_factory, directive):
    directory = tmp_path_factory.getbasetemp()

    write_directive(directory, directive)

    assert read_directive(directory / "directive.json") == directive


def test_each_directive_is_a_new_incarnation(tmp_path):
    first = Directive.new(operation="launch", endpoint=ENDPOINT)
    second = Directive.new(operation="restore", endpoint=ENDPOINT)

    assert first.incarnation != second.incarnation
    assert first.seed != second.seed
    assert (first.format, first.plugin_abi) == (FORMAT, PLUGIN_ABI)
    assert PLUGIN_ABI in ACCEPTED_ABIS
    assert len(new_incarnation()) == 32
    assert IN_PROCESS_DIR == "/dev/shm/coldsnap/run", "it is in every capture there is"


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"format": 2}, "json.8"),
        ({"format": True}, "json.8"),
        ({"plugin_abi": "1"}, "json.7"),
        ({"plugin_abi": 0}, "json.9"),
        ({"incarnation": "xyz"}, "json.9"),
        ({"seed": "0" * 15}, "json.9"),
        ({"operation": "reboot"}, "json.8"),
        ({"provider": "cloud"}, "json.8"),
        ({"endpoint": {"host": "h"}}, "json.6"),
        ({"endpoint": {"host": "h", "port": 0}}, "json.9"),
        ({"surprise": 1}, "json.5"),
        ({"start": {"unit": "u", "phase": "pre_exec", "command": ["sh"]}}, "json.5"),
        ({"start": {"unit": "u", "phase": "soon"}}, "json.8"),
        ({"start": {"unit": "u", "phase": "pre_exec", "transport": "../elsewhere"}}, "json.8"),
        ({"start": {"unit": "u", "phase": "pre_exec", "environment": {"A": 1}}}, "json.7"),
        ({"hydration": {"workers": []}}, "json.6"),
    ],
)
def test_a_strange_directive_is_refused_with_its_rule(tmp_path, change, rule):
    value = {**record.write(Directive.new(operation="launch", endpoint=ENDPOINT)), **change}
    path = tmp_path / "directive.json"
    path.touch(mode=0o600)
    path.write_bytes(canonical.encode(value))

    with pytest.raises(FormatError) as caught:
        read_directive(path)

    assert caught.value.rule == rule
    assert str(path) in caught.value.path


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"a":1,"a":2}', b" " * 70000])
def test_bytes_that_are_no_directive_are_refused(tmp_path, data):
    path = tmp_path / "directive.json"
    path.touch(mode=0o600)
    path.write_bytes(data)

    with pytest.raises(FormatError):
        read_directive(path)


def test_a_reader_sees_one_directive_or_the_other(tmp_path):
    done = threading.Event()
    write_directive(tmp_path, Directive.new(operation="launch", endpoint=ENDPOINT))

    def write():
        for _ in range(300):
            write_directive(tmp_path, Directive.new(operation="restore", endpoint=ENDPOINT))
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not done.is_set():
        read_directive(tmp_path / "directive.json")
    thread.join()

    assert os.listdir(tmp_path) == ["directive.json"]


def test_acknowledgements_are_read_by_pid(tmp_path):
    (tmp_path / "ack").mkdir()
    fields = {"role": "api", "incarnation": "0" * 32, "plugin_abi": 1, "engine": "test", "versions": {"x": "1"}}
    for pid in (611, 605):
        text = json.dumps({**fields, "pid": pid, "reseeded": ["random"]})
        (tmp_path / "ack" / f"{pid}.json").touch(mode=0o600)
        (tmp_path / "ack" / f"{pid}.json").write_text(text)

    acks = read_acks(tmp_path)

    assert [ack.pid for ack in acks] == [605, 611]
    assert acks[0] == Ack(pid=605, **fields, reseeded=("random",))


def test_an_endpoint_has_a_url():
    assert ENDPOINT.url == "http://127.0.0.1:8000"
    assert Endpoint(host="::1", port=1).url == "http://[::1]:1"


class Rank(threading.Thread):
    """Listens like a rank of an engine, and answers as told."""

    def __init__(self, rank_dir, name, answer):
        super().__init__(daemon=True)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(rank_dir / "control" / f"{name}.sock"))
        self.listener.listen()
        self.answer = answer
        self.requests = []
        self.start()

    def run(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection:
                self.requests.append(json.loads(connection.recv(65536)))
                data = self.answer(self.requests[-1])
                if data is not None:
                    connection.send(data if isinstance(data, bytes) else json.dumps(data).encode())

    def stop(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.join()


@pytest.fixture
def ranks(tmp_path):
    (tmp_path / "control").mkdir()
    made = []

    def add(name, answer):
        made.append(Rank(tmp_path, name, answer))
        return made[-1]

    yield add
    for rank in made:
        rank.stop()


def test_every_rank_is_asked_and_answers(tmp_path, ranks):
    api = ranks("api.601", lambda request: {"ok": True, "op": request["op"]})
    ranks("worker.612", lambda request: {"ok": True, "skipped": True})

    replies = request_control(tmp_path, "quiesce", timeout_s=5, drain=True)

    assert replies == {"api.601": {"ok": True, "op": "quiesce"}, "worker.612": {"ok": True, "skipped": True}}
    assert api.requests == [{"op": "quiesce", "timeout_s": 5, "drain": True}]


def test_only_the_roles_named_are_asked(tmp_path, ranks):
    ranks("api.601", lambda request: {"ok": True})
    worker = ranks("worker.612", lambda request: {"ok": True})

    assert list(request_control(tmp_path, "ping", roles=("api",), timeout_s=5)) == ["api.601"]
    assert worker.requests == []


def test_nobody_there_is_no_error(tmp_path, ranks):
    assert request_control(tmp_path, "ping", timeout_s=5) == {}


def test_a_rank_that_refuses_is_quoted(tmp_path, ranks):
    ranks("api.601", lambda request: {"ok": False, "kind": "state", "error": "three requests still run"})
    ranks("worker.612", lambda request: {"ok": True})
    (tmp_path / "engine.log").write_text("a line\n")

    with pytest.raises(EngineError, match=r"api\.601: three requests still run") as caught:
        request_control(tmp_path, "quiesce", timeout_s=5)

    assert caught.value.log_tail == "a line"


def test_a_rank_that_died_is_named(tmp_path, ranks):
    ranks("api.601", lambda request: {"ok": True})
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    dead.bind(str(tmp_path / "control" / "worker.9.sock"))
    dead.close()

    with pytest.raises(EngineError, match=r"worker\.9: it does not listen: Connection refused"):
        request_control(tmp_path, "ping", timeout_s=5)


@pytest.mark.parametrize("answer", [None, b"nonsense", b"[]"])
def test_a_rank_that_answers_nonsense_is_named(tmp_path, ranks, answer):
    ranks("api.601", lambda request: answer)

    with pytest.raises(EngineError, match=r"api\.601"):
        request_control(tmp_path, "ping", timeout_s=5)


def test_ranks_that_hang_cost_one_deadline_together(tmp_path, ranks):
    release = threading.Event()
    for pid in (601, 602, 603):
        ranks(f"worker.{pid}", lambda request: release.wait(30) and None)
    begun = time.monotonic()

    with pytest.raises(StepTimeout, match=r"worker\.601: no answer in time; worker\.602.*worker\.603"):
        request_control(tmp_path, "ping", timeout_s=0.1)

    release.set()
    assert time.monotonic() - begun < 3 * 2.1, "asked together, not one after the other"


def test_a_worker_is_told_what_a_hydrate_is_told():
    assert HYDRATION.request("worker-0") == {
        "directory": "/a/weights/worker-0",
        "manifest_sha256": f"sha256:{'0' * 64}",
        "pack": "/s/p.pack",
        "backend": "auto",
        "read_mode": "direct",
        "verify_mode": "inline",
        "verify": "none",
        "queue_depth": 4,
        "chunk_bytes": 1 << 26,
    }
    with pytest.raises(KeyError):
        HYDRATION.request("worker-1")
