"""Readiness and streams against real sockets: nothing hangs, nothing stays connected."""

import http.server
import itertools
import json
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from coldsnap.engines.acceptance import Answer, Question, ask, compare
from coldsnap.engines.endpoint import Watch, await_ready, log_tail, reached_by
from coldsnap.errors import AcceptanceError, EngineError
from coldsnap.keeper.directive import Endpoint

QUESTION = Question(prompt="hello", max_tokens=3)


class Engine(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.probes += 1
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self):
        self.server.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(self.server.answer_status)
        self.send_header("Connection", "close")
        self.end_headers()
        for event in self.server.events:
            self.wfile.write(event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.flush()
        self.server.hold.wait(10)
        self.close_connection = True

    def log_message(self, *_):
        pass


@contextmanager
def serving(*, statuses=(), events=(), answer_status=200, hold=False, port=0):
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Engine) as server:
        server.statuses, server.events, server.answer_status, server.probes = list(statuses), events, answer_status, 0
        server.hold = threading.Event()
        if not hold:
            server.hold.set()
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server, Endpoint(host="127.0.0.1", port=server.server_address[1])
        finally:
            server.hold.set()
            server.shutdown()
            thread.join()


def events(*token_ids, text="x"):
    return [{"choices": [{"text": text, "token_ids": [token]}]} for token in token_ids]


def test_an_engine_is_ready_when_its_health_is_good():
    with serving(statuses=[503, 503]) as (server, endpoint):
        await_ready(endpoint, timeout_s=10)
        assert server.probes == 3


def test_an_engine_that_listens_late_is_waited_for(free_port):
    started = threading.Event()

    def later():
        time.sleep(0.1)
        with serving(port=free_port):
            started.wait(10)

    thread = threading.Thread(target=later)
    thread.start()
    try:
        assert await_ready(Endpoint(host="127.0.0.1", port=free_port), timeout_s=10) > 0
    finally:
        started.set()
        thread.join()


def test_a_dead_engine_ends_the_wait_at_once_with_the_end_of_its_log(tmp_path, free_port):
    log = tmp_path / "engine.log"
    log.write_text("\n".join(f"line {number}" for number in range(100)) + "\nout of memory\n")
    with pytest.raises(EngineError, match="exit status 3") as caught:
        await_ready(Endpoint(host="127.0.0.1", port=free_port), timeout_s=3600, ended=lambda: "exit status 3", log=log)
    assert caught.value.log_tail.endswith("out of memory") and "line 80" not in caught.value.log_tail


def test_an_engine_that_accepts_and_hangs_is_given_up_in_time():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = Endpoint(host="127.0.0.1", port=listener.getsockname()[1])
        with pytest.raises(EngineError, match="accepts connections, but /health gives TimeoutError"):
            await_ready(endpoint, timeout_s=0.2)


def test_an_engine_that_never_listens_is_an_error_that_says_so(free_port):
    with pytest.raises(EngineError, match="nothing listens"):
        await_ready(Endpoint(host="127.0.0.1", port=free_port), timeout_s=0.05)


def test_an_answer_has_every_token_and_the_whole_text():
    with serving(events=[*events(5, 6), {"choices": [{"text": "y", "token_ids": [7]}]}, b"data: [DONE]\n\n"]) as (
        server,
        endpoint,
    ):
        answer = ask(endpoint, QUESTION, model="tiny", timeout_s=10)
    assert answer == Answer(token_ids=(5, 6, 7), text="xxy")
    assert 0 < answer.first_token_s <= answer.seconds
    wanted = {"model": "tiny", "prompt": "hello", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    assert wanted.items() <= server.body.items() and server.body["return_token_ids"]


def test_a_refusal_of_the_engine_is_told_in_its_own_words():
    with serving(events=[b'{"error": "no such model"}'], answer_status=404) as (_, endpoint):
        with pytest.raises(EngineError, match="404.*no such model"):
            ask(endpoint, QUESTION, model="tiny", timeout_s=10)


def test_an_answer_that_breaks_off_is_an_error():
    with serving(events=[*events(5), {"error": {"message": "engine core is dead"}}]) as (_, endpoint):
        with pytest.raises(EngineError, match="engine core is dead"):
            ask(endpoint, QUESTION, model="tiny", timeout_s=10)


def test_an_answer_with_too_few_tokens_is_an_error():
    with serving(events=events(5)) as (_, endpoint), pytest.raises(EngineError, match="expected 3 token ids"):
        ask(endpoint, QUESTION, model="tiny", timeout_s=10)


def test_an_answer_that_stops_coming_is_given_up_in_time():
    with serving(events=events(5), hold=True) as (_, endpoint), pytest.raises(EngineError, match="timed out|in time"):
        ask(endpoint, QUESTION, model="tiny", timeout_s=0.2)


def test_a_dead_engine_ends_the_wait_for_an_answer_with_its_log(tmp_path):
    log = tmp_path / "engine.log"
    log.write_text("Killed\n")
    watch = Watch(ended=lambda: "its worker (pid 613) has died", log=log)
    with serving(events=events(5), hold=True) as (_, endpoint):
        with pytest.raises(
            EngineError, match=r"the engine ended: its worker \(pid 613\) has died\n.*\nKilled"
        ) as caught:
            ask(endpoint, QUESTION, model="tiny", timeout_s=3600, watch=watch)
    assert caught.value.log_tail == "Killed"


def test_a_keeper_that_is_gone_ends_the_wait_too():
    def ended():
        raise EngineError("the engine is no more: its keeper was killed")

    with serving(events=events(5), hold=True) as (_, endpoint):
        with pytest.raises(EngineError, match="its keeper was killed"):
            ask(endpoint, QUESTION, model="tiny", timeout_s=3600, watch=Watch(ended=ended))


class Dripping:
    """A server that sends a byte of its answer now and then, and never all of it."""

    def __init__(self, answer):
        self.answer, self.stop = answer, threading.Event()

    def __enter__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()
        return Endpoint(host="127.0.0.1", port=self.listener.getsockname()[1])

    def serve(self):
        while not self.stop.is_set():
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection:
                for byte in itertools.cycle(self.answer):
                    try:
                        connection.send(bytes([byte]))
                    except OSError:
                        break
                    if self.stop.wait(0.02):
                        break

    def __exit__(self, *_):
        self.stop.set()
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join()


def test_an_engine_that_drips_its_health_is_given_up_in_time():
    with Dripping(b"HTTP/1.1 200 OK\r\nX-Drip: ") as endpoint:
        with pytest.raises(EngineError, match="accepts connections, but /health gives TimeoutError"):
            await_ready(endpoint, timeout_s=0.3)


def test_an_engine_that_drips_the_head_of_its_answer_is_given_up_in_time():
    with Dripping(b"HTTP/1.1 200 OK\r\nX-Drip: ") as endpoint:
        with pytest.raises(EngineError, match=r"failed after 0\.\d s"):
            ask(endpoint, QUESTION, model="tiny", timeout_s=0.3)


def test_no_connection_outlives_its_request():
    with serving(events=events(5, 6, 7)) as (server, endpoint):
        await_ready(endpoint, timeout_s=10)
        ask(endpoint, QUESTION, model="tiny", timeout_s=10)
        port = f"{server.server_address[1]:04X}"
        with open("/proc/net/tcp") as table:
            established = [line for line in table if f":{port} " in line and line.split()[3] == "01"]
        assert established == []


def test_equal_answers_are_accepted_whatever_they_took():
    compare(Answer(token_ids=(1, 2), text="ab", seconds=1.0), Answer(token_ids=(1, 2), text="ab", first_token_s=0.5))


@pytest.mark.parametrize(
    ("actual", "where"),
    [
        (Answer(token_ids=(1, 9, 3), text="abc"), "differ from token 1 on"),
        (Answer(token_ids=(1, 2), text="ab"), "differ from token 2 on"),
        (Answer(token_ids=(1, 2, 3), text="abd"), "the same tokens give another text"),
    ],
)
def test_another_answer_is_refused_with_the_place_of_the_difference(actual, where):
    with pytest.raises(AcceptanceError, match=where) as caught:
        compare(Answer(token_ids=(1, 2, 3), text="abc"), actual)
    assert caught.value.expected == "[1, 2, 3] 'abc'"


def test_every_interface_is_reached_on_loopback():
    assert reached_by(Endpoint(host="0.0.0.0", port=1)) == "127.0.0.1"
    assert reached_by(Endpoint(host="::", port=1)) == "::1"
    assert reached_by(Endpoint(host="10.1.2.3", port=1)) == "10.1.2.3"


def test_a_log_that_is_not_there_has_no_tail(tmp_path):
    assert log_tail(None) == log_tail(tmp_path / "nothing") == ""


def test_the_cause_of_an_end_is_told_although_it_was_logged_long_before(tmp_path):
    log = tmp_path / "engine.log"
    prefix = "(EngineCore pid=615) ERROR 11-29 20:11:39 [core.py:1510] "
    lines = [
        f"{prefix}AssertionError: Not enough NUMA nodes",
        "AssertionError: Not enough NUMA nodes",
        "like OSError: 24",
    ]
    log.write_text("\n".join([*lines, *("  File x" for _ in range(100)), "RuntimeError: See root cause above."]))
    tail = log_tail(log).splitlines()
    assert tail[0] == "(earlier) AssertionError: Not enough NUMA nodes"
    assert tail[1] == "  File x" and tail[-1] == "RuntimeError: See root cause above." and len(tail) == 21
