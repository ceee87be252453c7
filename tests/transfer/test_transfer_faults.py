"""What fails in the middle is an error that says so; nothing is published, nothing is leaked, and the retry works."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
from layouts import Layout, content
from test_equality import delivered

from coldsnap.errors import IntegrityError, NativeError, UnsupportedError
from coldsnap.transfer.backend import FileExtent, Tuning
from coldsnap.transfer.capture import capture, packed
from coldsnap.transfer.hydrate import hydrate

SIZE = 2 << 20
SMALL = Tuning(chunk_bytes=65536, queue_depth=8, threads=3)


@pytest.fixture
def pack(tmp_path):
    path = tmp_path / "pack"
    path.write_bytes(content(SIZE))
    return path


WHOLE = Layout(SIZE, ((0, SIZE),), (0,), "crc32")

PRELUDE = """
    import ctypes, json, os, sys
    sys.path.insert(0, {tests!r})
    from layouts import Layout, content
    from test_equality import delivered
    from native_build import ShimMemory
    from coldsnap.errors import ColdSnapError
    from coldsnap.transfer.backend import Tuning
    from coldsnap.transfer.capture import capture, packed
    from coldsnap.transfer.memory import HostMemory
    from coldsnap.transfer.native import NativeLibrary
    faults = ctypes.CDLL(None)
    def plan(name, after, times, error):
        faults.fault_plan(name.encode(), ctypes.c_long(after), ctypes.c_long(times), error)
    library = NativeLibrary.load({library!r})
    library.load_cuda({shim!r})
    SIZE = 2 << 20
    WHOLE = Layout(SIZE, ((0, SIZE),), (0,), "crc32")
    path = {path!r}
    tuning = Tuning(chunk_bytes=65536, queue_depth=8, threads=3, access={access!r})
    memory = {memory}()
    def attempt(action):
        try:
            action()
        except ColdSnapError as error:
            return [type(error).__name__, str(error), getattr(error, "status", None)]
        return ["ok", "", 0]
"""


def with_faults(body, built, path, *, memory="HostMemory", access="read"):
    """Run a script whose system calls can be made to fail; return what it printed."""
    tests = os.path.dirname(__file__)
    prelude = textwrap.dedent(PRELUDE).format(
        tests=tests,
        library=str(built / "libcoldsnap_io.so"),
        shim=str(built / "tests" / "libcuda_shim.so"),
        path=str(path),
        memory=memory,
        access=access,
    )
    done = subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(body)],
        env={**os.environ, "LD_PRELOAD": str(built / "tests" / "libio_faults.so")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


HYDRATE_TWICE = """
    plan({call!r}, {after}, {times}, {error})
    first = attempt(lambda: delivered(path, WHOLE, content(SIZE), memory, library, {backend!r}, tuning))
    plan({call!r}, -1, 0, 0)
    found, _ = delivered(path, WHOLE, content(SIZE), memory, library, {backend!r}, tuning)
    print(json.dumps([first, found[:SIZE] == content(SIZE)]))
"""


@pytest.mark.parametrize("memory", ["HostMemory", "ShimMemory"])
@pytest.mark.parametrize("backend", ["buffered", "direct"])
@pytest.mark.parametrize(
    ("error", "expected"), [(5, "Input/output error"), (-2, "the file ended while")], ids=["EIO", "end of file"]
)
def test_a_failing_read_is_named_and_the_retry_works(memory, backend, error, expected, built, pack):
    body = HYDRATE_TWICE.format(call="preadv", after=7, times=1, error=error, backend=backend)

    (kind, message, status), again = with_faults(body, built, pack, memory=memory)

    assert (kind, again) == ("NativeError", True)
    assert expected in message
    assert status in (3, 4)


@pytest.mark.parametrize("memory", ["HostMemory", "ShimMemory"])
def test_short_reads_are_continued(memory, built, pack):
    body = HYDRATE_TWICE.format(call="preadv", after=0, times=40, error=-1, backend="buffered")

    first, again = with_faults(body, built, pack, memory=memory)

    assert (first[0], again) == ("ok", True)


@pytest.mark.parametrize("memory", ["HostMemory", "ShimMemory"])
def test_pages_that_cannot_be_mapped_are_read_and_the_read_names_the_error(memory, built, pack):
    body = """
        plan("populate", 3, 1000, 5)
        first = attempt(lambda: delivered(path, WHOLE, content(SIZE), memory, library, "buffered", tuning))
        plan("preadv", 3, 1000, 5)
        second = attempt(lambda: delivered(path, WHOLE, content(SIZE), memory, library, "buffered", tuning))
        print(json.dumps([first[0], second[:2]]))
    """

    first, (kind, message) = with_faults(body, built, pack, memory=memory, access="map")

    assert (first, kind) == ("ok", "NativeError")
    assert "Input/output error" in message


CAPTURE_TWICE = """
    region = memory.allocate(SIZE, tag="t")
    memory.copy_from_host(region.address, memoryview(content(SIZE)))
    sources = packed([(region.address, SIZE)], verification={verification!r})
    def go():
        capture(path, sources, memory=memory, library=library, backend={backend!r}, file_sha256={whole},
                read_back={read_back}, tuning=Tuning(chunk_bytes=65536, queue_depth=8, threads=3))
    plan({call!r}, {after}, {times}, {error})
    first = attempt(go)
    left = sorted(os.listdir(os.path.dirname(path)))
    plan({call!r}, -1, 0, 0)
    second = attempt(go)
    print(json.dumps([first, left, second, open(path, "rb").read() == content(SIZE)]))
"""


def capture_twice(*, whole=False, verification="crc32", read_back=True, **fault):
    return CAPTURE_TWICE.format(whole=whole, verification=verification, read_back=read_back, **fault)


@pytest.mark.parametrize("memory", ["HostMemory", "ShimMemory"])
@pytest.mark.parametrize("backend", ["buffered", "direct"])
@pytest.mark.parametrize(
    ("call", "error", "expected"),
    [
        ("pwritev", 28, "No space left"),
        ("pwritev", -2, "took none of"),
        ("pwritev", 5, "Input/output error"),
        ("fallocate", 28, "no room for"),
        ("fdatasync", 5, "cannot be made durable"),
        ("preadv", 5, "Input/output error"),
    ],
    ids=["ENOSPC", "nothing written", "EIO", "ENOSPC at once", "EIO in fdatasync", "EIO in read-back"],
)
def test_a_failing_write_leaves_nothing_and_the_retry_works(memory, backend, call, error, expected, built, tmp_path):
    path = tmp_path / "out" / "pack"
    path.parent.mkdir()
    after = 5 if call == "pwritev" else 0
    body = capture_twice(call=call, after=after, times=1, error=error, backend=backend, whole=True)

    (kind, message, _), left, second, same = with_faults(body, built, path, memory=memory)

    assert (kind, left, second[0], same) == ("NativeError", [], "ok", True)
    assert expected in message


def test_short_writes_are_continued(built, tmp_path):
    path = tmp_path / "out" / "pack"
    path.parent.mkdir()
    body = capture_twice(call="pwritev", after=0, times=30, error=-1, backend="buffered")

    (kind, _, _), _, _, same = with_faults(body, built, path)

    assert (kind, same) == ("ok", True)


FLIP = {"call": "fdatasync", "after": 0, "times": 1, "error": -3}


@pytest.mark.parametrize("memory", ["HostMemory", "ShimMemory"])
@pytest.mark.parametrize("backend", ["python", "buffered", "direct", "auto"])
@pytest.mark.parametrize("verification", ["none", "crc32", "crc32+sha256"])
def test_read_back_finds_a_byte_that_the_disk_changed_and_leaves_nothing(
    verification, backend, memory, built, tmp_path
):
    path = tmp_path / "out" / "pack"
    path.parent.mkdir()
    body = capture_twice(backend=backend, verification=verification, **FLIP)

    (kind, message, _), left, second, same = with_faults(body, built, path, memory=memory)

    assert (kind, left, second[0], same) == ("IntegrityError", [], "ok", True)
    assert "extent 0" in message


def test_without_read_back_a_byte_that_the_disk_changed_is_not_found(built, tmp_path):
    path = tmp_path / "out" / "pack"
    path.parent.mkdir()
    body = capture_twice(backend="buffered", read_back=False, **FLIP)
    body = body.replace("second = attempt(go)", "second = first")

    (kind, _, _), left, _, same = with_faults(body, built, path)

    assert (kind, left, same) == ("ok", ["pack"], False)


@pytest.mark.parametrize("backend", ["buffered", "direct"])
@pytest.mark.parametrize(
    "call",
    [
        "cuMemcpyHtoDAsync",
        "cuEventRecord",
        "cuEventSynchronize",
        "cuStreamCreate",
        "cuEventCreate",
        "cuCtxPushCurrent",
        "cuDevicePrimaryCtxRetain",
        "cuMemHostRegister",
    ],
)
def test_a_cuda_error_in_the_middle_is_named_and_the_retry_works(call, backend, library, shim, device, pack):
    library.release()
    held = shim.held()
    shim.fail(call, after=2 if call not in ("cuDevicePrimaryCtxRetain", "cuMemHostRegister") else 0)

    with pytest.raises(NativeError, match="made to fail") as failed:
        delivered(pack, WHOLE, content(SIZE), device, library, backend, SMALL)
    shim.heal()
    found, _ = delivered(pack, WHOLE, content(SIZE), device, library, backend, SMALL)

    assert failed.value.status == 5
    assert found[:SIZE] == content(SIZE)
    library.release()
    assert shim.held() == held


def test_a_device_that_is_lost_takes_its_ring_along(library, shim, device, pack):
    shim.fail("cuStreamSynchronize")

    with pytest.raises(NativeError):
        delivered(pack, WHOLE, content(SIZE), device, library, "buffered", SMALL)

    assert library.statistics().ring_bytes == 0
    shim.heal()
    shim.forget_registrations()
    found, _ = delivered(pack, WHOLE, content(SIZE), device, library, "buffered", SMALL)
    assert found[:SIZE] == content(SIZE)


def test_a_context_that_was_reset_gets_its_ring_registered_again(library, shim, device, pack):
    delivered(pack, WHOLE, content(SIZE), device, library, "buffered", SMALL)
    shim.forget_registrations()
    pageable = shim.counts()["pageable"]

    found, _ = delivered(pack, WHOLE, content(SIZE), device, library, "buffered", SMALL)

    assert found[:SIZE] == content(SIZE)
    assert shim.counts()["pageable"] == pageable


@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync", "cuEventRecord", "cuEventSynchronize", "cuStreamCreate"])
def test_a_cuda_error_in_a_capture_leaves_nothing(call, library, shim, device, tmp_path):
    region = device.allocate(SIZE, tag="t")
    sources = packed([(region.address, SIZE)], verification="crc32+sha256")
    shim.fail(call, after=0 if call == "cuStreamCreate" else 1)

    with pytest.raises(NativeError, match="made to fail"):
        capture(tmp_path / "x", sources, memory=device, library=library, file_sha256=True, tuning=SMALL)

    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("backend", ["python", "buffered", "direct", "auto"])
@pytest.mark.parametrize("verification", ["crc32", "crc32+sha256"])
def test_a_flipped_bit_is_refused_by_extent(verification, backend, where, library, host, device, pack):
    memory = {"host": host, "device": device}[where]
    data = bytearray(content(SIZE))
    layout = Layout(SIZE, ((0, 1000), (5000, 1 << 20), (1_200_000, 7)), (0, 0, 0), verification)
    region = memory.allocate(layout.destination_bytes(), tag="t")
    extents = layout.extents(region.address, bytes(data))
    data[5000 + 777_777] ^= 4
    pack.write_bytes(data)

    with pytest.raises(IntegrityError, match="extent 1") as refused:
        hydrate(pack, extents, memory=memory, library=library, backend=backend)

    assert refused.value.expected == f"{extents[1].crc32:08x}"


@pytest.mark.parametrize("backend", ["python", "buffered", "direct", "auto"])
def test_a_truncated_file_is_refused_before_anything_moves(backend, library, host, pack):
    region = host.allocate(SIZE, tag="t")
    os.truncate(pack, SIZE - 1)

    with pytest.raises(NativeError, match=f"extent 0 ends at byte {SIZE} of a file of {SIZE - 1} bytes"):
        hydrate(
            pack,
            [FileExtent(file_offset=0, address=region.address, length=SIZE)],
            memory=host,
            library=library,
            backend=backend,
        )


@pytest.mark.parametrize("backend", ["python", "auto"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(backend, library, host, tmp_path):
    region = host.allocate(SIZE, tag="t")
    os.mkfifo(tmp_path / "fifo")
    extents = [FileExtent(file_offset=0, address=region.address, length=SIZE)]

    for place in (tmp_path, tmp_path / "fifo", "/dev/zero"):
        with pytest.raises(NativeError, match="is not a regular file"):
            hydrate(place, extents, memory=host, library=library, backend=backend)


def test_gds_never_verifies_and_never_pretends(library, cufile, device, host, pack):
    layout = Layout(SIZE, ((3, SIZE - 3),), (0,), "none")
    region = device.allocate(layout.destination_bytes(), tag="t")
    extents = layout.extents(region.address, content(SIZE))

    with pytest.raises(UnsupportedError, match="preverified"):
        hydrate(pack, extents, memory=device, library=library, backend="gds")
    with pytest.raises(UnsupportedError, match="needs a device|for transfers to a device|no such CUDA device"):
        hydrate(pack, extents, memory=host, library=library, backend="gds", preverified=True)
    cufile.shim_garble(1)
    with pytest.raises(UnsupportedError, match="other bytes than the file has"):
        hydrate(pack, extents, memory=device, library=library, backend="gds", preverified=True)
    cufile.shim_garble(0)
    cufile.shim_register_error(5027)
    with pytest.raises(UnsupportedError, match="does not take this file"):
        hydrate(pack, extents, memory=device, library=library, backend="gds", preverified=True)


def test_gds_without_its_kernel_module_is_refused_every_time(library, cufile, device, pack):
    cufile.shim_module(0)
    layout = Layout(SIZE, ((0, SIZE),), (0,), "none")
    region = device.allocate(SIZE, tag="t")

    for _ in range(2):
        with pytest.raises(UnsupportedError, match="nvidia-fs kernel module is not loaded"):
            hydrate(
                pack,
                layout.extents(region.address, content(SIZE)),
                memory=device,
                library=library,
                backend="gds",
                preverified=True,
            )


def test_a_failing_gds_read_is_named_and_gives_its_handle_back(library, cufile, device, pack):
    import ctypes

    layout = Layout(SIZE, ((0, SIZE),), (0,), "none")
    cufile.shim_fail_read(ctypes.c_long(20))

    with pytest.raises(NativeError, match="cuFile error 5017"):
        delivered(pack, layout, content(SIZE), device, library, "gds", Tuning())
    found, _ = delivered(pack, layout, content(SIZE), device, library, "gds", Tuning())

    assert found[:SIZE] == content(SIZE)
    assert cufile.shim_handles() == 0
