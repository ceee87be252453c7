"""What goes wrong leaves what was there: a dump its workload serving, a thaw nothing at all."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest
from drivers_lab import ask

from coldsnap.drivers import n610
from coldsnap.drivers.criu import Criu
from coldsnap.errors import AdmissionError, DriverError, IntegrityError, StepTimeout

pytestmark = pytest.mark.criu


def gone(run_dir):
    """Neither the run directory nor a process that has it in its environment is left."""
    found = subprocess.run(["pgrep", "-f", str(run_dir)], capture_output=True, text=True, timeout=10).stdout.split()
    return not run_dir.exists() and not found


def memory_disk(lab, size):
    path = lab.capsule()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)], check=True, timeout=10)
    lab.stack.callback(subprocess.run, ["umount", str(path)], check=True, timeout=10)
    return path


def test_a_disk_that_fills_up_under_the_images_leaves_the_workload_serving(lab):
    keeper, port = lab.launch(memory_mib=16)
    with pytest.raises(DriverError) as caught:
        lab.dump(keeper, capsule=memory_disk(lab, "4m"))
    assert caught.value.log_tail
    assert ask(port)
    assert {process.state for process in keeper.tree()} == {"S"}
    capsule, _ = lab.dump(keeper)
    lab.stop(keeper)
    lab.restore(capsule)
    assert ask(port)


def test_a_disk_that_fills_up_under_the_volatile_files_leaves_the_workload_serving(lab):
    keeper, port = lab.launch(fill_shm_mib=40)
    with pytest.raises(OSError, match="No space left on device"):
        lab.dump(keeper, capsule=memory_disk(lab, "48m"))
    assert ask(port)
    lab.dump(keeper)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("io_uring", r"process \d+ \(python.*\), descriptor \d+: an io_uring ring; start the engine under the keeper"),
        ("userfaultfd", r"descriptor \d+: a userfaultfd"),
        ("pty", r"descriptor \d+: a terminal; start the engine with stdin from /dev/null"),
        ("huge_ghost", r"an unlinked file of 134217729 bytes, .*, above the limit of 134217728"),
    ],
)
def test_what_cannot_be_dumped_is_named_before_anything_is_frozen(lab, option, words):
    keeper, port = lab.launch(deny_io_uring=False, **{option: True})
    began = time.monotonic()
    with pytest.raises(AdmissionError, match=words) as caught:
        lab.dump(keeper)
    assert time.monotonic() - began < 1
    assert str(keeper.status().root_pid) in caught.value.mismatches[0]
    assert ask(port)


def test_a_tree_that_was_denied_io_uring_has_none(lab):
    keeper, port = lab.launch(io_uring=True)
    assert ask(port)["held"] == "[-1]"
    assert n610.prepare_dump(keeper).obstacles == ()


def test_a_connection_to_a_peer_outside_the_tree_is_named_with_its_address(lab):
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        keeper, port = lab.launch(external=server.getsockname()[1])
        with pytest.raises(AdmissionError, match=rf"with 127.0.0.1:{server.getsockname()[1]}, outside the tree"):
            lab.dump(keeper)
        assert ask(port)


def test_a_client_that_is_just_leaving_is_waited_for(lab):
    keeper, port = lab.launch()
    client = socket.create_connection(("127.0.0.1", port))
    threading.Timer(0.3, client.close).start()
    lab.dump(keeper)


def test_a_unix_socket_to_a_process_outside_the_tree_is_named(lab, tmp_path):
    with closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind(str(tmp_path / "outside"))
        server.listen()
        keeper, port = lab.launch(unix=str(tmp_path / "outside"))
        with pytest.raises(AdmissionError, match=r"descriptor \d+: a Unix socket .* outside the tree"):
            n610.prepare_dump(keeper)
        assert ask(port)


def test_a_client_of_a_unix_socket_that_waits_outside_is_named(lab, tmp_path):
    keeper, port = lab.launch("host")
    path = next((keeper.rank_dir / "tmp").glob("*/ipc"))
    with closing(socket.socket(socket.AF_UNIX)) as client:
        client.connect(str(path))
        with pytest.raises(AdmissionError, match="outside the tree waits to be accepted"):
            n610.prepare_dump(keeper)
    assert ask(port)


def test_a_process_under_a_debugger_is_named(lab):
    keeper, port = lab.launch("host")  # a tracer outside the tree's pid namespace has no number in it
    libc = ctypes.CDLL(None)
    seize, detach = 0x4206, 17
    pid = keeper.status().root_pid
    assert libc.ptrace(seize, pid, None, None) == 0
    try:
        with pytest.raises(AdmissionError, match="it is traced by process"):
            n610.prepare_dump(keeper)
    finally:
        os.kill(pid, signal.SIGSTOP)  # a tracee must stand still to be let go
        os.waitpid(pid, 0x40000000)
        libc.ptrace(detach, pid, None, None)
        os.kill(pid, signal.SIGCONT)
    assert ask(port)


@pytest.mark.parametrize("timeout_s", [0.01, 0.06])
def test_a_dump_past_its_deadline_ends_and_the_workload_serves(lab, timeout_s):
    keeper, port = lab.launch(memory_mib=96)
    with pytest.raises((StepTimeout, DriverError)) as caught:
        lab.dump(keeper, timeout_s=timeout_s)
    assert isinstance(caught.value, StepTimeout)
    assert ask(port)
    assert {process.state for process in keeper.tree()} == {"S"}
    lab.dump(keeper)


def test_an_interrupt_while_frozen_undoes_the_dump(lab):
    keeper, port = lab.launch()

    class Interrupting:
        """A keeper whose user loses patience when the volatile files are to be copied."""

        def __getattr__(self, name):
            if name == "private":
                raise KeyboardInterrupt
            return getattr(keeper, name)

    with pytest.raises(KeyboardInterrupt):
        n610.dump_tree(Interrupting(), lab.criu, lab.capsule(), leave="stopped", timeout_s=30)
    assert ask(port)
    assert {process.state for process in keeper.tree()} == {"S"}


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.06])
def test_a_criu_that_is_killed_is_told_and_leaves_nothing_frozen(lab, after_s):
    keeper, port = lab.launch(memory_mib=96)

    def kill():
        while not (keeper.work_dir / "dump.log").exists():
            time.sleep(0.002)
        time.sleep(after_s)
        command = ["pkill", "-KILL", "-P", str(keeper.keeper_pid), "-x", "criu"]
        assert subprocess.run(command, timeout=10).returncode == 0

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(DriverError, match="criu dump failed: its process ended without an answer"):
        lab.dump(keeper)
    killer.join()
    # A process that ran CRIU's parasite when its tracer was killed may crash, and nobody can help it (docs/drivers.md):
    # what must hold is that nothing stands still, and that the tree can be stopped.
    assert not {process.state for process in keeper.tree()} & {"T", "t"}


@pytest.mark.parametrize("after_s", [0.05, 0.15, 0.3, 0.45])
def test_a_caller_that_is_killed_leaves_the_workload_serving(lab, after_s):
    keeper, port = lab.launch(memory_mib=64)
    before = ask(port)
    code = """
import sys
from pathlib import Path
from coldsnap.drivers import n610
from coldsnap.keeper.client import Keeper
from coldsnap.keeper.undo import CONTINUE
keeper = Keeper.connect(sys.argv[1])
keeper.begin("capture", [CONTINUE])
print("begun", flush=True)
n610.dump_tree(keeper, sys.argv[2], Path(sys.argv[3]), leave="stopped", timeout_s=30)
sys.stdin.read()
"""
    caller = subprocess.Popen(
        [sys.executable, "-c", code, str(keeper.run_dir), lab.criu, str(lab.capsule())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    caller.stdout.readline()
    time.sleep(after_s)
    caller.kill()
    caller.communicate(timeout=10)
    after = ask(port)
    assert after["digest"] == before["digest"]
    deadline = time.monotonic() + 30
    while keeper.status().operation and time.monotonic() < deadline:
        time.sleep(0.05)
    assert {process.state for process in keeper.tree()} == {"S"}
    lab.dump(keeper)


@pytest.mark.parametrize("image", ["pages-1.img", "core-601.img", "pstree.img"])
def test_a_truncated_image_is_refused_by_name_and_leaves_nothing(lab, image):
    keeper, port = lab.launch()
    capsule, _ = lab.dump(keeper)
    lab.stop(keeper)
    path = capsule / "images" / image
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(IntegrityError, match=f"{image}: an image file is not whole"):
        lab.restore(capsule)
    nothing_is_left(lab.keepers[-1], port)


@pytest.mark.parametrize("image", ["core-601.img", "inventory.img", "mm-603.img"])
def test_an_image_of_garbage_fails_with_the_reason_of_criu_and_leaves_nothing(lab, image):
    keeper, port = lab.launch()
    capsule, _ = lab.dump(keeper)
    lab.stop(keeper)
    path = capsule / "images" / image
    path.write_bytes(b"\xa5" * path.stat().st_size)
    with pytest.raises(DriverError, match=r"criu restore failed: .*Error \(") as caught:
        lab.restore(capsule)
    assert "Error (" in caught.value.log_tail
    assert "RLIMIT_NOFILE" not in str(caught.value)
    nothing_is_left(lab.keepers[-1], port)


def nothing_is_left(keeper, port):
    assert keeper.wait(10)
    assert gone(keeper.run_dir)
    with pytest.raises(OSError), closing(socket.create_connection(("127.0.0.1", port), timeout=1)):
        pass


def test_a_thaw_past_its_deadline_leaves_nothing(lab):
    keeper, _ = lab.launch(memory_mib=128)
    capsule, dumped = lab.dump(keeper)
    lab.stop(keeper)
    keeper = lab.keeper()
    with pytest.raises(StepTimeout, match="criu restore did not end within"):
        staged = n610.stage_tree(keeper, capsule, rebind=None)
        n610.thaw_tree(keeper, lab.criu, staged, timeout_s=0.03)
    left = set(os.listdir(keeper.proc_fd)) & set(map(str, dumped.pids))
    deadline = time.monotonic() + 5
    while left and time.monotonic() < deadline:
        left = set(os.listdir(keeper.proc_fd)) & set(map(str, dumped.pids))
    assert not left
    assert not [name for name in os.listdir(keeper.shm_fd) if name != "coldsnap"]
    again, _ = lab.restore(capsule)
    assert again.status().state == "running"


def test_an_executable_that_is_no_criu_is_an_error_that_names_it(tmp_path):
    with pytest.raises(DriverError, match="/nowhere/criu"):
        Criu("/nowhere/criu").version()
    with pytest.raises(DriverError, match="criu version failed: its process ended without an answer"):
        Criu("/bin/true").version()


def test_criu_says_its_version_and_features_and_checks_the_kernel(criu):
    command = Criu(criu)
    assert command.version() >= (4, 2, 0)
    assert command.features().lazy_pages
    command.check()
