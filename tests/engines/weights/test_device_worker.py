"""The same over memory that passes for a CUDA device's: the driver is the stand-in of the transfer tests."""

import shutil
from pathlib import Path

import pytest
from native_build import Shim, ShimMemory
from sleepers import PLAIN, Worker, release_request, status

from coldsnap.errors import NativeError
from coldsnap.transfer.native import NativeLibrary


@pytest.fixture(scope="module")
def device_library(native_library, tmp_path_factory):
    """A library of its own, because a process can choose the driver of each only once."""
    own = tmp_path_factory.mktemp("library") / Path(native_library).name
    shutil.copy(native_library, own)
    NativeLibrary.load(own).load_cuda(shim_of(native_library))  # the worker's own load finds the same one
    return str(own)


def shim_of(native_library):
    return Path(native_library).parent / "tests" / "libcuda_shim.so"


@pytest.fixture
def shim(native_library):
    shim = Shim(shim_of(native_library))
    shim.heal()
    yield shim
    shim.heal()


@pytest.fixture
def device_worker(shim):
    made = Worker(PLAIN, ShimMemory())
    yield made
    made.close()


def test_a_device_sleeps_and_wakes_and_no_page_stays_locked(device_worker, shim, device_library, tmp_path):
    copies = shim.counts()["copies"]

    device_worker.worker.release(release_request(tmp_path, native_library=device_library))
    asleep = shim.held()["registrations"], NativeLibrary.load(device_library).statistics().ring_bytes
    device_worker.worker.hydrate({})

    assert shim.counts()["copies"] > copies
    assert asleep == (0, 0)
    assert shim.held()["registrations"] == 0
    assert device_worker.is_whole()
    assert device_worker.is_forgotten()


def test_a_copy_that_the_driver_refuses_is_retried_as_a_whole(device_worker, shim, device_library, tmp_path):
    device_worker.worker.release(release_request(tmp_path, native_library=device_library))
    shim.fail("cuMemcpyHtoDAsync", after=1)

    with pytest.raises(NativeError, match="copying to the device"):
        device_worker.worker.hydrate({})
    assert status(device_worker)["state"] == "failed"
    assert shim.held()["registrations"] == 0
    shim.heal()
    device_worker.worker.hydrate({})

    assert device_worker.is_whole()


def test_a_residual_that_cannot_be_copied_out_leaves_the_device_awake(device_worker, shim, device_library, tmp_path):
    shim.fail("cuMemcpyDtoHAsync", after=1)

    with pytest.raises(NativeError, match="copying from the device"):
        device_worker.worker.release(release_request(tmp_path, native_library=device_library))

    assert status(device_worker)["state"] == "awake"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert device_worker.is_whole()
