"""A worker over host memory, and the native library built from this checkout."""

import sys
from pathlib import Path

import pytest
from sleepers import PLAIN, Worker

sys.path.append(str(Path(__file__).parents[2] / "transfer"))

import native_build


@pytest.fixture(scope="session")
def native_library():
    """Where the library is."""
    return str(native_build.build() / "libcoldsnap_io.so")


@pytest.fixture
def worker():
    """A worker whose memory has known bytes."""
    made = Worker(PLAIN)
    yield made
    made.close()


@pytest.fixture(params=["python", "auto", "buffered", "direct"])
def transfer(request):
    """How bytes are moved, both ways."""
    if request.param == "python":
        return {"backend": "python"}
    return {"backend": request.param, "native_library": request.getfixturevalue("native_library")}
