"""What fails on the way to sleep or back: the state says so, nothing is lost, and the retry works."""

import errno
import os
import resource
from contextlib import contextmanager

import pytest
from sleepers import PLAIN, SMALL, Worker, files, released, status

from coldsnap.engines.rank import Busy
from coldsnap.engines.weights.worker import Hooks
from coldsnap.errors import AdmissionError, IntegrityError, NativeError
from coldsnap.transfer.memory import HostMemory


class Faults:
    """A fault point that fails at one of its calls."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.fail_at = -1

    def __call__(self, point: str) -> None:
        self.seen.append(point)
        if len(self.seen) - 1 == self.fail_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def begin(self, fail_at: int = -1) -> None:
        self.seen, self.fail_at = [], fail_at


@pytest.fixture
def faults():
    return Faults()


@pytest.fixture
def faulty(faults):
    made = Worker(SMALL, at=faults)
    yield made
    made.close()


def test_a_release_that_fails_anywhere_before_the_first_unmap_leaves_the_worker_awake(faulty, faults, tmp_path):
    released(faulty, tmp_path / "counted")
    points = list(faults.seen)
    faults.begin()
    faulty.worker.hydrate({})
    before = points.index("memory:release")

    for count in range(before + 1):
        faults.begin(count)
        with pytest.raises(OSError, match="No space"):
            released(faulty, tmp_path / str(count))
        faults.begin()
        assert status(faulty)["state"] == "awake", points[count]
        assert faulty.is_whole(), points[count]
        left = [name for name in files(tmp_path / str(count)) if not name.endswith((".lock", ".pack"))]
        # What fails at the very last point has written its generation; before, nothing has a name.
        assert not left or points[count] == "memory:release", points[count]

    assert before > 15


def test_a_release_that_fails_after_the_first_unmap_is_undone_by_a_hydrate(faulty, faults, tmp_path):
    faults.begin()
    released(faulty, tmp_path / "counted")
    at = faults.seen.index("memory:released")
    faults.begin()
    faulty.worker.hydrate({})

    faults.begin(at)
    with pytest.raises(OSError, match="No space"):
        released(faulty, tmp_path)
    assert status(faulty)["state"] == "failed"
    assert "No space" in status(faulty)["error"]
    with pytest.raises(Busy, match="hydrate it first"):
        released(faulty, tmp_path)
    faults.begin()
    faulty.worker.hydrate({})

    assert status(faulty)["state"] == "awake"
    assert faulty.is_whole()


def test_a_hydrate_that_fails_anywhere_is_repeated_as_a_whole(faulty, faults, tmp_path):
    released(faulty, tmp_path)
    faults.begin()
    faulty.worker.hydrate({})
    # Locks and records of the store come and go with the first admission; the points of the memory are always there.
    points = [point for point in faults.seen if ":" in point]

    for count in range(len(points)):
        released(faulty, tmp_path)
        faults.begin(count)
        with pytest.raises(OSError, match="No space"):
            faulty.worker.hydrate({})
        assert status(faulty)["state"] == "failed", points[count]
        assert status(faulty)["asleep"] == ["kv_cache", "weights"], points[count]
        faults.begin()
        faulty.worker.hydrate({})
        assert status(faulty)["state"] == "awake"
        assert faulty.is_whole(), points[count]
        assert faulty.is_forgotten(), points[count]

    assert {"weights:remap", "pack:fill", "residual:fill", "kv_cache:remap", "kv_cache:zero", "hydrate:commit"} <= {
        *points
    }


class CountedMemory(HostMemory):
    """Says what was mapped, and fails at one of the mappings."""

    def __init__(self, fail_at: int = -1) -> None:
        super().__init__()
        self.mapped: list[int] = []
        self.fail_at = fail_at

    def remap(self, regions):
        for region in regions:
            if len(self.mapped) == self.fail_at:
                self.fail_at = -1
                raise NativeError("cuMemCreate failed: out of memory")
            super().remap([region])
            self.mapped.append(region.address)


@pytest.mark.parametrize("fail_at", range(4))
def test_no_address_is_mapped_twice_whatever_fails(fail_at, tmp_path):
    memory = CountedMemory(fail_at)
    worker = Worker(SMALL, memory)
    released(worker, tmp_path)

    with pytest.raises(NativeError, match="out of memory"):
        worker.worker.hydrate({})
    assert status(worker)["state"] == "failed"
    woken = worker.worker.hydrate({})

    assert sorted(memory.mapped) == sorted(region.address for region in memory.regions())
    assert woken["mapped"] == 4 - fail_at
    assert worker.is_whole()
    worker.close()


def test_both_operations_may_be_repeated(worker, tmp_path):
    first = released(worker, tmp_path)

    assert released(worker, tmp_path) == first
    with pytest.raises(Busy, match="sleeps already"):
        released(worker, tmp_path / "elsewhere")
    assert worker.worker.hydrate({})["mapped"] == 5
    again = worker.worker.hydrate({})
    assert (again["state"], again["mapped"], again["receipt"]) == ("awake", 0, None)
    assert worker.is_whole()


def test_tags_come_back_one_by_one(worker, tmp_path):
    released(worker, tmp_path)

    first = worker.worker.hydrate({"tags": ["weights"]})
    assert (first["state"], status(worker)["asleep"]) == ("sleeping", ["kv_cache"])
    assert worker.is_whole()
    with pytest.raises(Busy, match="kv_cache of this worker sleeps already"):
        released(worker, tmp_path)
    second = worker.worker.hydrate({"tags": ["kv_cache"]})

    assert second["state"] == "awake"
    assert second["bytes"] == {"kv_cache": sum(PLAIN.kv_cache)}
    assert worker.is_forgotten()
    with pytest.raises(AdmissionError, match="no region wieghts here"):
        worker.worker.hydrate({"tags": ["wieghts"]})


def test_a_kv_cache_that_is_not_discarded_is_left_alone(worker, tmp_path):
    reply = released(worker, tmp_path, discard=[])
    worker.worker.hydrate({})

    assert reply["discarded"] == {}
    assert all(worker.bytes_of(region) == b"K" * region.size_bytes for region in worker.kv_cache)


class StainedMemory(HostMemory):
    """Brings backing that is not zero, and does not zero it."""

    stain = 0

    def zero(self, address, length):
        region = next(one for one in self.regions() if one.address == address)
        self.copy_from_host(address + (0, region.size_bytes // 2, region.size_bytes - 1)[self.stain], memoryview(b"!"))


class DeafMemory(HostMemory):
    """Says that it copied, and did not."""

    deaf = False

    def copy_to_host(self, address, into):
        if not self.deaf:
            super().copy_to_host(address, into)


@pytest.mark.parametrize(("stain", "place"), [(0, "start"), (1, "middle"), (2, "end")])
def test_a_kv_cache_that_does_not_read_as_zero_is_an_error_that_names_it(stain, place, tmp_path):
    memory = StainedMemory()
    memory.stain = stain
    worker = Worker(SMALL, memory)
    released(worker, tmp_path)

    with pytest.raises(IntegrityError, match=f"{worker.kv_cache[0].address:#x}: the {place} is not zero"):
        worker.worker.hydrate({})

    assert status(worker)["state"] == "failed"
    worker.close()


def test_a_read_back_that_copies_nothing_is_not_taken_for_zeros(tmp_path):
    memory = DeafMemory()
    worker = Worker(SMALL, memory)
    released(worker, tmp_path)
    memory.deaf = True

    with pytest.raises(IntegrityError, match="found a5a5"):
        worker.worker.hydrate({})
    worker.close()


# Room


def test_a_release_that_would_eat_the_reserve_writes_nothing(worker, tmp_path):
    with pytest.raises(AdmissionError, match="must stay free; nothing was written: make room there, or name"):
        released(worker, tmp_path, reserve_bytes=1 << 60)

    assert files(tmp_path) == []
    assert status(worker)["state"] == "awake"


@contextmanager
def largest_file(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [1 << 20, (2 << 20) - 1], ids=["residual", "pack"])
def test_a_write_that_is_cut_short_leaves_nothing(worker, size, tmp_path):
    with largest_file(size), pytest.raises((NativeError, OSError), match="too large"):
        released(worker, tmp_path)

    assert [name for name in files(tmp_path) if not name.endswith(".lock")] == []
    assert not (tmp_path / "artifact" / "weights" / "worker-0").exists()
    assert status(worker)["state"] == "awake"
    assert worker.is_whole()


# The engine's hooks


def test_hooks_are_called_around_what_they_are_for(tmp_path):
    calls = []
    worker = Worker(
        SMALL,
        hooks=Hooks(
            before_release=lambda: calls.append(("before_release", mapped(worker))),
            after_release=lambda: calls.append(("after_release", mapped(worker))),
            before_hydrate=lambda tags: calls.append(("before_hydrate", tuple(tags), mapped(worker))),
            after_hydrate=lambda tags: calls.append(("after_hydrate", tuple(tags), mapped(worker))),
        ),
    )

    released(worker, tmp_path)
    worker.worker.hydrate({"tags": ["weights"]})
    worker.worker.hydrate({})

    assert calls == [
        ("before_release", 4),
        ("after_release", 0),
        ("before_hydrate", ("weights",), 0),
        ("after_hydrate", ("weights",), 2),
        ("before_hydrate", ("kv_cache",), 2),
        ("after_hydrate", ("kv_cache",), 4),
    ]
    worker.close()


def mapped(worker):
    return sum(worker.memory.is_mapped(region) for region in worker.memory.regions())


@pytest.mark.parametrize(
    ("hook", "state"),
    [
        ("before_release", "awake"),
        ("after_release", "failed"),
        ("before_hydrate", "failed"),
        ("after_hydrate", "failed"),
    ],
)
def test_a_hook_that_fails_is_a_failure_of_its_phase(hook, state, tmp_path):
    broken = [True]

    def fail(*_):
        if broken[0]:
            raise RuntimeError("the engine is not ready")

    worker = Worker(SMALL, hooks=Hooks(**{hook: fail}))
    if "hydrate" in hook:
        released(worker, tmp_path)

    with pytest.raises(RuntimeError, match="not ready"):
        worker.worker.hydrate({}) if "hydrate" in hook else released(worker, tmp_path)
    assert status(worker)["state"] == state
    broken[0] = False
    worker.worker.hydrate({})

    assert status(worker)["state"] == "awake"
    assert worker.is_whole()
    worker.close()
