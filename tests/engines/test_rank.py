"""The in-rank side: one request for each connection, from its own user, with an answer to everything."""

import ctypes
import json
import os
import random
import socket
import tempfile
import threading

import pytest

from coldsnap.engines.control import Ranks
from coldsnap.engines.freshness import freshen
from coldsnap.engines.rank import MESSAGE_BYTES, Busy, Rank, reseed
from coldsnap.errors import ContractError, EngineError, StepTimeout
from coldsnap.keeper.directive import Directive, Endpoint, read_acks, read_directive, write_directive


@pytest.fixture
def start(rank_dir):
    started = []

    def start(role="api", operations=None):
        rank = Rank(
            role, str(rank_dir / "directive.json"), engine="test", versions={"test": "1"}, operations=operations or {}
        )
        rank.start()
        started.append(rank)
        return rank

    yield start
    for rank in started:
        rank.close()


def talk(rank_dir, data, role="api"):
    """Send bytes, return the reply and what follows it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(5)
        connection.connect(str(rank_dir / "control" / f"{role}.{os.getpid()}.sock"))
        connection.send(data)
        return json.loads(connection.recv(MESSAGE_BYTES)), connection.recv(1)


def restore_directive(rank_dir):
    directive = Directive.new(operation="restore", endpoint=Endpoint(host="127.0.0.1", port=8000))
    write_directive(rank_dir, directive)
    return directive


def test_a_rank_says_who_it_is_and_acknowledges_its_directive(rank_dir, start):
    start()
    reply = Ranks(rank_dir).ping()[f"api.{os.getpid()}"]
    directive = read_directive(rank_dir / "directive.json")
    assert (reply["role"], reply["pid"], reply["engine"]) == ("api", os.getpid(), "test")
    assert reply["incarnation"] == directive.incarnation
    (ack,) = read_acks(rank_dir)
    assert (ack.incarnation, ack.role, ack.versions, ack.reseeded) == (directive.incarnation, "api", {"test": "1"}, ())


def test_a_rank_closes_the_connection_before_its_caller_does(rank_dir, start):
    start()
    reply, end = talk(rank_dir, b'{"op": "ping"}')
    assert reply["ok"] and end == b""


def test_the_control_socket_is_for_its_owner_only(rank_dir, start):
    start()
    assert (rank_dir / "control" / f"api.{os.getpid()}.sock").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("data", [b"", b"nonsense", b"[]", b'{"op": 3}', b'{"op": "fly"}', b"\xff"])
def test_what_is_no_request_is_refused_and_the_rank_serves_on(rank_dir, start, data):
    start()
    if data:
        reply, _ = talk(rank_dir, data)
        assert not reply["ok"] and reply["kind"] == "format" and reply["error"]
    assert Ranks(rank_dir).ping()


def test_a_rank_without_a_front_end_says_that_it_skips(rank_dir, start):
    start("worker")
    for op in ("quiesce", "resume", "reset_prefix_cache", "status"):
        assert talk(rank_dir, json.dumps({"op": op}).encode(), "worker")[0] == {"ok": True, "skipped": True}


def test_adopting_takes_the_new_incarnation_and_reseeds(rank_dir, start):
    rank = start()
    directive = restore_directive(rank_dir)
    assert Ranks(rank_dir).adopt(incarnation=directive.incarnation) == (f"api.{os.getpid()}",)
    assert rank.directive.incarnation == directive.incarnation
    drawn = random.random()
    random.seed(int(directive.seed, 16))
    assert random.random() == drawn
    assert "random" in read_acks(rank_dir)[0].reseeded


def test_adopting_leaves_alone_what_the_user_seeded(rank_dir, start):
    start()
    random.seed(7)
    expected = random.Random(7).random()
    Ranks(rank_dir).adopt(incarnation=restore_directive(rank_dir).incarnation, reseed=False)
    assert random.random() == expected
    # What nobody can have seeded is fresh all the same.
    assert set(read_acks(rank_dir)[0].reseeded) <= {"libc", "openssl", "tempfile"}


def test_a_rank_that_reads_another_directive_fails_the_adoption(rank_dir, start):
    start()
    with pytest.raises(EngineError, match="reads another directive"):
        Ranks(rank_dir).adopt(incarnation="0" * 32)


def test_a_damaged_directive_is_refused_and_the_old_incarnation_stays(rank_dir, start):
    rank = start()
    before = rank.directive
    (rank_dir / "directive.json").write_text("{")
    with pytest.raises(EngineError, match="json.1"):
        Ranks(rank_dir).adopt(incarnation="0" * 32)
    assert rank.directive == before


def test_a_directive_for_another_plugin_is_refused(rank_dir):
    write_directive(rank_dir, Directive.new(operation="launch", endpoint=Endpoint(host="h", port=1), plugin_abi=999))
    with pytest.raises(ContractError, match="plugin ABI 999"):
        Rank("api", str(rank_dir / "directive.json"), engine="test", versions={})


def test_a_path_too_long_for_a_socket_is_refused(rank_dir, tmp_path_factory):
    deep = tmp_path_factory.mktemp("x" * 100) / "control"
    deep.mkdir()
    (deep.parent / "directive.json").touch(mode=0o600)
    (deep.parent / "directive.json").write_bytes((rank_dir / "directive.json").read_bytes())
    with pytest.raises(ContractError, match="107 bytes"):
        Rank("api", str(deep.parent / "directive.json"), engine="test", versions={}).start()


def test_a_resume_gets_through_while_a_quiesce_waits(rank_dir, start):
    entered, opened = threading.Event(), threading.Event()

    def quiesce(_):
        entered.set()
        assert opened.wait(10)
        raise Busy("the engine was resumed while it was being quiesced")

    def resume(_):
        opened.set()
        return {}

    start(operations={"quiesce": quiesce, "resume": resume})
    failures = []

    def caller():
        try:
            Ranks(rank_dir).quiesce(timeout_s=10)
        except EngineError as error:
            failures.append(str(error))

    thread = threading.Thread(target=caller)
    thread.start()
    assert entered.wait(10)
    Ranks(rank_dir).resume()
    thread.join(10)
    assert "resumed while" in failures[0]


def test_a_rank_that_hangs_is_a_timeout(rank_dir, start):
    release = threading.Event()
    start(operations={"status": lambda _: {"late": release.wait(10)}})
    with pytest.raises(StepTimeout, match=f"api.{os.getpid()}"):
        Ranks(rank_dir).status(timeout_s=0.1)
    release.set()


def test_whatever_an_engine_raises_reaches_the_caller_as_a_sentence(rank_dir, start):
    def broken(_):
        raise ZeroDivisionError("division by zero")

    start(operations={"status": broken})
    with pytest.raises(EngineError, match="ZeroDivisionError: division by zero"):
        Ranks(rank_dir).status()


def test_a_reply_too_long_for_one_message_says_so(rank_dir, start):
    start(operations={"status": lambda _: {"text": "x" * MESSAGE_BYTES}})
    with pytest.raises(EngineError, match="at most 65536 fit"):
        Ranks(rank_dir).status()


def test_missing_ranks_are_named_by_role(rank_dir, start):
    start()
    with pytest.raises(EngineError, match="0 worker, expected 2"):
        Ranks(rank_dir).require({"api": 1, "worker": 2})
    assert Ranks(rank_dir).require({"api": 1})[0].pid == os.getpid()


def test_an_engine_without_the_plugin_has_no_ranks(rank_dir):
    with pytest.raises(EngineError, match="plugin was not loaded"):
        Ranks(rank_dir).ping()
    with pytest.raises(EngineError, match="expected one rank with the role api"):
        Ranks(rank_dir).resume()


def test_a_forked_child_does_not_keep_the_socket(rank_dir, start):
    rank = start()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, b"kept" if rank._listener is not None else b"gone")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 10) == b"gone"
    os.close(read)
    os.close(write)
    assert Ranks(rank_dir).ping()


def test_what_nobody_can_have_seeded_is_made_fresh_without_being_told_how():
    libc = ctypes.CDLL(None)
    libc.srandom(1)
    expected = libc.random()
    next(tempfile._get_candidate_names())
    libc.srandom(1)

    assert set(freshen()) >= {"libc", "tempfile"}

    assert libc.random() != expected
    assert tempfile._name_sequence is None


def test_the_same_seed_gives_the_same_draws():
    names = reseed(0x1234_5678_9ABC_DEF0)
    first = random.random()
    assert reseed(0x1234_5678_9ABC_DEF0) == names and random.random() == first
    reseed(0x1234_5678_9ABC_DEF1)
    assert random.random() != first


def test_digests_are_collected_from_every_page_of_every_rank_that_has_a_model(rank_dir, start):
    pages = {0: {"digests": {"a": "0a", "b": "0b"}, "next": 2}, 2: {"digests": {"c": "0c"}, "next": None}}
    start("worker", {"digests": lambda request: pages[request.get("first", 0)]})
    start("engine")

    assert Ranks(rank_dir).digests(timeout_s=5) == {f"worker.{os.getpid()}": {"a": "0a", "b": "0b", "c": "0c"}}


def test_an_engine_is_ready_when_its_front_end_says_so(rank_dir, start):
    answers = [Busy("the engine is still starting"), {"ready": False}, {"ready": True}]

    def status(_):
        answer = answers.pop(0)
        if isinstance(answer, Busy):
            raise answer
        return answer

    later = threading.Timer(0.02, start, args=("api", {"status": status}))  # before it, nobody listens
    later.start()
    assert Ranks(rank_dir).await_ready(timeout_s=20) > 0
    later.join()
    assert answers == []


def test_an_engine_behind_its_closed_door_is_ready_for_whoever_expects_it_closed(rank_dir, start):
    answers = [Busy("the engine is still starting"), {"ready": False, "open": False}]

    def status(_):
        answer = answers.pop(0)
        if isinstance(answer, Busy):
            raise answer
        return answer

    start("api", {"status": status})
    assert Ranks(rank_dir).await_ready(timeout_s=20, closed=True) > 0
    assert answers == []


def test_an_engine_that_is_never_ready_is_an_error_with_its_state_and_its_log(rank_dir, start):
    log = rank_dir / "engine.log"
    log.write_text("ValueError: no such model\n")
    start(operations={"status": lambda _: {"ready": False, "open": False}})
    with pytest.raises(EngineError, match=r"within 0.05 s \(its front end says that it is starting\)") as error:
        Ranks(rank_dir).await_ready(timeout_s=0.05, log=log)
    assert "no such model" in str(error.value)


def test_an_engine_that_ended_is_not_waited_for(rank_dir):
    with pytest.raises(EngineError, match="ended while it was starting: it exited with status 1"):
        Ranks(rank_dir, ended=lambda: "it exited with status 1").await_ready(timeout_s=20)
