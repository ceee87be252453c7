"""Hooks on SGLang's registry are looked at before, and looked for after; and a door, and a meeting."""

import asyncio
import enum
import os
import subprocess
import sys
import textwrap
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from coldsnap.engines.rank import Busy
from coldsnap.engines.sglang.doors import Doors
from coldsnap.engines.sglang.frontend import FrontEnd
from coldsnap.engines.sglang.hooking import Hook, Hooking
from coldsnap.engines.sglang.meeting import Meeting
from coldsnap.engines.sglang.warmup import Warmup
from coldsnap.errors import ContractError, EngineError

target = types.ModuleType("outline_of_targets")
sys.modules[target.__name__] = target
exec(
    textwrap.dedent("""
    class Updater:
        def release(self, recv_req):
            return recv_req

        @staticmethod
        def load(model, weights):
            return model
    """),
    target.__dict__,
)


class Registry:
    """SGLang's, as far as it matters: what is registered is put on later, and failures are logged alone."""

    def __init__(self, *, skips=()):
        self._patched, self.registered, self.skips = set(), [], skips

    def register(self, name, hook, kind):
        self.registered.append((name, hook))

    def apply_hooks(self):
        for name, hook in self.registered:
            if name not in self.skips:
                owner, _, attribute = name.rpartition(".")
                owner = getattr(target, owner.rpartition(".")[2])
                original = getattr(owner, attribute)
                setattr(owner, attribute, lambda *a, original=original, hook=hook: hook(original, *a))
                self._patched.add(name)


@pytest.fixture(autouse=True)
def updater():
    kept = dict(vars(target.Updater))
    yield target.Updater
    target.Updater.release, target.Updater.load = kept["release"], kept["load"]


def hook(name="release", parameters=("recv_req",)):
    return Hook(
        target=f"outline_of_targets.Updater.{name}",
        wrapper=lambda original, *args: ("hooked", original(*args)),
        parameters=parameters,
    )


def test_a_hook_is_on_after_sglang_has_applied_it(updater):
    registry, ends = Registry(), []
    Hooking(registry, "around", ends.append).register((hook(),))
    registry.apply_hooks()
    assert updater().release(1) == ("hooked", 1)
    assert ends == []


@pytest.mark.parametrize(
    ("hooks", "told"),
    [
        ((hook("resume"),), "Updater.resume does not exist"),
        ((hook(parameters=("tags",)),), "does not take tags"),
        ((Hook(target="outline_of_targets.Updater", wrapper=print),), "is no function"),
        ((hook(), hook("gone")), "Updater.gone does not exist"),
    ],
)
def test_a_target_that_is_not_as_expected_is_refused_before_anything_is_registered(hooks, told):
    registry = Registry()
    with pytest.raises(ContractError, match=told):
        Hooking(registry, "around", print).register(hooks)
    assert registry.registered == []


def test_a_hook_that_sglang_only_logged_about_ends_the_process():
    registry, ends = Registry(skips=["outline_of_targets.Updater.release"]), []
    Hooking(registry, "around", ends.append).register((hook(), hook("load", ("model", "weights"))))
    registry.apply_hooks()
    (error,) = ends
    assert error.missing == ("outline_of_targets.Updater.release was not patched",)


def test_a_hook_that_is_listed_and_not_there_ends_the_process():
    registry, ends = Registry(skips=["outline_of_targets.Updater.release"]), []
    Hooking(registry, "around", ends.append).register((hook(),))
    registry._patched.add("outline_of_targets.Updater.release")
    registry.apply_hooks()
    assert len(ends) == 1


def test_without_a_directive_the_entry_point_does_nothing_and_a_wrong_one_ends_the_process(tmp_path):
    code = "from coldsnap.engines.sglang.plugin import register; register(); print('on')"
    run = lambda **env: subprocess.run(  # noqa: E731
        [sys.executable, "-c", code],
        env={"PYTHONPATH": os.pathsep.join(sys.path), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run().stdout == "on\n"
    ended = run(COLDSNAP_DIRECTIVE=str(tmp_path / "directive.json"))
    assert ended.returncode == 70
    assert "the role of process" in ended.stderr
    assert ended.stdout == ""


# The meeting


def meeting(*, patience_s=20.0, act=lambda kind: None):
    return Meeting(lambda: {"worker.1", "worker.2"}, act, patience_s=patience_s)


def meet(where, worker, kind="release"):
    found = []

    def do():
        try:
            found.append(where.meet({"kind": kind, "worker": worker}))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=do)
    thread.start()
    return thread, found


def test_sglang_is_asked_once_when_the_last_worker_is_there():
    asked = []
    where = meeting(act=asked.append)
    first, one = meet(where, "worker.1")
    time.sleep(0.05)
    assert asked == []
    second, two = meet(where, "worker.2")
    for thread in (first, second):
        thread.join(20)
    assert asked == ["release"]
    assert one == two == [{"met": ["worker.1", "worker.2"]}]


def test_who_waits_in_vain_is_told_who_was_missing_and_nothing_was_asked():
    asked = []
    where = meeting(patience_s=0.05, act=asked.append)
    thread, found = meet(where, "worker.1")
    thread.join(20)
    assert isinstance(found[0], Busy)
    assert "worker.2 was not asked" in str(found[0])
    assert asked == []


def test_everyone_is_told_that_sglang_failed():
    def fails(_kind):
        raise RuntimeError("the scheduler is gone")

    where = meeting(act=fails)
    threads = [meet(where, "worker.1"), meet(where, "worker.2")]
    for thread, found in threads:
        thread.join(20)
        assert str(found[0]) == "the scheduler is gone"


# The door


class Status(enum.Enum):
    Up, Starting = 1, 2


class Tokenizer:
    """SGLang's tokenizer manager, as far as the door touches it."""

    def __init__(self, loop):
        self.event_loop, self.rid_to_state = loop, {}
        self.is_pause, self.server_status, self.flushes = False, Status.Up, 0
        self.go = asyncio.Event()

    async def pause_generation(self, obj):
        self.is_pause = True

    async def continue_generation(self, obj):
        self.is_pause = False

    async def flush_cache(self):
        self.flushes += 1
        return types.SimpleNamespace(success=True)

    async def generate_request(self, obj, request=None):
        self.rid_to_state[obj.rid] = obj
        try:
            yield 1
            await self.go.wait()
            yield 2
        finally:
            del self.rid_to_state[obj.rid]


@pytest.fixture
def door(monkeypatch, request):
    messages = types.ModuleType("sglang.srt.managers.io_struct")
    messages.PauseGenerationReqInput = lambda mode: mode
    messages.ContinueGenerationReqInput = lambda: None
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, messages.__name__, messages)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    front, tokenizer = FrontEnd(closed=getattr(request, "param", False)), Tokenizer(loop)
    front.made(lambda made: None, tokenizer)

    def ask(rid):
        answers = front.generate_request(Tokenizer.generate_request, tokenizer, types.SimpleNamespace(rid=rid))

        async def all_of():
            return [piece async for piece in answers]

        return asyncio.run_coroutine_threadsafe(all_of(), loop)

    yield types.SimpleNamespace(front=front, tokenizer=tokenizer, request=ask, loop=loop, ops=front.operations())
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)
    loop.close()


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.002)


def test_a_quiesce_waits_for_what_runs_and_holds_what_comes_later(door):
    running = door.request("first")
    until(lambda: door.tokenizer.rid_to_state)
    done = []
    quiesce = threading.Thread(target=lambda: done.append(door.ops["quiesce"]({"drain_timeout_s": 20})))
    quiesce.start()
    until(lambda: not door.front._open.is_set())
    later = door.request("second")
    until(lambda: door.front._held == 1)
    assert not done
    door.loop.call_soon_threadsafe(door.tokenizer.go.set)
    quiesce.join(20)
    assert done == [{"unfinished": 0, "held": 1, "open": False, "quiesced": True, "ready": False}]
    assert running.result(20) == [1, 2]
    assert door.tokenizer.server_status is Status.Starting
    resumed = {"unfinished": 0, "held": 0, "open": True, "quiesced": False, "ready": True}
    assert door.ops["resume"]({}) | {"held": 0} == resumed
    assert later.result(20) == [1, 2]
    assert door.tokenizer.server_status is Status.Up


def test_a_quiesce_that_takes_too_long_leaves_the_engine_serving(door):
    running = door.request("first")
    until(lambda: door.tokenizer.rid_to_state)
    with pytest.raises(Busy, match="1 requests still ran"):
        door.ops["quiesce"]({"drain_timeout_s": 0.05})
    assert door.front._open.is_set()
    assert not door.tokenizer.is_pause
    assert door.tokenizer.server_status is Status.Up
    door.loop.call_soon_threadsafe(door.tokenizer.go.set)
    assert running.result(20) == [1, 2]


def test_only_the_request_with_the_key_passes_an_admitted_engine(door):
    door.loop.call_soon_threadsafe(door.tokenizer.go.set)
    door.ops["quiesce"]({"drain_timeout_s": 20})
    door.ops["admit"]({"key": "0123456789abcdef"})
    other = door.request("somebody")
    assert door.request("cmpl-0123456789abcdef").result(20) == [1, 2]
    assert not other.done()
    assert door.tokenizer.server_status is Status.Starting
    door.ops["resume"]({})
    assert other.result(20) == [1, 2]


def test_an_engine_that_has_no_event_loop_yet_is_still_starting():
    front = FrontEnd()
    with pytest.raises(Busy, match="still starting"):
        front.operations()["status"]({})


# A server that a restore starts


@pytest.mark.parametrize("door", [True], indirect=True)
def test_the_door_of_a_started_server_is_closed_for_all_but_the_acceptance(door):
    waiting = door.request("somebody")
    until(lambda: door.front._held == 1)
    door.loop.call_soon_threadsafe(door.tokenizer.go.set)
    door.ops["admit"]({"key": "accept-0123456789"})
    assert door.request("accept-0123456789").result(20) == [1, 2]
    assert not waiting.done()

    door.ops["resume"]({})

    assert waiting.result(20) == [1, 2]
    assert door.tokenizer.server_status is Status.Up


@pytest.fixture
def server():
    """An HTTP server that notes what it is asked for, and answers the second time only."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(self.path)
            self.send_response(200 if len(asked) > 1 else 503)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield types.SimpleNamespace(host="0.0.0.0", port=httpd.server_address[1], asked=asked)
    httpd.shutdown()
    thread.join(20)
    httpd.server_close()


@pytest.mark.parametrize("door", [True], indirect=True)
@pytest.mark.parametrize("skips", [False, True])
def test_a_started_server_makes_its_loop_instead_of_a_warmup_and_says_that_it_is_starting(door, server, skips):
    def generates(server_args):
        raise AssertionError("the door is closed: a request through it would never end")

    def wait_and_warmup(server_args, launch_callback=None, execute_warmup_func=generates):
        if skips or execute_warmup_func(server_args):
            door.tokenizer.server_status = Status.Up if skips else Status.Starting
            launch_callback()

    called = []
    Warmup(door.front).warm(wait_and_warmup, server_args=server, launch_callback=lambda: called.append(True))

    assert called == [True]
    assert server.asked == ["/flush_cache", "/flush_cache"]
    assert door.tokenizer.server_status is Status.Starting


# What a user releases


@pytest.fixture
def doors(door, tmp_path):
    """The front end's part in a user's release, whose schedulers answer what a test says."""
    told = types.SimpleNamespace(error="")
    made = Doors(door.front, str(tmp_path))
    hooks = {hook.target.rpartition(".")[2]: hook.wrapper for hook in made.hooks()}

    async def original(tokenizer, obj, request):
        told.during = door.front.asleep

    def ask(kind, *tags):
        obj = types.SimpleNamespace(tags=list(tags) or None)
        asked = hooks[f"{kind}_memory_occupation"](original, door.tokenizer, obj, object())
        return asyncio.run_coroutine_threadsafe(asked, door.loop).result(20)

    def require_done():
        if told.error:
            raise EngineError(told.error)

    made._require_done = require_done
    return types.SimpleNamespace(ask=ask, told=told)


def test_a_server_whose_memory_a_user_took_away_refuses_requests_by_name_until_all_of_it_is_back(door, doors):
    door.loop.call_soon_threadsafe(door.tokenizer.go.set)
    doors.ask("release")
    assert doors.told.during == {"weights", "kv_cache"}, "nobody is let in while it happens"
    with pytest.raises(ValueError, match=r"\(kv_cache, weights\) was released and cannot serve a request; resume it"):
        door.request("first").result(20)
    assert door.tokenizer.server_status is Status.Starting

    doors.ask("resume", "weights")
    with pytest.raises(ValueError, match=r"\(kv_cache\) was released"):
        door.request("second").result(20)

    doors.ask("resume", "kv_cache")
    assert door.request("third").result(20) == [1, 2]
    assert door.tokenizer.server_status is Status.Up


def test_a_release_that_was_refused_leaves_the_server_open(door, doors):
    door.loop.call_soon_threadsafe(door.tokenizer.go.set)
    doors.told.error = "the engine still has requests"
    with pytest.raises(EngineError, match="still has requests"):
        doors.ask("release")
    assert door.request("first").result(20) == [1, 2]
    assert door.tokenizer.server_status is Status.Up


def test_a_server_that_a_user_paused_has_requests_wait_as_sglang_does(door, doors):
    door.loop.call_soon_threadsafe(door.tokenizer.go.set)
    door.tokenizer.is_pause = True
    doors.ask("release")
    assert door.request("first").result(20) == [1, 2]
