"""On a real driver: the memory provider's contract, equality with the reference, nothing leaked.

Run by name on a machine with a GPU (see hydration_run.sh): ``pytest tests/gpu/hydration_device.py``, with
``COLDSNAP_TEST_LIBRARY`` naming the library.
"""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "transfer"))

from layouts import Layout, content  # noqa: E402
from test_equality import WAYS, delivered  # noqa: E402
from test_memory import MemoryConformance  # noqa: E402

from coldsnap.transfer.backend import FileExtent, Tuning  # noqa: E402
from coldsnap.transfer.capture import capture, packed  # noqa: E402
from coldsnap.transfer.cuda_memory import CudaMemory  # noqa: E402
from coldsnap.transfer.hydrate import hydrate  # noqa: E402
from coldsnap.transfer.memory import HostMemory  # noqa: E402
from coldsnap.transfer.native import NativeLibrary  # noqa: E402

DEVICE_WAYS = [way for way, (target, backend, _) in WAYS.items() if target == "device" and backend != "gds"]


@pytest.fixture(scope="session")
def library():
    return NativeLibrary.load(os.environ["COLDSNAP_TEST_LIBRARY"])


@pytest.fixture
def device():
    memory = CudaMemory(0)
    yield memory
    memory.close()


class TestCudaMemory(MemoryConformance):
    @pytest.fixture
    def provider(self, device):
        return device

    def test_released_memory_goes_back_to_the_device(self, provider):
        from cuda.bindings import driver

        with provider:
            region = provider.allocate(1 << 30, tag="weights")
            before = driver.cuMemGetInfo()[1]
            provider.release([region])
            after = driver.cuMemGetInfo()[1]

        assert after - before >= 1 << 30


@pytest.mark.parametrize("directory", ["/dev/shm", "/var/tmp"])
@pytest.mark.parametrize("way", DEVICE_WAYS)
def test_every_way_equals_the_reference(way, directory, library, device):
    _, backend, access = WAYS[way]
    size = (16 << 20) + 777
    data = content(1 << 20) * 17
    data = data[:size]
    path = Path(directory) / "coldsnap-equality"
    path.write_bytes(data)
    pieces = (
        (0, 1),
        (1, 4095),
        (5000, 9 << 20),
        (10 << 20, size - (10 << 20)),
        *((i * 977, i % 77) for i in range(500)),
    )
    layout = Layout(size, pieces, tuple(i % 3 for i in range(len(pieces))), "crc32+sha256")
    try:
        expected, _ = delivered(path, layout, data, HostMemory(), None, "python", Tuning())
        found, receipt = delivered(path, layout, data, device, library, backend, Tuning(access=access))
    finally:
        path.unlink()

    assert found == expected
    assert receipt.verified_extents == len(pieces)


def test_gds_is_refused_with_a_reason_or_delivers(library, device):
    path = Path("/var/tmp/coldsnap-gds")
    path.write_bytes(content(1 << 20))
    with path.open("rb") as stream:
        why = library.on(0).gds_refuses(stream.fileno())
    print("gds:", why or "delivers")
    if why is None:
        layout = Layout(1 << 20, ((0, 1 << 20),), (0,), "none")
        found, _ = delivered(path, layout, content(1 << 20), device, library, "gds", Tuning())
        assert found[: 1 << 20] == content(1 << 20)
    path.unlink()
    assert why is None or len(why) > 20


def test_a_captured_pack_hydrates_to_the_same_bytes(library, device, tmp_path):
    size = 20_000_000
    region, again = device.allocate(size, tag="a"), device.allocate(size, tag="b")
    data = memoryview(bytearray(content(2_000_000) * 10))
    device.copy_from_host(region.address, data)
    sources = packed(
        [(region.address, size // 2 + 1), (region.address + size // 2 + 1, size // 2 - 1)], verification="crc32+sha256"
    )

    receipt = capture(tmp_path / "pack", sources, memory=device, library=library, read_back=True, file_sha256=True)
    extents = [
        FileExtent(
            file_offset=source.file_offset,
            address=again.address + source.address - region.address,
            length=source.length,
            crc32=digest.crc32,
            sha256=digest.sha256,
        )
        for source, digest in zip(sources, receipt.digests, strict=True)
    ]
    hydrate(tmp_path / "pack", extents, memory=device, library=library)

    found = memoryview(bytearray(size))
    device.copy_to_host(again.address, found)
    assert found == data


def test_two_hundred_cycles_leak_neither_memory_nor_descriptors(library, device, tmp_path):
    from cuda.bindings import driver

    size = 8 << 20
    (tmp_path / "pack").write_bytes(content(1 << 20) * 8)
    region = device.allocate(size, tag="t")
    extents = [FileExtent(file_offset=0, address=region.address, length=size)]

    def cycle(turn):
        backend, access = (("auto", "auto"), ("buffered", "read"), ("buffered", "register"), ("direct", "auto"))[
            turn % 4
        ]
        hydrate(
            tmp_path / "pack", extents, memory=device, library=library, backend=backend, tuning=Tuning(access=access)
        )

    def held():
        with device:
            free = driver.cuMemGetInfo()[1]
        return free, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), library.statistics()

    for turn in range(20):
        cycle(turn)
    before = held()
    for turn in range(200):
        cycle(turn)

    assert held() == before
    library.release()
    assert library.statistics().ring_bytes == 0
