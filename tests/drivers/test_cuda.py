"""CUDA through the helper: order, deadlines, state checks and rollback, with a driver that has no device."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_cuda import FakeDriver

from coldsnap.drivers.cuda import CudaHelper
from coldsnap.drivers.cuda_driver import CudaFailure
from coldsnap.drivers.cuda_helper import serve
from coldsnap.errors import DriverError, StepTimeout

A = B = C = 0  # pids of processes that exist: a rollback continues them
SLEEPERS = []


def setup_module():
    global A, B, C
    SLEEPERS.extend(subprocess.Popen(["sleep", "600"]) for _ in range(3))
    A, B, C = (sleeper.pid for sleeper in SLEEPERS)


def teardown_module():
    for sleeper in SLEEPERS:
        sleeper.kill()
        sleeper.wait(10)


class Here:
    """A spawner whose helpers are threads of the test."""

    def __init__(self, driver):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.send(b'{"ok": true, "pid": 1}')
        self.problems = []

        def run():
            with theirs:
                self.problems += serve(theirs, driver)

        self.thread = threading.Thread(target=run)
        self.thread.start()
        self.helper = CudaHelper(self, ours, 1)
        self.proc_fd = -1

    def wait_helper(self, pid, *, timeout_s):
        self.thread.join(timeout_s)
        if self.thread.is_alive():
            raise TimeoutError
        return 0


@pytest.fixture
def start():
    started = []

    def start(driver):
        started.append(Here(driver))
        return started[-1].helper

    yield start
    for here in started:
        here.helper._connection.close()
        here.thread.join(5)


def running(**changes):
    return FakeDriver({A: "running", B: "running", C: "running"}, **changes)


def test_all_are_locked_before_any_is_checkpointed_and_restored_before_any_is_unlocked(start):
    driver = running()
    helper = start(driver)
    helper.lock([C, B, A], timeout_s=5)
    helper.checkpoint(timeout_s=5)
    assert helper.states([A, B, C]) == ("checkpointed",) * 3
    helper.restore([C, B, A], timeout_s=5)
    helper.unlock(timeout_s=5)
    helper.close()
    assert driver.calls == [(op, pid) for op in ("lock", "checkpoint", "restore", "unlock") for pid in (C, B, A)]
    assert set(driver.states.values()) == {"running"}


@pytest.mark.parametrize("op", ["lock", "checkpoint"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_refusal_anywhere_brings_every_process_back_last_first(start, op, number):
    pid = (A, B, C)[number]
    driver = running(faults={(op, pid): CudaFailure("cuCheckpointProcess: not supported (801)", status=801)})
    helper = start(driver)
    with pytest.raises(DriverError, match=rf"CUDA {op} failed: .*not supported \(801\)") as caught:
        helper.lock([C, B, A], timeout_s=5)
        helper.checkpoint(timeout_s=5)
    assert caught.value.status == 801
    assert set(driver.states.values()) == {"running"}
    unlocked = [found for call, found in driver.calls if call == "unlock"]
    locked = [found for found in (A, B, C) if ("lock", found) in driver.calls and (op, found) != ("lock", pid)]
    assert unlocked == locked


def test_a_helper_whose_socket_closes_brings_every_process_back(start):
    driver = running()
    helper = start(driver)
    helper.lock([C, B, A], timeout_s=5)
    helper.checkpoint(timeout_s=5)
    helper.close()
    assert driver.calls[6:] == [(op, pid) for pid in (A, B, C) for op in ("restore", "unlock")]


def test_what_was_released_is_left_alone(start):
    driver = running()
    helper = start(driver)
    helper.lock([A], timeout_s=5)
    helper.checkpoint(timeout_s=5)
    helper.release()
    helper.close()
    assert driver.states[A] == "checkpointed"


def test_a_process_in_another_state_is_named_before_anything_is_done(start):
    driver = FakeDriver({A: "checkpointed", B: "running"})
    helper = start(driver)
    with pytest.raises(DriverError, match=f"process {B} is running before the restore, expected checkpointed"):
        helper.restore([A, B], timeout_s=5)
    assert ("restore", A) not in driver.calls[:1] or driver.states[A] == "checkpointed"


def test_a_process_that_ends_up_failed_is_named(start):
    driver = running(faults={("checkpoint", B): "failed"})
    helper = start(driver)
    helper.lock([B, A], timeout_s=5)
    with pytest.raises(DriverError, match=f"process {B} is failed after the checkpoint, expected checkpointed"):
        helper.checkpoint(timeout_s=5)
    assert driver.states[A] == "running"


def test_a_slow_process_is_named_when_the_deadline_has_passed(start):
    driver = running(faults={("checkpoint", C): 0.3})
    helper = start(driver)
    helper.lock([C, B], timeout_s=5)
    with pytest.raises(DriverError, match=f"the deadline passed before the checkpoint of process {B}"):
        helper.checkpoint(timeout_s=0.2)
    assert set(driver.states.values()) == {"running"}


def test_a_call_that_hangs_ends_in_a_timeout_and_the_processes_run_again(start):
    driver = running(faults={("checkpoint", C): 1.0})
    helper = start(driver)
    helper.margin_s = 0.1
    helper.lock([C], timeout_s=5)
    with pytest.raises(StepTimeout, match="the CUDA checkpoint did not end within"):
        helper.checkpoint(timeout_s=0.1)
    assert driver.states[C] == "running"


def test_a_device_without_enough_free_memory_is_refused_before_anything_moves(start):
    driver = FakeDriver({A: "checkpointed"}, free_bytes=(80 << 30, 5 << 30))
    helper = start(driver)
    with pytest.raises(DriverError, match=rf"device 1 has {5 << 30} bytes free, the captured processes need {6 << 30}"):
        helper.restore([A], timeout_s=5, needs_bytes=(1 << 30, 6 << 30))
    with pytest.raises(DriverError, match="device 2 has 0 bytes free"):
        helper.restore([A], timeout_s=5, needs_bytes=(0, 0, 1))
    assert driver.calls == []
    helper.restore([A], timeout_s=5, needs_bytes=(1 << 30, 5 << 30))


def test_dead_processes_need_no_rollback_and_living_ones_that_cannot_be_helped_are_named():
    dead = subprocess.Popen(["true"])
    dead.wait(10)
    own = os.getpid()
    driver = FakeDriver({own: "running", dead.pid: "running"})
    here = Here(driver)
    here.helper.lock([own, dead.pid], timeout_s=5)
    driver.states[own] = "failed"
    del driver.states[dead.pid]
    here.helper.close()
    assert here.problems == [f"process {own}: it is failed, and the driver has no way back"]


class TestUnderAKeeper:
    """The helper as a process, beside a real tree."""

    pytestmark = pytest.mark.criu

    def environment(self, lab, *pids):
        return {
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
            "FAKE_CUDA_PIDS": " ".join(map(str, pids)),
            "FAKE_CUDA_LOG": str(lab.directory / "cuda.log"),
        }

    def start(self, lab, keeper, *pids):
        return CudaHelper.start(keeper, environment=self.environment(lab, *pids), driver="fake_cuda:open_driver")

    @pytest.mark.parametrize("namespace", ["private", "host"])
    def test_a_stopped_tree_whose_caller_gives_up_runs_again(self, lab, namespace):
        keeper, _ = lab.launch(namespace)
        pids = [process.pid for process in keeper.tree()]
        helper = self.start(lab, keeper, *pids)
        helper.lock(pids[::-1], timeout_s=20)
        helper.checkpoint(timeout_s=20)
        keeper.signal(19, whom="tree")
        helper.close()
        assert {process.state for process in keeper.tree()} == {"S"}
        log = (lab.directory / "cuda.log").read_text().splitlines()
        expected = [f"{op} {pid}" for op in ("lock", "checkpoint") for pid in pids[::-1]]
        assert log == expected + [f"{op} {pid}" for pid in pids for op in ("restore", "unlock")]

    def test_a_killed_caller_leaves_nothing_locked(self, lab):
        keeper, _ = lab.launch()
        pids = [process.pid for process in keeper.tree()]
        code = f"""
import sys
from coldsnap.drivers.cuda import CudaHelper
from coldsnap.keeper.client import Keeper
keeper = Keeper.connect(sys.argv[1])
helper = CudaHelper.start(keeper, environment={self.environment(lab, *pids)!r}, driver="fake_cuda:open_driver")
helper.lock({pids!r}, timeout_s=20)
print("locked", flush=True)
sys.stdin.read()
"""
        command = [sys.executable, "-c", code, str(keeper.run_dir)]
        caller = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert caller.stdout.readline() == b"locked\n"
        caller.kill()
        caller.communicate(timeout=10)
        log = lab.directory / "cuda.log"
        deadline = time.monotonic() + 20
        while log.read_text().count("unlock") < len(pids) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert log.read_text().splitlines()[len(pids) :] == [f"unlock {pid}" for pid in pids[::-1]]

    def test_a_host_without_a_driver_is_said_so(self, lab):
        keeper, _ = lab.launch()
        environment = self.environment(lab) | {"FAKE_CUDA_ABSENT": "the NVIDIA driver cannot be loaded"}
        helper = CudaHelper.start(keeper, environment=environment, driver="fake_cuda:open_driver")
        with pytest.raises(DriverError, match="CUDA start failed: the NVIDIA driver cannot be loaded"):
            helper.lock([601], timeout_s=20)
        helper = CudaHelper.start(keeper, environment=environment, driver="no_such_module:open_driver")
        with pytest.raises(DriverError, match="CUDA start failed: No module named 'no_such_module'"):
            helper.lock([601], timeout_s=20)
