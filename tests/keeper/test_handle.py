"""The handle that users hold."""

import os
import signal
from pathlib import Path

import pytest
from keeper_world import get, kill, sigkill, tagged, until

from coldsnap.errors import AdmissionError, EngineError, StepTimeout
from coldsnap.keeper.client import Exit
from coldsnap.keeper.directive import Directive, Endpoint, write_directive
from coldsnap.keeper.handle import Engine, list_engines
from coldsnap.keeper.rundir import new_name, run_dir_for, run_root


@pytest.fixture
def engine(private):
    keeper = private.start(labels={"model": "tiny"})
    port = private.serve(keeper)
    endpoint = Endpoint(host="127.0.0.1", port=port)
    write_directive(keeper.rank_dir, Directive.new(operation="launch", endpoint=endpoint))
    return Engine(keeper)


def test_a_handle_knows_its_engine(private, engine):
    status = engine.status()

    assert engine.name == "engine"
    assert engine.run_dir == private.run_dir
    assert engine.labels == {"model": "tiny"}
    assert get(engine.endpoint.port)["pid"] == status.root_pid
    assert (status.state, status.exit, status.operation, status.interrupted) == ("running", None, None, None)
    assert status.endpoint == engine.endpoint
    assert len(status.incarnation) == 32
    assert engine.processes()[0].pid == status.root_pid
    assert engine.log_tail(1) == f"port {engine.endpoint.port}"
    assert repr(engine) == f"Engine('engine', running, {engine.endpoint.url})"
    assert engine.endpoint.url in engine._repr_html_()


def test_leaving_the_block_stops_the_engine(private, engine):
    with engine:
        pass

    assert not private.run_dir.exists()
    assert not tagged(private.tag)
    assert "detached" in repr(engine)


def test_a_detached_engine_serves_on_and_is_found_again(private, engine):
    endpoint = engine.endpoint
    with engine:
        engine.detach()

    with Engine.attach(private.run_dir) as again:
        assert again.endpoint == endpoint
        assert get(endpoint.port)["count"] == 1
        assert again.labels == {"model": "tiny"}

    assert not private.run_dir.exists()


def test_attach_works_from_another_process_after_the_caller_is_gone(world):
    process, _ = world.caller(
        "keeper = Keeper.start(run_dir, namespace=namespace)\n"
        "keeper.spawn_engine([sys.executable, target], env=env, cwd='/')\n"
        "say(1)\n"
    )
    kill(process)

    engine = Engine.attach(str(world.run_dir))

    assert get(world.port(engine.keeper))["count"] == 1
    assert engine.stop() == Exit(signal=signal.SIGTERM)


def test_wait_returns_how_the_engine_ended(private):
    keeper = private.start()
    keeper.spawn_engine(
        ["sh", "-c", "echo bye; read x < $GATE; exit 6"], env={**private.env, "GATE": fifo(private)}, cwd="/"
    )
    engine = Engine(keeper)
    with pytest.raises(StepTimeout, match="still runs"):
        engine.wait(0.05)

    Path(private.base, "gate").write_text("go\n")
    status = engine.wait(10)

    assert (status.state, status.exit) == ("exited", Exit(code=6))
    assert "exit status 6" in status.story
    assert engine.status().state == "exited"
    with pytest.raises(EngineError, match="exit status 6.*\n.*\nbye"):
        Engine.attach(private.run_dir)
    assert engine.stop() is None, "stopping what is no more is fine"
    assert list_engines(private.base)[0].exit == Exit(code=6)


def fifo(world):
    os.mkfifo(world.base / "gate")
    return str(world.base / "gate")


def test_an_engine_stopped_elsewhere_is_gone(private, engine):
    Engine.attach(private.run_dir).stop()

    status = engine.wait(10)

    assert status.state == "gone"
    assert "there is no engine" in status.story
    assert engine.status().state == "gone"
    assert "gone" in repr(engine)


def test_a_killed_keeper_is_told_with_the_operation_it_took_along(private, engine):
    half = private.base / "half"
    half.mkdir()
    from coldsnap.keeper.undo import remove

    engine.keeper.begin("capture", [remove(half)])
    sigkill(engine.keeper.keeper_pid)

    status = engine.wait(10)

    assert status.state == "gone"
    assert status.interrupted.operation == "capture"
    assert status.interrupted.undone == (f"removed {half}",)
    assert status.exit is None


def test_nobody_there_is_said_in_words(tmp_path):
    with pytest.raises(EngineError, match="there is no engine at .*nobody"):
        Engine.attach(tmp_path / "nobody")
    assert list_engines(tmp_path) == ()
    assert list_engines(tmp_path / "nowhere") == ()


def test_engines_are_listed_with_the_dead_ones(private, engine):
    dead = private.start(private.base / "dead")
    private.serve(dead)
    sigkill(dead.guard_pid)
    until(lambda: dead.wait(1), "its end")
    starting = private.start(private.base / "starting")

    found = {status.name: status.state for status in list_engines(private.base)}

    assert found == {"dead": "gone", "engine": "running", "starting": "starting"}
    assert starting.status().state == "empty"


def test_an_endpoint_nobody_named_is_an_error(private):
    engine = Engine(private.start())

    with pytest.raises(EngineError, match="no endpoint yet"):
        _ = engine.endpoint
    assert engine.status().endpoint is None


def test_names_are_unique_and_stay_below_the_run_root():
    names = {new_name("vllm") for _ in range(100)}

    assert len(names) == 100
    assert all(run_dir_for(name).parent == run_root() for name in names)
    for bad in ("", "..", "a/b", ".hidden", "-x", "x" * 65, "a b"):
        with pytest.raises(AdmissionError, match="an engine's name"):
            run_dir_for(bad)


def test_a_word_without_a_slash_is_a_name():
    with pytest.raises(EngineError, match=f"there is no engine at {run_root()}/no-such-engine"):
        Engine.attach("no-such-engine")
