"""Starting, stopping, and what is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from keeper_world import alive, get, kill, mounts, sigkill, tagged, until

from coldsnap.errors import AdmissionError, EngineError, StepError, StepTimeout
from coldsnap.keeper.client import Exit, Interpreter, Keeper
from coldsnap.keeper.rundir import discard
from coldsnap.keeper.undo import remove


def test_a_keeper_answers_soon_after_its_start(world):
    begun = time.monotonic()

    keeper = world.start()

    print(f"{world.namespace}: hello after {1000 * (time.monotonic() - begun):.0f} ms")
    assert keeper.status().state == "empty"


def children():
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def test_an_interpreter_that_is_never_told_what_to_keep_ends_with_its_connection():
    before = children()
    interpreter = Interpreter(sys.executable)
    (waiting,) = children() - before

    interpreter.close()
    interpreter.close()

    assert not alive(waiting)
    assert children() == before


def test_an_interpreter_that_waited_becomes_the_keeper(private):
    interpreter = Interpreter(sys.executable)

    keeper = private.start(interpreter=interpreter)
    interpreter.close()

    assert keeper.status().state == "empty"


def test_an_interpreter_that_cannot_run_is_told_by_its_own_words(private):
    with pytest.raises(StepError, match=r"ended before it answered:[\s\S]*invalid option"):
        private.start(interpreter=Interpreter("/usr/bin/cat"))


def test_an_engine_serves_and_a_stop_leaves_nothing(world):
    keeper = world.start(labels={"kind": "test"})
    port = world.serve(keeper)

    answer = get(port)
    names = [process.comm for process in keeper.tree()]
    ended = keeper.stop(grace_s=5)

    assert answer["count"] == 1
    assert len(names) >= 2
    assert keeper.labels == {"kind": "test"}
    assert ended == Exit(signal=signal.SIGTERM)
    assert not world.run_dir.exists()
    assert not tagged(world.tag)
    with pytest.raises(OSError):
        get(port)


def test_a_private_tree_has_its_own_pids_shared_memory_and_tmp(private):
    keeper = private.start()
    private.serve(keeper)

    (root, child, *_) = keeper.tree()
    ring = f"coldsnap_test_ring_{private.tag}"

    assert 600 < root.pid < 700
    assert child.ppid == root.pid
    assert ring in os.listdir(keeper.shm_fd)
    assert not Path("/dev/shm", ring).exists()
    assert str(root.pid) in os.listdir(keeper.proc_fd)
    assert os.fstatvfs(keeper.shm_fd).f_blocks == os.statvfs("/dev/shm").f_blocks
    assert os.stat("dev/shm/coldsnap/run", dir_fd=keeper.root_fd).st_ino == keeper.rank_dir.stat().st_ino


def test_orphans_of_the_tree_are_reaped(world):
    keeper = world.start()
    world.serve(keeper)

    until(lambda: "sleep" not in [process.comm for process in keeper.tree()], "the orphan's end")

    assert "Z" not in [process.state for process in keeper.tree()]


def test_an_engine_that_ignores_sigterm_is_killed_after_the_grace(world):
    keeper = world.start()
    keeper.spawn_engine(["sh", "-c", "trap '' TERM; echo deaf; while :; do sleep 1; done"], env=world.env, cwd="/")
    until(lambda: "deaf" in keeper.log_tail(), "its first line")

    assert keeper.stop(grace_s=0.2) == Exit(signal=signal.SIGKILL)
    assert not tagged(world.tag)


def test_a_frozen_engine_is_stopped_at_once(world):
    keeper = world.start()
    world.serve(keeper)
    keeper.signal(signal.SIGSTOP, whom="tree")
    until(lambda: keeper.status().state == "stopped", "the freeze")

    assert keeper.stop(grace_s=1000) == Exit(signal=signal.SIGKILL)
    assert not world.run_dir.exists()


def test_a_keeper_without_an_engine_goes_with_its_caller(world):
    process, _ = world.caller("keeper = Keeper.start(run_dir, namespace=namespace); say(1)")
    assert world.run_dir.exists()

    kill(process)

    until(lambda: not world.run_dir.exists(), "its end")


@pytest.mark.parametrize("delay_s", [0.0, 0.03, 0.06, 0.09, 0.15])
def test_a_caller_killed_at_any_moment_of_a_launch_leaves_nothing(world, delay_s):
    process, _ = world.caller(
        "env['TAG'] = os.environ['TAG'] = env['TAG']\n"  # the guard inherits it
        "say(1)\n"
        "with Keeper.start(run_dir, namespace=namespace) as keeper:\n"
        "    keeper.begin('launch', [KILL])\n"
        "    keeper.spawn_engine(['sleep', '100'], env=env, cwd='/')\n"
        "    time.sleep(1000)\n"
    )
    time.sleep(delay_s)

    kill(process)

    # A process that is just being made may escape one look: it must be quiet for a while.
    quiet = iter(range(30))
    until(lambda: not tagged(world.tag) and not os.listdir(world.base) and next(quiet, None) is None, "quiet")


def test_an_engine_outlives_its_caller(world):
    process, port = world.caller(
        "keeper = Keeper.start(run_dir, namespace=namespace)\n"
        "keeper.spawn_engine([sys.executable, target], env=env, cwd='/')\n"
        "while 'port' not in keeper.log_tail(): time.sleep(.01)\n"
        "say(int(keeper.log_tail().split()[1]))"
    )
    kill(process)

    with Keeper.connect(world.run_dir) as keeper:
        assert get(port)["count"] == 1
        assert keeper.status().state == "running"
        keeper.stop()


@pytest.mark.parametrize("victim", ["guard_pid", "keeper_pid"])
def test_a_killed_guard_or_keeper_takes_the_tree_along_and_the_story_stays(world, victim):
    keeper = world.start()
    world.serve(keeper)
    pids = tagged(world.tag)

    sigkill(getattr(keeper, victim))

    until(lambda: not any(map(alive, pids)), "the end of the tree")
    assert keeper.wait(10)
    with pytest.raises(EngineError, match=victim.removesuffix("_pid") + ".* killed") as caught:
        keeper.status()
    assert "port" in caught.value.log_tail
    with pytest.raises(EngineError, match="killed"):
        Keeper.connect(world.run_dir)


def test_an_engine_that_ends_by_itself_leaves_its_story_and_its_log(world):
    keeper = world.start()
    keeper.spawn_engine(["sh", "-c", "sleep 100 & echo out of memory >&2; exit 3"], env=world.env, cwd="/")

    assert keeper.wait(10)

    with pytest.raises(EngineError, match="exit status 3") as caught:
        Keeper.connect(world.run_dir)
    assert "out of memory" in caught.value.log_tail
    assert not tagged(world.tag), "what the root left behind is killed"


def test_a_dead_run_directory_is_taken_over(world):
    keeper = world.start()
    world.serve(keeper)
    sigkill(keeper.guard_pid)
    keeper.wait(10)

    again = world.start()

    assert sorted(os.listdir(world.run_dir)) == ["journal.jsonl", "keeper.json", "keeper.sock", "rank", "work"]
    assert again.log_tail() == ""


def test_a_living_engines_run_directory_is_refused(world):
    world.start()

    with pytest.raises(AdmissionError, match="belongs to an engine that is running"):
        world.start()


def test_a_directory_with_other_things_in_it_is_refused_and_kept(private):
    private.run_dir.mkdir(mode=0o700)
    precious = private.run_dir / "thesis.txt"
    precious.write_text("text")

    with pytest.raises(AdmissionError, match=r"holds thesis\.txt"):
        private.start()

    assert precious.read_text() == "text"


def test_a_directory_that_others_may_write_is_refused(private):
    private.run_dir.mkdir()
    private.run_dir.chmod(0o777)

    with pytest.raises(AdmissionError, match="writable by nobody else"):
        private.start()


def test_a_directory_in_which_others_may_rename_is_refused(private):
    private.base.chmod(0o777)

    with pytest.raises(AdmissionError, match="not be writable by all"):
        private.start()

    assert os.listdir(private.base) == []


def test_what_a_dead_engine_left_can_be_discarded(private):
    keeper = private.start()
    private.serve(keeper)
    half = private.base / "half"
    half.mkdir()
    keeper.begin("capture", [remove(half)])
    with pytest.raises(AdmissionError, match="stop it first"):
        discard(private.run_dir)
    sigkill(keeper.guard_pid)
    assert keeper.wait(10)

    discard(private.run_dir)

    assert os.listdir(private.base) == []


def test_a_directory_that_is_none_of_ours_is_not_discarded(private):
    (private.base / "thesis.txt").touch()

    with pytest.raises(AdmissionError, match="not a run directory"):
        discard(private.base)

    assert os.listdir(private.base) == ["thesis.txt"]


def test_a_symbolic_link_is_no_run_directory(private):
    private.run_dir.symlink_to("/etc")

    with pytest.raises(AdmissionError, match="not a directory"):
        private.start()


def test_run_directories_may_have_long_names_and_lie_in_dev_shm(private):
    deep = private.base.joinpath(*["d" * 60] * 5)
    deep.mkdir(parents=True)

    keeper = private.start(deep / "engine")
    private.serve(keeper)
    keeper.close()
    again = Keeper.connect(deep / "engine")
    again.stop()

    assert os.listdir(deep) == []


def test_a_run_directory_below_dev_shm_is_shared_with_the_tree_all_the_same(private):
    run_dir = Path("/dev/shm", f"coldsnap-test-{private.tag}")

    keeper = private.start(run_dir)
    private.serve(keeper)
    keeper.stop()

    assert not run_dir.exists()


def test_fifty_cycles_leak_nothing(world):
    fds, table = os.listdir("/proc/self/fd"), mounts()

    for _ in range(50):
        keeper = world.start()
        keeper.spawn_engine(["sleep", "100"], env=world.env, cwd="/")
        keeper.stop(grace_s=1)
        keeper.close()

    assert len(os.listdir("/proc/self/fd")) == len(fds)
    assert mounts() == table
    assert os.listdir(world.base) == []
    assert not tagged(world.tag)


def test_a_missing_interpreter_is_named(private):
    with pytest.raises(StepError, match="/nonesuch/python"):
        private.start(python="/nonesuch/python")


def test_a_keeper_that_cannot_start_says_why(private):
    with pytest.raises(StepError, match="ended before it answered"):
        private.start(python="/bin/true")


def test_a_closed_connection_says_so(private):
    keeper = private.start()
    keeper.close()

    with pytest.raises(StepError, match="closed"):
        keeper.status()


def test_nobody_waits_for_ever(private):
    keeper = private.start()
    os.kill(keeper.keeper_pid, signal.SIGSTOP)
    try:
        with pytest.raises(StepTimeout, match="did not say hello"):
            Keeper.connect(private.run_dir, timeout_s=0.3)
    finally:
        os.kill(keeper.keeper_pid, signal.SIGCONT)
    assert keeper.status().state == "empty"


def test_sigterm_to_the_guard_ends_the_engine(world):
    keeper = world.start()
    world.serve(keeper)

    os.kill(keeper.guard_pid, signal.SIGTERM)

    assert keeper.wait(10)
    assert not tagged(world.tag)


def test_a_tree_that_signals_its_keeper_harms_nobody(private):
    keeper = private.start()
    script = "kill -USR1 1; kill -TERM 1; kill -INT 1; kill -KILL 1; echo done; sleep 100"
    keeper.spawn_engine(["sh", "-c", script], env=private.env, cwd="/")
    until(lambda: "done" in keeper.log_tail(), "its last word")

    assert keeper.status().state == "running"


def test_without_the_privilege_a_private_namespace_is_refused_and_host_works(private):
    process, answers = private.caller(
        "import ctypes\n"
        "PR_CAPBSET_DROP, CAP_SYS_ADMIN = 24, 21\n"
        "assert ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0) == 0\n"
        "try: Keeper.start(run_dir, namespace='private')\n"
        "except Exception as error: answers = [type(error).__name__, str(error)]\n"
        "keeper = Keeper.start(run_dir, namespace='host')\n"
        "script = 'grep -E \"Seccomp:|NoNewPrivs:\" /proc/self/status; sleep 100'\n"
        "keeper.spawn_engine(['sh', '-c', script], env=env, cwd='/')\n"
        "while 'Seccomp' not in keeper.log_tail(): time.sleep(.01)\n"
        "say([*answers, keeper.log_tail().split()])\n"
    )
    kind, sentence, status = answers
    Keeper.connect(private.run_dir).stop()
    kill(process)

    assert kind == "AdmissionError"
    assert "CAP_SYS_ADMIN" in sentence
    assert status == ["NoNewPrivs:", "1", "Seccomp:", "2"]


STOPPED_UNDER_TRACE = """
import ctypes, os, signal, time
from coldsnap.keeper.tree import Tree
child = os.fork()
if child == 0:
    ctypes.CDLL(None).ptrace(0, 0, 0, 0)  # PTRACE_TRACEME
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(7)
while "State:\\tt" not in open(f"/proc/{child}/status").read():
    time.sleep(0.01)
tree = Tree(private=False)
tree.root = child
tree.reap()
assert tree.exit is None, tree.exit
os.kill(child, signal.SIGKILL)
while tree.exit is None:
    tree.reap()
print(tree.exit)
"""


def test_a_child_that_stops_has_not_ended():
    ran = subprocess.run([sys.executable, "-c", STOPPED_UNDER_TRACE], capture_output=True, text=True, timeout=20)
    assert (ran.stdout, ran.stderr) == ("-9\n", "")
