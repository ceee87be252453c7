"""Fixtures of the transfer tests."""

import ctypes

import pytest
from native_build import Shim, ShimMemory, build

from coldsnap.transfer.memory import HostMemory
from coldsnap.transfer.native import NativeLibrary


@pytest.fixture(scope="session")
def built():
    return build()


@pytest.fixture(scope="session")
def library(built):
    library = NativeLibrary.load(built / "libcoldsnap_io.so")
    library.load_cuda(built / "tests" / "libcuda_shim.so")
    library.load_cufile(built / "tests" / "libcufile_shim.so")
    return library


@pytest.fixture
def shim(library, built):
    shim = Shim(built / "tests" / "libcuda_shim.so")
    shim.heal()
    yield shim
    shim.heal()


@pytest.fixture
def cufile(library, built):
    cufile = ctypes.CDLL(str(built / "tests" / "libcufile_shim.so"))
    yield cufile
    cufile.shim_module(2)
    cufile.shim_register_error(0)
    cufile.shim_garble(0)
    cufile.shim_fail_read(ctypes.c_long(-1))


@pytest.fixture
def host():
    memory = HostMemory()
    yield memory
    memory.close()


@pytest.fixture
def device():
    memory = ShimMemory()
    yield memory
    memory.close()
