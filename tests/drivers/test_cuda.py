"""CUDA through the helper: order, deadlines, state checks and rollback, with a driver that has no device."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from attrs import evolve
from drivers_lab import ask
from fake_cuda import FakeDriver, uuid

from coldsnap import accelerating
from coldsnap.drivers.cuda import CONTEXT_BYTES, CudaHelper
from coldsnap.drivers.cuda_driver import CudaFailure, restore_arguments
from coldsnap.drivers.cuda_helper import serve
from coldsnap.drivers.devices import moves_to, needs_by_ordinal, with_hydration
from coldsnap.drivers.tree_record import TREE, HeldDevice, TreeRecord, read_tree_record, write_tree_record
from coldsnap.errors import DriverError, FormatError, StepTimeout
from coldsnap.host.facts import GpuFacts
from coldsnap.keeper.undo import CONTINUE
from coldsnap.session import Session, bring_back
from coldsnap.steps import CheckpointCuda, LockCuda, RestoreCuda

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


def test_what_a_device_must_have_free_is_seen_when_its_processes_let_go_of_it(start):
    held = {A: (3 << 30, 0, 1 << 20), B: (1 << 30, 0, 0)}
    helper = start(running(free_bytes=(5 << 30, 6 << 30, 7 << 30), held=held))

    helper.lock([B, A], timeout_s=5)
    helper.checkpoint(timeout_s=5)

    assert helper.held == (HeldDevice(uuid=uuid(0), needs_bytes=4 << 30),)


def test_free_memory_that_was_measured_ahead_is_what_a_restore_goes_by(start):
    driver = FakeDriver({A: "checkpointed"}, free_bytes=(5 << 30,))
    helper = start(driver)
    helper.measure_ahead()
    helper.devices()
    driver.free_bytes = (1 << 30,)

    helper.restore([A], timeout_s=5, needs_bytes=(4 << 30,))

    assert driver.states[A] == "locked"


def test_what_a_context_of_the_helper_takes_while_it_looks_is_not_held_against_a_restore(start):
    helper = start(FakeDriver({A: "checkpointed"}, free_bytes=(5 << 30,)))
    with pytest.raises(DriverError, match="device 0 has"):
        helper.restore([A], timeout_s=5, needs_bytes=((5 << 30) + CONTEXT_BYTES + 1,))

    helper.restore([A], timeout_s=5, needs_bytes=((5 << 30) + CONTEXT_BYTES,))


def test_a_restore_to_another_device_names_both_to_the_driver(start):
    driver = FakeDriver({A: "checkpointed", B: "checkpointed"})
    helper = start(driver)

    helper.restore([B, A], timeout_s=5, moves=((uuid(0), uuid(1)),))

    assert driver.moves == [[(uuid(0), uuid(1))]] * 2


def test_a_rollback_of_a_restore_goes_to_the_same_devices(start):
    driver = FakeDriver(
        {A: "checkpointed", B: "checkpointed"},
        faults={("restore", A): CudaFailure("cuCheckpointProcessRestore: out of memory (2)", status=2)},
    )
    helper = start(driver)

    with pytest.raises(DriverError, match="out of memory"):
        helper.restore([B, A], timeout_s=5, moves=((uuid(0), uuid(1)),))

    assert set(driver.states.values()) == {"running"}
    assert driver.moves == [[(uuid(0), uuid(1))]] * 3


def test_a_process_of_which_the_driver_knows_nothing_is_told_apart_from_one_that_runs(start):
    helper = start(FakeDriver({A: "running"}))

    assert helper.probe([A, B]) == ("running", None)


def test_the_bindings_get_both_uuids_of_every_move_byte_by_byte():
    from cuda.bindings import driver as api

    old, new = "GPU-00112233-4455-6677-8899-aabbccddeeff", "GPU-ffeeddcc-bbaa-9988-7766-554433221100"

    arguments = restore_arguments(api, [(old, new), (new, old)])

    pairs = [(bytes(pair.oldUuid.bytes).hex(), bytes(pair.newUuid.bytes).hex()) for pair in arguments.gpuPairs]
    assert pairs == [
        ("00112233445566778899aabbccddeeff", "ffeeddccbbaa99887766554433221100"),
        ("ffeeddccbbaa99887766554433221100", "00112233445566778899aabbccddeeff"),
    ]
    assert arguments.gpuPairsCount == 2
    assert restore_arguments(api, ()) is None


HELD = (HeldDevice(uuid=uuid(0), needs_bytes=4), HeldDevice(uuid=uuid(1), needs_bytes=6))


@pytest.mark.parametrize(
    ("placed", "present", "chosen", "moves"),
    [
        ((0, 1), (0, 1), False, ()),  # where it was
        ((0, 1), (0, 1), True, ()),
        ((2, 3), (0, 1, 2, 3), False, ()),  # nobody chose: where it was
        ((2, 3), (0, 1, 2, 3), True, ((0, 2), (1, 3))),
        ((1, 0), (0, 1), True, ((0, 1), (1, 0))),
        ((8, 9), (8, 9), False, ((0, 8), (1, 9))),  # another machine
        ((8, 1), (1, 8), False, ((0, 8), (1, 1))),  # every device, also the one that stays
    ],
)
def test_devices_take_the_place_of_those_of_the_capture_where_somebody_chose_them_or_those_are_not_there(
    placed, present, chosen, moves
):
    found = moves_to(HELD, list(map(uuid, placed)), present=set(map(uuid, present)), chosen=chosen)

    assert found == tuple((uuid(old), uuid(new)) for old, new in moves)


def test_fewer_devices_than_the_capture_had_memory_on_are_refused():
    with pytest.raises(DriverError, match=r"memory on 2 devices .*, 1 are placed: name as many in placement.devices"):
        moves_to(HELD, [uuid(2)], present={uuid(2)}, chosen=True)


def test_needs_are_counted_for_the_devices_that_are_restored_to_in_the_order_of_the_driver():
    devices = [uuid(number) for number in range(4)]

    assert needs_by_ordinal(HELD, (), devices) == (4, 6, 0, 0)
    assert needs_by_ordinal(HELD, ((uuid(0), uuid(3)), (uuid(1), uuid(2))), devices) == (0, 0, 6, 4)
    with pytest.raises(DriverError, match=f"the device {uuid(1)} is not visible to the CUDA helper"):
        needs_by_ordinal(HELD, (), [uuid(0)])


class TestRecord:
    """The devices of a capture in ``tree.json``."""

    @pytest.fixture
    def capsule_fd(self, tmp_path):
        fd = os.open(tmp_path, os.O_DIRECTORY | os.O_RDONLY)
        yield fd
        os.close(fd)

    def test_devices_are_read_as_written(self, capsule_fd):
        record = TreeRecord(nvidia_pids=(7,), image_bytes={"a.img": 1}, devices=HELD)
        write_tree_record(capsule_fd, record)

        assert read_tree_record(capsule_fd) == record

    def test_a_record_without_devices_is_one_of_before(self, capsule_fd, tmp_path):
        record = TreeRecord(nvidia_pids=(), image_bytes={})
        write_tree_record(capsule_fd, record)

        assert json.loads((tmp_path / TREE).read_text()) == {"format": 1, "nvidia_pids": [], "image_bytes": {}}
        assert read_tree_record(capsule_fd) == record

    @pytest.mark.parametrize(
        "devices",
        [
            {},
            [7],
            [{"uuid": uuid(0)}],
            [{"uuid": "0", "needs_bytes": 1}],
            [{"uuid": uuid(0), "needs_bytes": -1}],
            [{"uuid": uuid(0), "needs_bytes": True}],
            [{"uuid": uuid(0), "needs_bytes": 1}] * 2,
        ],
    )
    def test_strange_devices_are_refused_with_their_rule(self, capsule_fd, tmp_path, devices):
        (tmp_path / TREE).touch(mode=0o600)
        document = {"format": 1, "nvidia_pids": [], "image_bytes": {}, "devices": devices}
        (tmp_path / TREE).write_text(json.dumps(document))

        with pytest.raises(FormatError) as refused:
            read_tree_record(capsule_fd)

        assert refused.value.rule == "tree.3"


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


class Scene(SimpleNamespace):
    """As much of a session as the CUDA steps look at."""

    need = Session.need


GPU = GpuFacts(index=0, uuid=uuid(0), name="G", compute_capability="9.0", memory_bytes=1, capacity_class_bytes=1)


class TestSteps:
    """The CUDA steps of a plan."""

    def restore(self, helper, *, here, placed, chosen, artifact=None):
        thawed = SimpleNamespace(nvidia_pids=(B, A), devices=(HeldDevice(uuid=uuid(0), needs_bytes=3 << 30),))
        gpus = tuple(evolve(GPU, index=index, uuid=uuid(number)) for index, number in enumerate(here))
        session = Scene(cuda=helper, thawed=thawed, host=SimpleNamespace(gpus=gpus), artifact=artifact)
        step = RestoreCuda(id="restore-cuda", devices=placed, timeout_s=5, chosen=chosen)
        return accelerating.restore(session, step)

    def test_a_restore_goes_to_the_device_that_the_placement_names(self, start):
        driver = FakeDriver({A: "checkpointed", B: "checkpointed"}, free_bytes=(1 << 30, 5 << 30))

        receipt = self.restore(start(driver), here=(0, 1), placed=(1,), chosen=True)

        assert driver.moves == [[(uuid(0), uuid(1))]] * 2
        assert receipt.effective == "2 processes restored"
        assert receipt.reason == f"{uuid(0)} to {uuid(1)}"
        assert receipt.bytes == 3 << 30

    def test_a_restore_that_nobody_placed_goes_where_the_capture_was(self, start):
        driver = FakeDriver({A: "checkpointed", B: "checkpointed"}, free_bytes=(5 << 30, 5 << 30))

        receipt = self.restore(start(driver), here=(1, 0), placed=(0,), chosen=False)

        assert driver.moves == [[]] * 2
        assert receipt.reason == ""

    def test_a_restore_that_does_not_fit_is_refused_with_both_figures_and_nothing_is_moved(self, start):
        driver = FakeDriver({A: "checkpointed", B: "checkpointed"}, free_bytes=(5 << 30, 1 << 30))

        with pytest.raises(DriverError, match=f"device 1 has {1 << 30} bytes free, .* need {3 << 30}"):
            self.restore(start(driver), here=(0, 1), placed=(1,), chosen=True)

        assert driver.calls == []

    def test_what_workers_will_map_later_must_be_free_too(self, start):
        driver = FakeDriver({A: "checkpointed", B: "checkpointed"}, free_bytes=(1 << 30, 4 << 30))
        worker = SimpleNamespace(worker="worker-0", residual=SimpleNamespace(bytes=1 << 30), hibernate_state=None)
        packs = SimpleNamespace(objects=(SimpleNamespace(worker="worker-0", bytes=1 << 30),))
        weights = SimpleNamespace(payloads=packs, workers=(worker,))
        artifact = SimpleNamespace(descriptor=SimpleNamespace(weights=weights))

        with pytest.raises(DriverError, match=f"device 1 has {4 << 30} bytes free, .* need {5 << 30}"):
            self.restore(start(driver), here=(0, 1), placed=(1,), chosen=True, artifact=artifact)

        assert driver.calls == []

    def test_each_worker_maps_on_its_own_device(self):
        devices = tuple(HeldDevice(uuid=uuid(number), needs_bytes=number) for number in (1, 2))

        assert [each.needs_bytes for each in with_hydration(devices, (10, 20))] == [11, 22]
        assert [each.needs_bytes for each in with_hydration(devices[:1], (10, 20))] == [31]
        assert with_hydration(devices, ()) == devices == with_hydration(devices, (1, 2, 3))


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

    @pytest.fixture
    def device(self):
        """A node with a name of NVIDIA's, behind which is nothing."""
        path = f"/dev/nvidia-test{os.getpid()}"
        os.mknod(path, 0o20600, os.makedev(1, 3))
        yield path
        os.unlink(path)

    def test_a_process_without_cuda_that_holds_a_device_open_is_left_out_of_the_lock(self, lab, device):
        keeper, port = lab.launch(nvidia=device)
        session = Scene(cuda=self.start(lab, keeper), living=keeper)

        receipt = accelerating.lock(session, LockCuda(id="lock-cuda", devices=(0,), timeout_s=20))

        assert (receipt.effective, receipt.reason) == ("0 processes locked", "1 hold devices open without CUDA")
        session.cuda.close()
        assert ask(port)

    def test_a_process_with_cuda_of_which_the_driver_knows_nothing_is_named_and_nothing_is_locked(self, lab, device):
        with open("/proc/self/maps") as maps:
            library = next(line.split()[-1] for line in maps if "/libm." in line)
        keeper, port = lab.launch(
            nvidia=device, library=shutil.copy(library, lab.directory / "libcuda.so.1").as_posix()
        )
        root = keeper.status().root_pid
        session = Scene(cuda=self.start(lab, keeper), living=keeper)

        with pytest.raises(
            DriverError, match=f"the processes {root} have loaded libcuda, but the driver knows nothing"
        ):
            accelerating.lock(session, LockCuda(id="lock-cuda", devices=(0,), timeout_s=20))

        session.cuda.close()
        assert ask(port)

    def checkpointed(self, lab):
        """A tree whose CUDA state is in host memory, left standing still as a dump leaves it."""
        keeper, port = lab.launch()
        root = keeper.status().root_pid
        helper = self.start(lab, keeper, root)
        helper.lock([root], timeout_s=20)
        helper.checkpoint(timeout_s=20)
        keeper.signal(signal.SIGSTOP, whom="tree")
        return keeper, port, root, helper

    def calls(self, lab):
        return [line.split()[0] for line in (lab.directory / "cuda.log").read_text().splitlines()]

    def test_a_tree_that_stands_still_runs_before_its_cuda_state_is_brought_back(self, lab):
        keeper, port, _, helper = self.checkpointed(lab)

        bring_back(keeper, helper)

        assert self.calls(lab) == ["lock", "checkpoint", "restore", "unlock"]
        assert keeper.status().state == "running"
        assert ask(port)

    def test_so_it_does_when_the_caller_ends_in_the_middle(self, lab):
        keeper, port, _, helper = self.checkpointed(lab)
        keeper.begin("capture", [CONTINUE])

        helper._connection.close()  # what the end of a caller does
        undone = keeper.abort()

        assert undone == ("let the tree continue",)
        assert self.calls(lab) == ["lock", "checkpoint", "restore", "unlock"]
        assert keeper.wait_helper(helper._pid, timeout_s=1) == 0
        assert ask(port)

    def test_a_device_that_is_open_after_the_checkpoint_is_named_and_the_tree_runs_on(self, lab, device):
        keeper, port = lab.launch(nvidia=device)
        root = keeper.status().root_pid
        session = Scene(cuda=self.start(lab, keeper, root), living=keeper)
        accelerating.lock(session, LockCuda(id="lock-cuda", devices=(0,), timeout_s=20))

        with pytest.raises(DriverError, match=rf"the processes {root} hold NVIDIA devices open after the checkpoint"):
            accelerating.checkpoint(session, CheckpointCuda(id="checkpoint-cuda", timeout_s=20))

        session.cuda.close()
        assert ask(port)
        log = (lab.directory / "cuda.log").read_text().splitlines()
        assert log == [f"{op} {root}" for op in ("lock", "checkpoint", "restore", "unlock")]

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
