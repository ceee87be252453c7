"""The native library moves a worker's memory while the kernel fails: the state says so, and the retry works."""

import errno
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PRELUDE = """
    import ctypes, json, sys
    from pathlib import Path
    sys.path[:0] = {path!r}
    from sleepers import PLAIN, Worker, release_request
    from coldsnap.errors import ColdSnapError
    faults = ctypes.CDLL(None)
    def plan(name, after, times, error):
        faults.fault_plan(name.encode(), ctypes.c_long(after), ctypes.c_long(times), error)
    worker, tmp_path = Worker(PLAIN), Path({tmp_path!r})
    request = release_request(tmp_path, backend={backend!r}, native_library={library!r})
    def attempt(action, argument):
        try:
            action(argument)
        except ColdSnapError as error:
            return [type(error).__name__, worker.worker.memory_status({{}})["state"]]
        return ["ok", worker.worker.memory_status({{}})["state"]]
"""


def with_faults(body, tmp_path, native_library, backend="buffered"):
    prelude = textwrap.dedent(PRELUDE).format(
        path=[str(Path(__file__).parent)], tmp_path=str(tmp_path), library=native_library, backend=backend
    )
    preload = Path(native_library).parent / "tests" / "libio_faults.so"
    done = subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(body)],
        env={**os.environ, "LD_PRELOAD": str(preload)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("backend", ["buffered", "direct"])
@pytest.mark.parametrize("error", [errno.EIO, -2], ids=["EIO", "end of file"])
def test_a_read_that_fails_leaves_it_failed_and_the_retry_brings_everything(error, backend, native_library, tmp_path):
    body = f"""
        worker.worker.release(request)
        plan("preadv", 1, 1, {error})
        first = attempt(worker.worker.hydrate, {{"chunk_bytes": 65536}})
        plan("preadv", -1, 0, 0)
        second = attempt(worker.worker.hydrate, {{}})
        print(json.dumps([first, second, worker.is_whole(), worker.is_forgotten()]))
    """

    found = with_faults(body, tmp_path, native_library, backend)

    assert found == [["NativeError", "failed"], ["ok", "awake"], True, True]


def test_short_reads_are_continued(native_library, tmp_path):
    body = """
        worker.worker.release(request)
        plan("preadv", 0, 40, -1)
        print(json.dumps([attempt(worker.worker.hydrate, {"chunk_bytes": 65536}), worker.is_whole()]))
    """

    assert with_faults(body, tmp_path, native_library) == [["ok", "awake"], True]


@pytest.mark.parametrize("call", ["pwritev", "fallocate", "fdatasync"])
def test_a_full_disk_leaves_nothing_and_the_worker_awake(call, native_library, tmp_path):
    body = f"""
        plan({call!r}, 0, 1, {errno.ENOSPC})
        first = attempt(worker.worker.release, request)
        plan({call!r}, -1, 0, 0)
        left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
        second = attempt(worker.worker.release, request)
        print(json.dumps([first, left, second]))
    """

    assert with_faults(body, tmp_path, native_library) == [["NativeError", "awake"], [], ["ok", "sleeping"]]
