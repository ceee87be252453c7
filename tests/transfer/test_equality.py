"""Every backend delivers what the reference delivers, whatever the layout."""

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layouts import Layout, content, layouts

from coldsnap.transfer.backend import Tuning
from coldsnap.transfer.hydrate import hydrate
from coldsnap.transfer.memory import HostMemory

WAYS = {
    "host auto": ("host", "auto", "auto"),
    "host read": ("host", "buffered", "read"),
    "host map": ("host", "buffered", "map"),
    "host direct": ("host", "direct", "auto"),
    "device auto": ("device", "auto", "auto"),
    "device read": ("device", "buffered", "read"),
    "device map": ("device", "buffered", "map"),
    "device register": ("device", "buffered", "register"),
    "device direct": ("device", "direct", "auto"),
    "device gds": ("device", "gds", "auto"),
}


def delivered(path, layout, data, memory, library, backend, tuning, *, hole=0):
    region = memory.allocate(layout.destination_bytes(), tag="t")
    canary = memoryview(bytes([0xA5]) * layout.destination_bytes())
    memory.copy_from_host(region.address, canary)
    receipt = hydrate(
        path,
        layout.extents(region.address, data, hole=hole),
        memory=memory,
        library=library,
        backend=backend,
        preverified=backend == "gds",
        tuning=tuning,
    )
    found = memoryview(bytearray(layout.destination_bytes()))
    memory.copy_to_host(region.address, found)
    return bytes(found), receipt


tunings = st.builds(
    Tuning,
    queue_depth=st.integers(1, 9),
    chunk_bytes=st.sampled_from([4096, 8192, 65536, 1 << 20]),
    slice_bytes=st.sampled_from([0, 4096, 16384]),
    threads=st.integers(0, 5),
)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=layouts(), tuning=tunings, seed=st.integers(0, 3))
def test_every_backend_equals_the_reference(way, layout, tuning, seed, library, host, device, tmp_path):
    target, backend, access = WAYS[way]
    data = content(layout.size, seed)
    path = tmp_path / "pack"
    path.write_bytes(data)
    tuning = Tuning(
        queue_depth=tuning.queue_depth,
        chunk_bytes=tuning.chunk_bytes,
        slice_bytes=tuning.slice_bytes,
        threads=tuning.threads,
        access=access,
    )

    expected, reference = delivered(path, layout, data, HostMemory(), None, "python", tuning)
    found, receipt = delivered(path, layout, data, {"host": host, "device": device}[target], library, backend, tuning)

    assert found == expected
    assert receipt.bytes == reference.bytes == sum(length for _, length in layout.pieces)
    assert receipt.verified_extents == (0 if backend == "gds" else reference.verified_extents)
    assert receipt.ring_bytes <= tuning.queue_depth * tuning.chunk_bytes


@pytest.mark.parametrize("way", [way for way in WAYS if way != "device gds"])
def test_offsets_beyond_four_gibibytes_arrive(way, library, host, device, tmp_path):
    target, backend, access = WAYS[way]
    data = content(300_001)
    hole = (1 << 32) + 12_345
    path = tmp_path / "sparse"
    with path.open("wb") as stream:
        stream.seek(hole)
        stream.write(data)
    layout = Layout(len(data), ((0, 100), (100, 4096), (70_000, 200_001)), (0, 3, 77), "crc32+sha256")
    memory = {"host": host, "device": device}[target]

    found, receipt = delivered(path, layout, data, memory, library, backend, Tuning(access=access), hole=hole)

    at = 0
    for (offset, length), gap in zip(layout.pieces, layout.gaps, strict=True):
        assert found[at + gap : at + gap + length] == data[offset : offset + length]
        at += gap + length
    assert receipt.verified_extents == 3


@pytest.mark.parametrize("way", WAYS)
def test_thousands_of_tiny_scattered_extents_arrive(way, library, host, device, tmp_path):
    target, backend, access = WAYS[way]
    data = content(400_000)
    path = tmp_path / "tiny"
    path.write_bytes(data)
    pieces = tuple((offset, 1 + offset % 61) for offset in range(0, 399_000, 97))
    layout = Layout(len(data), pieces, tuple(offset % 5 for offset, _ in pieces), "crc32")
    memory = {"host": host, "device": device}[target]

    expected, _ = delivered(path, layout, data, HostMemory(), None, "python", Tuning())
    found, _ = delivered(path, layout, data, memory, library, backend, Tuning(access=access))

    assert found == expected


def test_a_stage_is_not_used_again_before_its_copies_are_made(library, shim, device, tmp_path):
    data = content(1 << 20)
    path = tmp_path / "slow"
    path.write_bytes(data)
    layout = Layout(len(data), ((0, len(data)),), (0,), "none")
    shim.delay(500)
    pageable = shim.counts()["pageable"]

    found, _ = delivered(
        path, layout, data, device, library, "buffered", Tuning(chunk_bytes=16384, queue_depth=4, threads=2)
    )

    assert found[: len(data)] == data
    assert shim.counts()["pageable"] == pageable


def test_two_transfers_at_once_share_the_ring(library, device, tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    data = content(2 << 20)
    path = tmp_path / "shared"
    path.write_bytes(data)
    layout = Layout(len(data), ((0, len(data)),), (0,), "crc32")
    memories = [type(device)() for _ in range(4)]

    with ThreadPoolExecutor(4) as pool:
        results = list(
            pool.map(lambda m: delivered(path, layout, data, m, library, "direct", Tuning(chunk_bytes=65536)), memories)
        )

    assert all(found[: len(data)] == data for found, _ in results)
    for memory in memories:
        memory.close()


def test_an_empty_file_and_no_extents_are_a_transfer_too(library, host, device, tmp_path):
    path = tmp_path / "empty"
    path.touch()
    for memory in (host, device):
        for backend in ("auto", "buffered", "direct"):
            receipt = hydrate(path, [], memory=memory, library=library, backend=backend)
            assert receipt.bytes == 0


def test_no_thread_descriptor_or_ring_of_the_kernel_stays(library, host, device, tmp_path):
    from threads import lasting_threads  # children that import this module for its equality find this directory alone

    path = tmp_path / "pack"
    path.write_bytes(content(3 << 20))
    layout = Layout(3 << 20, ((0, 3 << 20),), (0,), "crc32")
    before = (lasting_threads(), sorted(os.listdir("/proc/self/fd")))

    for memory in (host, device):
        delivered(path, layout, content(3 << 20), memory, library, "auto", Tuning())

    assert (lasting_threads(), sorted(os.listdir("/proc/self/fd"))) == before
    targets = [os.readlink(f"/proc/self/fd/{fd}") for fd in before[1] if os.path.exists(f"/proc/self/fd/{fd}")]
    assert not [target for target in targets if "io_uring" in target]
