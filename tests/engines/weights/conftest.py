"""A worker over host memory, the native library built from this checkout, and what was seen of loads in torch."""

import json
import subprocess
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


@pytest.fixture(scope="session")
def seen(engine_python, tmp_path_factory):
    """What ``load_scenarios`` tells, run once by an interpreter that has torch."""
    script = Path(__file__).parent / "load_scenarios.py"
    done = subprocess.run(
        [engine_python, script, tmp_path_factory.mktemp("loads")], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    failed = {name: result["failed"] for name, result in results.items() if "failed" in result}
    assert not failed, "\n".join(failed.values())
    return results
