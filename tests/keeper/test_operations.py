"""An operation in flight, and who undoes it when."""

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from keeper_world import get, kill, sigkill, tagged, until

from coldsnap.artifact.held import is_kept, kept_for
from coldsnap.errors import EngineError, StepError
from coldsnap.keeper import journal, layout
from coldsnap.keeper.client import Exit, Keeper
from coldsnap.keeper.rundir import post_mortem
from coldsnap.keeper.undo import CONTINUE, KILL, control, parse, remove

CAPTURE = """
keeper = Keeper.connect(run_dir)
keeper.begin("capture", [control("resume"), CONTINUE])
os.mkdir(artifact := run_dir + ".artifact"); open(artifact + "/data", "w").close()
keeper.undo(remove(artifact))
keeper.signal(signal.SIGSTOP, whom="tree")
say(1)
"""


def test_a_caller_killed_in_a_capture_leaves_the_engine_serving(world):
    keeper = world.start()
    port = world.serve(keeper)
    process, _ = world.caller(CAPTURE)
    until(lambda: keeper.status().state == "stopped", "the freeze")
    assert keeper.status().operation == "capture"

    kill(process)

    until(lambda: keeper.status().operation is None, "the undo")
    assert get(port)["count"] == 1
    assert not Path(f"{world.run_dir}.artifact").exists()
    assert "control resume" in keeper.log_tail()
    last = keeper.status().interrupted
    assert (last.operation, last.why) == ("capture", "the caller ended")
    assert last.undone == (
        f"removed {world.run_dir}.artifact",
        "let the tree continue",
        "asked 1 ranks to resume",
    )
    assert keeper.status().state == "running"


def test_a_caller_killed_in_a_restore_leaves_nothing(world):
    process, _ = world.caller(
        "keeper = Keeper.start(run_dir, namespace=namespace)\n"
        "os.mkdir(half := run_dir + '.half')\n"
        "keeper.begin('restore', [KILL, remove(half)])\n"
        "keeper.spawn_engine([sys.executable, target], env=env, cwd='/')\n"
        "keeper.spawn_helper(['sleep', '100'], env=env, name='criu')\n"
        "say(1)\n"
    )
    assert len(tagged(world.tag)) >= 2

    kill(process)

    until(lambda: not tagged(world.tag), "the end of the tree")
    until(lambda: not world.run_dir.exists(), "the end of the run directory")
    assert os.listdir(world.base) == []


@pytest.mark.parametrize("victim", ["guard_pid", "keeper_pid"])
def test_files_are_removed_when_the_guard_or_the_keeper_dies(world, victim):
    keeper = world.start()
    world.serve(keeper)
    half = world.base / "half"
    half.mkdir()
    (half / "data").write_text("x")
    keeper.begin("capture", [remove(half), CONTINUE])

    sigkill(getattr(keeper, victim))
    assert keeper.wait(10)

    with pytest.raises(EngineError, match=f"during capture: removed {half}"):
        keeper.end()
    assert not half.exists()
    assert not tagged(world.tag)


def test_files_are_removed_by_the_next_who_looks_when_both_die(private):
    keeper = private.start()
    private.serve(keeper)
    half = private.base / "half"
    half.mkdir()
    keeper.begin("capture", [remove(half)])
    os.kill(keeper.keeper_pid, signal.SIGSTOP)  # it must not get a word in
    sigkill(keeper.guard_pid)
    sigkill(keeper.keeper_pid)

    until(lambda: not post_mortem(private.run_dir).alive, "their end")

    with pytest.raises(EngineError, match="guard and its keeper were killed, during capture: removed"):
        Keeper.connect(private.run_dir)
    assert not half.exists()


def test_what_is_complete_is_not_removed(private):
    keeper = private.start()
    keeper.spawn_engine(["sleep", "100"], env=private.env, cwd="/")
    artifact = private.base / "artifact"
    artifact.mkdir()
    keeper.begin("capture", [remove(artifact, unless="artifact.json")])
    (artifact / "artifact.json").write_text("{}")

    assert keeper.abort() == (f"{artifact} is complete and stays",)
    assert artifact.exists()


def test_an_undo_in_dev_shm_means_the_callers(private):
    keeper = private.start()
    private.serve(keeper)
    path = Path("/dev/shm", f"coldsnap-test-{private.tag}")
    path.mkdir()
    keeper.begin("capture", [remove(path)])

    assert keeper.abort() == (f"removed {path}",)
    assert not path.exists()


def test_an_end_forgets_the_undo(private):
    keeper = private.start()
    keeper.spawn_engine(["sleep", "100"], env=private.env, cwd="/")
    kept = private.base / "kept"
    kept.mkdir()
    keeper.begin("capture", [remove(kept), KILL])
    keeper.end()
    keeper.close()

    with Keeper.connect(private.run_dir) as again:
        assert again.status().operation is None
        assert again.status().interrupted is None
        again.stop()
    assert kept.exists()


def test_a_second_operation_is_refused_with_the_name_of_the_first(private):
    keeper = private.start()
    keeper.begin("capture")

    with Keeper.connect(private.run_dir) as other:
        with pytest.raises(StepError, match="cannot begin restore: capture is in flight"):
            other.begin("restore")
        with pytest.raises(StepError, match="another caller's"):
            other.end()

    assert keeper.status().operation == "capture"


def test_the_context_manager_aborts_on_an_error_and_ends_otherwise(private):
    keeper = private.start()
    keeper.spawn_engine(["sleep", "100"], env=private.env, cwd="/")
    half = private.base / "half"
    half.mkdir()

    with keeper.operation("capture", [remove(half)]):
        pass
    assert half.exists()

    with pytest.raises(ZeroDivisionError), keeper.operation("capture", [remove(half)]):
        _ = 1 / 0
    assert not half.exists()
    assert keeper.status().interrupted.why == "it was aborted"


def test_an_error_in_a_keepers_block_aborts_its_operation(private):
    half = private.base / "half"
    half.mkdir()

    with pytest.raises(ZeroDivisionError), private.start() as keeper:
        keeper.begin("restore", [KILL, remove(half)])
        _ = 1 / 0

    until(lambda: not private.run_dir.exists(), "its end")
    assert not half.exists()


def test_an_abort_that_kills_ends_the_keeper(world):
    keeper = world.start()
    keeper.begin("launch", [KILL])
    world.serve(keeper)

    assert keeper.abort() == ("killed the tree",)

    assert keeper.wait(10)
    assert not world.run_dir.exists()
    assert not tagged(world.tag)


def test_an_engine_that_dies_in_an_operation_is_told_of_before_the_keeper_ends(world):
    keeper = world.start()
    keeper.begin("launch", [KILL])
    keeper.spawn_engine(["sh", "-c", "echo no model; exit 4"], env=world.env, cwd="/")

    status = until(lambda: (s := keeper.status()).state == "exited" and s, "its end")

    assert status.exit == Exit(code=4)
    assert keeper.log_tail() == "no model"
    keeper.abort()
    assert keeper.wait(10)


def test_a_stop_by_its_owner_ends_the_operation(private):
    keeper = private.start()
    kept = private.base / "kept"
    kept.mkdir()
    keeper.begin("capture", [remove(kept)])
    keeper.spawn_engine(["sleep", "100"], env=private.env, cwd="/")

    keeper.stop()

    assert kept.exists()
    assert not private.run_dir.exists()


def test_a_stop_by_another_undoes_the_operation(private):
    keeper = private.start()
    half = private.base / "half"
    half.mkdir()
    keeper.begin("capture", [remove(half)])
    keeper.spawn_engine(["sleep", "100"], env=private.env, cwd="/")

    with Keeper.connect(private.run_dir) as other:
        other.stop()

    assert not half.exists()
    assert not private.run_dir.exists()


def test_helpers_may_roll_back_before_the_undo(private):
    # The helper notices the end of its socket, and takes a moment; what is undone comes after.
    keeper = private.start()
    private.serve(keeper)
    trace = private.base / "trace"
    process, _ = private.caller(
        "import socket\n"
        "keeper = Keeper.connect(run_dir)\n"
        "ours, theirs = socket.socketpair()\n"
        f"keeper.begin('capture', [remove({str(trace / 'late')!r}), CONTINUE])\n"
        "os.mkdir(" + repr(str(trace)) + ")\n"
        f"keeper.spawn_helper(['sh', '-c', 'cat <&7; sleep .3; touch {trace}/late'], env=env, name='criu', "
        "fds={7: theirs.fileno()})\n"
        "say(1)\n"
    )

    kill(process)

    until(lambda: keeper.status().operation is None, "the undo")
    assert keeper.status().interrupted.undone[-1] == f"removed {trace}/late"
    assert os.listdir(trace) == []


def test_undo_entries_run_last_first(private):
    keeper = private.start()
    keeper.spawn_engine(["sleep", "100"], env=private.env, cwd="/")
    keeper.begin("capture", [control("resume"), CONTINUE])
    keeper.undo(remove(private.base / "nothing"))

    assert keeper.abort() == (
        f"{private.base}/nothing was not there",
        "let the tree continue",
        "asked 0 ranks to resume",
    )


def test_a_rank_that_does_not_listen_is_named(private):
    keeper = private.start()
    keeper.spawn_engine(["sleep", "100"], env=private.env, cwd="/")
    (keeper.rank_dir / "control" / "api.7.sock").touch()
    keeper.begin("capture", [control("resume")])

    (sentence,) = keeper.abort()

    assert sentence.startswith("asked 1 ranks to resume, not done: api.7: it does not listen")


def test_the_door_is_not_opened_when_memory_is_not_back(private):
    keeper = private.start()
    keeper.spawn_engine(["sleep", "100"], env=private.env, cwd="/")
    (keeper.rank_dir / "control" / "worker.7.sock").touch()
    keeper.begin("sleep", [control("resume"), control("hydrate")])

    hydrated, resumed = keeper.abort()

    assert hydrated.startswith("asked 1 ranks to hydrate, not done: worker.7: it does not listen")
    assert resumed == "asked nobody to resume, since memory is not back"


@pytest.fixture
def kept(private):
    """A keeper whose operation left a directory to its engine, since the memory of that one is not back."""
    output = private.base / "output"
    output.mkdir()
    keeper = private.start()
    keeper.spawn_engine(["sleep", "100"], env=private.env, cwd="/")
    (keeper.rank_dir / "control" / "worker.7.sock").touch()
    keeper.begin("capture", [remove(output, unless="artifact.json", kept="kept-for"), control("hydrate")])

    _, told = keeper.abort()

    assert told == f"kept {output}, which has what the memory held"
    return SimpleNamespace(keeper=keeper, output=output)


def test_what_the_memory_held_is_kept_with_links_there_and_back(kept):
    assert is_kept(kept.output)
    assert kept.keeper.run_dir == kept_for(kept.output)
    assert kept.output == (kept.keeper.run_dir / "sleep" / "kept-for").readlink()


def test_what_was_kept_goes_when_the_engine_ends(kept):
    kept.keeper.stop(grace_s=0)

    assert not kept.output.exists()


def test_what_lies_in_the_place_of_what_was_kept_stays(kept):
    (kept.output / "kept-for").unlink()  # somebody removed it, and has made something else there

    kept.keeper.stop(grace_s=0)

    assert kept.output.exists()


@pytest.mark.parametrize(
    "entry",
    [
        {"kind": "format-disk"},
        {"kind": "remove"},
        {"kind": "remove", "path": "relative", "unless": "", "kept": ""},
        {"kind": "remove", "path": "/", "unless": "", "kept": ""},
        {"kind": "remove", "path": "/etc", "unless": "", "kept": ""},
        {"kind": "remove", "path": "/etc/../etc/x", "unless": "", "kept": ""},
        {"kind": "remove", "path": "//etc/x", "unless": "", "kept": ""},
        {"kind": "remove", "path": "/tmp/x", "unless": "../y", "kept": ""},
        {"kind": "remove", "path": "/tmp/x", "unless": "", "kept": "../y"},
        {"kind": "remove", "path": 7, "unless": "", "kept": ""},
        {"kind": "kill", "path": "/tmp/x"},
        "kill",
    ],
)
def test_a_strange_undo_entry_is_refused(private, entry):
    with pytest.raises(ValueError):
        parse(entry)

    if isinstance(entry, dict):
        keeper = private.start()
        with pytest.raises(StepError):
            keeper.begin("capture", [entry])
        assert keeper.status().operation is None


def test_remove_resolves_the_directory_but_not_the_name(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "victim").symlink_to("/etc")

    entry = remove(tmp_path / "link" / "victim")

    assert entry["path"] == str(tmp_path / "real" / "victim")


def test_a_journal_cut_off_in_the_middle_of_a_line_is_read_up_to_there(tmp_path):
    dir_fd = layout.open_directory(str(tmp_path))
    log = journal.Journal(dir_fd)
    log.begin("capture", [CONTINUE])
    log.undo(remove(tmp_path / "x"))
    log.close()
    whole = (tmp_path / "journal.jsonl").read_bytes()

    for length in range(len(whole)):
        (tmp_path / "journal.jsonl").write_bytes(whole[:length])
        found = journal.in_flight(dir_fd)
        lines = whole[:length].count(b"\n")
        assert (found is None) == (lines == 0)
        assert found is None or len(found.entries) == lines

    os.close(dir_fd)


def test_every_step_is_in_the_journal_before_it_is_answered(private):
    keeper = private.start()
    path = private.run_dir / "journal.jsonl"

    def events():
        return [json.loads(line)["event"] for line in path.read_text().splitlines()]

    keeper.begin("capture", [CONTINUE])
    assert events() == ["begin"]
    keeper.undo(CONTINUE)
    assert events() == ["begin", "undo"]
    keeper.end()
    assert events() == ["begin", "undo", "end"]
    keeper.begin("capture", [])
    keeper.abort()
    assert events()[-2:] == ["begin", "undone"]
    assert time.time_ns() > json.loads(path.read_text().splitlines()[0])["unix_ns"] > 0
