"""A rank that dies while its engine's root runs on is noticed, and named."""

import sys

import pytest
from keeper_world import until

from coldsnap.keeper.client import Exit
from coldsnap.keeper.handle import Engine

ENGINE = """
import os, signal, socket, sys, time
directory = os.path.join(os.path.dirname(os.environ["COLDSNAP_DIRECTIVE"]), "control")

def listen(role):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{directory}/{role}.{os.getpid()}.sock")
    listener.listen()
    return listener

if sys.argv[2] == "forgetful":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
child = os.fork()
listener = listen("api" if child else "worker")
print("up", flush=True)
if child == 0:
    open(sys.argv[1]).read()
    os._exit(7)
time.sleep(1000)
"""


@pytest.fixture
def gate(world):
    path = world.base / "gate"
    import os

    os.mkfifo(path)
    return path


@pytest.mark.parametrize("parent", ["careless", "forgetful"])
def test_a_dead_rank_is_named_while_its_engine_runs_on(world, gate, parent):
    keeper = world.start()
    keeper.spawn_engine([sys.executable, "-S", "-c", ENGINE, str(gate), parent], env=world.env, cwd="/")
    until(lambda: keeper.log_tail().count("up") == 2, "both ranks")
    worker = next(process.pid for process in keeper.tree() if process.pid != keeper.status().root_pid)
    engine = Engine(keeper)
    assert (engine.status().state, keeper.status().lost) == ("running", ())

    gate.write_text("die\n")
    status = engine.wait(10)

    (lost,) = keeper.status().lost
    # A parent that does not wait leaves a zombie, which tells how it ended; nobody else can.
    assert (lost.role, lost.pid, lost.exit) == ("worker", worker, Exit(code=7) if parent == "careless" else None)
    assert status.state == engine.status().state == "failed"
    assert status.story.startswith(f"its worker (pid {worker}) has died")
    assert "failed" in repr(engine)
    assert engine.stop() is not None


def test_ranks_that_end_with_their_engine_are_no_news(private, gate):
    keeper = private.start()
    keeper.spawn_engine([sys.executable, "-S", "-c", ENGINE, str(gate), "careless"], env=private.env, cwd="/")
    until(lambda: keeper.log_tail().count("up") == 2, "both ranks")

    assert keeper.stop(grace_s=0)
    assert Engine(keeper).status().state == "gone"
