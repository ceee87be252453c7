"""What a program finds when the keeper starts it."""

import json
import os
import signal
import sys

import pytest
from keeper_world import until

from coldsnap.errors import EngineError, StepError, StepTimeout

REPORT = """
import ctypes, errno, json, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
def ring():
    params = ctypes.create_string_buffer(256)
    result = libc.syscall(425, 1, params)  # io_uring_setup
    return "works" if result >= 0 else errno.errorcode[ctypes.get_errno()]
names = os.listdir("/proc/self/fd")  # its own descriptor is among them, and gone by now
fds = sorted(int(name) for name in names if os.path.lexists("/proc/self/fd/" + name))
os.umask(mask := os.umask(0))
print(json.dumps({
    "fds": fds, "stdio": [os.readlink(f"/proc/self/fd/{n}") for n in (0, 1, 2)], "append": bool(
        int(open("/proc/self/fdinfo/1").read().split("flags:")[1].split()[0], 8) & os.O_APPEND),
    "session": os.getsid(0) == os.getpid(), "cwd": os.getcwd(), "umask": mask, "ring": ring(),
    "env": dict(os.environ),
    "status": {words[0]: words[1] for words in map(str.split, open("/proc/self/status")) if len(words) == 2},
}), flush=True)
"""


def report(keeper, world, **options):
    keeper.spawn_engine([sys.executable, "-S", "-c", REPORT + "import time; time.sleep(100)"], **options)
    return json.loads(until(lambda: (text := keeper.log_path.read_text()).endswith("}\n") and text, "its report"))


def here():
    """The same report from a process of our own."""
    import subprocess

    return json.loads(subprocess.run([sys.executable, "-S", "-c", REPORT], capture_output=True, check=True).stdout)


def test_the_engine_inherits_nothing_but_its_stdio(world):
    keeper = world.start()

    found = report(keeper, world, env={**world.env, "X": "a\udcffb"}, cwd=str(world.base))

    assert found["fds"] == [0, 1, 2]
    assert found["stdio"] == ["/dev/null", f"{keeper.tree_dir}/engine.log", f"{keeper.tree_dir}/engine.log"]
    assert found["append"]
    assert found["session"]
    assert found["cwd"] == str(world.base)
    assert found["status"]["SigBlk:"] == "0" * 16
    assert (
        int(found["status"]["SigIgn:"], 16) & ~(1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1) == 0
    )  # Python's own
    assert found["umask"] == here()["umask"]
    assert found["env"]["COLDSNAP_DIRECTIVE"] == f"{keeper.tree_dir}/directive.json"
    assert found["env"]["TMPDIR"] == keeper.tmp_dir
    assert found["env"]["X"] == "a\udcffb"
    assert "HOME" not in found["env"]


def test_io_uring_is_denied_in_the_tree_and_nowhere_else(world):
    before = here()["ring"]
    keeper = world.start()

    found = report(keeper, world, env=world.env, cwd="/")
    helper = keeper.spawn_helper([sys.executable, "-S", "-c", REPORT], env=world.env, name="probe")
    keeper.wait_helper(helper, timeout_s=20)

    assert found["ring"] == "ENOSYS"
    assert found["status"]["Seccomp:"] == "2"
    assert json.loads((keeper.work_dir / "probe.log").read_text())["ring"] == before
    assert here()["ring"] == before


def test_io_uring_may_be_left_alone(world):
    keeper = world.start()

    found = report(keeper, world, env=world.env, cwd="/", deny_io_uring=False)

    assert found["ring"] == here()["ring"]
    assert found["status"]["Seccomp:"] == here()["status"]["Seccomp:"]


@pytest.mark.parametrize(
    ("argv", "cwd", "sentence"),
    [
        (["nonesuch-command"], "/", "'nonesuch-command': no such command on PATH=.*bin"),
        (["/nonesuch/command"], "/", "'/nonesuch/command': no such command"),
        (["/etc/passwd"], "/", "'/etc/passwd': Permission denied"),
        (["true"], "/nonesuch", "working directory /nonesuch: No such file"),
    ],
)
def test_a_program_that_cannot_start_is_reported_and_leaves_nothing(world, argv, cwd, sentence):
    keeper = world.start()

    with pytest.raises(EngineError, match=sentence):
        keeper.spawn_engine(argv, env=world.env, cwd=cwd)

    assert keeper.status().state == "empty"
    keeper.spawn_engine(["sleep", "100"], env=world.env, cwd="/")
    assert keeper.status().state == "running"


def test_a_script_whose_interpreter_is_missing_says_so(private):
    script = private.base / "serve"
    script.write_text("#!/nonesuch/python\n")
    script.chmod(0o755)
    keeper = private.start()

    with pytest.raises(EngineError, match="interpreter in its first line"):
        keeper.spawn_engine([str(script)], env=private.env, cwd="/")


def test_a_second_engine_is_refused(private):
    keeper = private.start()
    keeper.spawn_engine(["sleep", "100"], env=private.env, cwd="/")

    with pytest.raises(StepError, match="there is an engine already"):
        keeper.spawn_engine(["sleep", "100"], env=private.env, cwd="/")


def test_an_environment_larger_than_a_packet_arrives(private):
    keeper = private.start()
    many = {f"SERVICE_{number}": "x" * 1000 for number in range(300)}

    found = report(keeper, private, env={**private.env, **many}, cwd="/")

    assert many.items() <= found["env"].items()


def test_a_pid_floor_holds_in_a_private_namespace(private):
    keeper = private.start()
    helper = keeper.spawn_helper(["true"], env=private.env, name="early")

    assert helper < 100
    assert keeper.spawn_engine(["sleep", "100"], env=private.env, cwd="/", pid_floor=5000) == 5001


def test_a_helper_gets_its_descriptors_where_it_wants_them(world):
    keeper = world.start()
    first, second = os.pipe(), os.pipe()
    # Crossed on purpose: each is wanted where the other is.
    fds = {second[1]: first[1], first[1]: second[1], 99: first[1]}
    script = "echo one >&$A; echo two >&$B; echo three >&99; ls /proc/self/fd; exit 5"
    env = {**world.env, "A": str(second[1]), "B": str(first[1])}

    pid = keeper.spawn_helper(["bash", "-c", script], env=env, name="crossed", fds=fds)
    status = keeper.wait_helper(pid, timeout_s=10)

    assert os.read(first[0], 100) == b"one\nthree\n"
    assert os.read(second[0], 100) == b"two\n"
    assert status == 5
    listed = {int(line) for line in (keeper.work_dir / "crossed.log").read_text().split()}
    assert listed == {0, 1, 2, 3, 99, first[1], second[1]}  # ls has one of its own
    for fd in (*first, *second):
        os.close(fd)


def test_helpers_are_no_part_of_the_tree(world):
    keeper = world.start()
    keeper.spawn_engine(["sleep", "100"], env=world.env, cwd="/")
    keeper.spawn_helper(["sh", "-c", "sleep 200 & sleep 300"], env=world.env, name="beside")

    keeper.signal(signal.SIGSTOP, whom="tree")

    assert [process.comm for process in keeper.tree()] == ["sleep"]
    until(lambda: keeper.status().state == "stopped", "the freeze")
    assert keeper.stop() == keeper_exit(signal.SIGKILL)


def keeper_exit(number):
    from coldsnap.keeper.client import Exit

    return Exit(signal=number)


def test_waiting_for_a_helper_has_an_end_and_leaves_the_connection_free(private):
    import threading

    keeper = private.start()
    pid = keeper.spawn_helper(["sleep", "100"], env=private.env, name="slow")
    late = []
    thread = threading.Thread(
        target=lambda: late.append(pytest.raises(StepTimeout, keeper.wait_helper, pid, timeout_s=0.5))
    )
    thread.start()

    assert keeper.status().state == "empty"
    thread.join()

    assert "still runs after 0.5 s" in str(late[0].value)
    with pytest.raises(StepError, match="no helper"):
        keeper.wait_helper(1, timeout_s=1)


def test_a_signalled_helper_has_a_negative_status(private):
    keeper = private.start()
    pid = keeper.spawn_helper(["sh", "-c", "kill -TERM $$"], env=private.env, name="suicide")

    assert keeper.wait_helper(pid, timeout_s=10) == -signal.SIGTERM


def test_a_helpers_child_can_be_adopted_and_is_the_engine_then(world):
    keeper = world.start()
    # As CRIU does it: the restored root becomes a child of the keeper.
    helper = keeper.spawn_helper(["sh", "-c", "sleep 100 & echo $!"], env=world.env, name="restore")
    assert keeper.wait_helper(helper, timeout_s=10) == 0
    root = int((keeper.work_dir / "restore.log").read_text())

    keeper.adopt(root)

    assert keeper.status().root_pid == root
    assert [process.pid for process in keeper.tree()] == [root]
    with pytest.raises(StepError, match="there is an engine already"):
        keeper.adopt(root)
    keeper.stop()


def test_what_is_no_child_or_is_dead_cannot_be_adopted(world):
    keeper = world.start()
    living = keeper.spawn_helper(["sleep", "100"], env=world.env, name="living")
    helper = keeper.spawn_helper(["sh", "-c", "(sleep 0.1; exit 9) & echo $!"], env=world.env, name="dying")
    keeper.wait_helper(helper, timeout_s=10)
    dead = int((keeper.work_dir / "dying.log").read_text())

    until(lambda: str(dead) not in os.listdir(keeper.proc_fd), "its end")

    with pytest.raises(EngineError, match="exit status 9"):
        keeper.adopt(dead)
    with pytest.raises(EngineError, match="is a helper"):
        keeper.adopt(living)
    with pytest.raises(EngineError, match="is gone"):
        keeper.adopt(30000)
