"""A receipt says what was asked for, what was done and why."""

import errno
import os

import pytest
from layouts import Layout, content
from test_equality import delivered

from coldsnap.errors import NativeError
from coldsnap.transfer.backend import FileExtent, Tuning
from coldsnap.transfer.hydrate import hydrate, verify

SIZE = 8 << 20
WHOLE = Layout(SIZE, ((0, SIZE),), (0,), "crc32")


@pytest.fixture
def pack(tmp_path):
    path = tmp_path / "pack"
    path.write_bytes(content(SIZE))
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    return path


def forget(path, offset=0, length=0):
    """Drop pages from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def local(path):
    """Tests about the page cache need a disk; the temporary folder of pytest is on one unless told otherwise."""
    from coldsnap.host.mounts import filesystem_of

    return filesystem_of(path).kind == "local"


@pytest.mark.parametrize("where", ["host", "device"])
def test_auto_reads_resident_ranges_through_the_page_cache_and_the_rest_around_it(where, library, host, device, pack):
    assert local(pack)
    memory = {"host": host, "device": device}[where]
    forget(pack)
    fd = os.open(pack, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    os.pread(fd, 2 << 20, 2 << 20)
    os.close(fd)

    found, receipt = delivered(pack, WHOLE, content(SIZE), memory, library, "auto", Tuning())

    assert found[:SIZE] == content(SIZE)
    assert (receipt.requested, receipt.effective) == ("auto", "direct+buffered")
    assert receipt.reason == "qualified-local-filesystem"
    assert [(one.file_offset >> 20, one.length >> 20, one.backend, one.reason) for one in receipt.ranges] == [
        (0, 2, "direct", "not-resident"),
        (2, 2, "buffered", "resident"),
        (4, 4, "direct", "not-resident"),
    ]
    assert receipt.direct_bytes == 6 << 20
    assert receipt.range_count == 3


def test_auto_leaves_a_cold_file_out_of_the_page_cache(library, host, pack):
    forget(pack)

    _, receipt = delivered(pack, WHOLE, content(SIZE), host, library, "auto", Tuning())

    fd = os.open(pack, os.O_RDONLY)
    assert sum(library.resident_pages(fd, 0, SIZE, 1 << 20)) == 0
    os.close(fd)
    assert receipt.effective == "direct"


def test_auto_reads_a_hot_file_through_the_page_cache(library, host, pack):
    pack.read_bytes()

    _, receipt = delivered(pack, WHOLE, content(SIZE), host, library, "auto", Tuning())

    assert (receipt.effective, {one.reason for one in receipt.ranges}) == ("buffered", {"resident"})


def test_a_partly_resident_slice_is_asked_again_in_smaller_blocks(library, device, pack):
    forget(pack)
    fd = os.open(pack, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    os.pread(fd, 256 << 10, 512 << 10)
    os.close(fd)

    found, receipt = delivered(pack, WHOLE, content(SIZE), device, library, "auto", Tuning())

    assert found[:SIZE] == content(SIZE)
    assert [(one.file_offset >> 10, one.length >> 10, one.backend) for one in receipt.ranges] == [
        (0, 512, "direct"),
        (512, 256, "buffered"),
        (768, (SIZE >> 10) - 768, "direct"),
    ]


def test_direct_reads_the_edges_of_unaligned_extents_through_the_page_cache(library, device, pack):
    layout = Layout(SIZE, ((100, 1 << 20), (3 << 20, 4096), (5_000_000, 50)), (0, 0, 0), "crc32")

    _, receipt = delivered(pack, layout, content(SIZE), device, library, "direct", Tuning())

    assert receipt.effective == "direct+buffered-edges"
    assert receipt.edge_bytes == (4096 - 100) + 100 + 50
    assert {(one.backend, one.reason) for one in receipt.ranges} == {("direct", "requested"), ("buffered", "edge")}


def test_an_aligned_direct_transfer_has_no_edges(library, device, pack):
    _, receipt = delivered(pack, WHOLE, content(SIZE), device, library, "direct", Tuning())

    assert (receipt.effective, receipt.edge_bytes, receipt.fallback_errno) == ("direct", 0, None)


def test_a_receipt_names_the_filesystem_behind_the_link(library, host, pack, tmp_path):
    link = tmp_path / "model.safetensors"
    link.symlink_to(pack)

    _, receipt = delivered(link, WHOLE, content(SIZE), host, library, "auto", Tuning())

    details = receipt.details()
    assert os.path.ismount(details["mountpoint"])
    assert details["filesystem_type"] == receipt.filesystem.type != "unknown"
    assert details["mount_source"] == receipt.filesystem.source
    assert details["path"] == str(link)


def test_a_memory_filesystem_is_the_page_cache(library, host):
    import tempfile

    with tempfile.NamedTemporaryFile(dir="/dev/shm") as stream:
        stream.write(content(SIZE))
        stream.flush()

        _, receipt = delivered(stream.name, WHOLE, content(SIZE), host, library, "auto", Tuning())

    assert (receipt.effective, receipt.access) == ("buffered", "read")
    assert receipt.reason == "memory-filesystem-is-the-page-cache"
    assert {one.reason for one in receipt.ranges} == {"no-direct-open"}


def test_a_file_open_for_writing_is_read_and_never_mapped(library, host, pack):
    with open(pack, "r+b"):
        _, receipt = delivered(pack, WHOLE, content(SIZE), host, library, "buffered", Tuning(access="auto"))
        with pytest.raises(NativeError, match="no read lease"):
            delivered(pack, WHOLE, content(SIZE), host, library, "buffered", Tuning(access="map"))

    assert receipt.access == "read"


def test_stage_times_fit_into_the_total(library, device, pack):
    _, receipt = delivered(pack, WHOLE, content(SIZE), device, library, "buffered", Tuning(threads=1))

    times = receipt.times
    stages = times.io_ns + times.wait_ns + times.checksum_ns + times.enqueue_ns + times.synchronize_ns
    assert 0 < times.io_ns
    assert 0 < times.checksum_ns
    assert times.initialization_ns + stages <= times.total_ns


def test_verifying_delivers_nothing(library, pack):
    extents = WHOLE.extents(1, content(SIZE))

    receipt = verify(pack, extents, library=library)

    assert (receipt.verified_extents, receipt.bytes) == (1, SIZE)


def test_preverified_digests_are_not_compared(library, host, pack):
    region = host.allocate(SIZE, tag="t")
    wrong = [FileExtent(file_offset=0, address=region.address, length=SIZE, crc32=1)]

    receipt = hydrate(pack, wrong, memory=host, library=library, preverified=True)

    assert receipt.verified_extents == 0


FALLBACK = """
    import os
    plan("open_direct", 0, 1000, {error})
    results = []
    for backend in ("auto", "direct"):
        try:
            _, receipt = delivered(path, WHOLE, content(SIZE), memory, library, backend, tuning)
            results.append([receipt.effective, receipt.reason, receipt.fallback_errno])
        except ColdSnapError as error:
            results.append([type(error).__name__, str(error), error.status])
    print(json.dumps(results))
"""


def test_auto_falls_back_from_a_refused_direct_open_and_explicit_direct_does_not(built, tmp_path):
    from test_transfer_faults import SIZE as SMALL_SIZE
    from test_transfer_faults import with_faults

    path = tmp_path / "pack"
    path.write_bytes(content(SMALL_SIZE))

    auto, explicit = with_faults(FALLBACK.format(error=errno.EINVAL), built, path)

    assert auto == ["buffered", "direct-open-fallback", errno.EINVAL]
    assert explicit[0] == "NativeError"
    assert "refuses to open the file for direct transfers" in explicit[1]


RESIDENCY = """
    import os
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    os.pread(fd, 1 << 20, 0)
    results = []
    for error in (0, {enosys}, {eperm}):
        plan("cachestat", 0, 100000 if error else 0, error)
        _, receipt = delivered(path, WHOLE, content(SIZE), memory, library, "auto", Tuning(slice_bytes=1 << 20))
        results.append([[one.file_offset >> 20, one.length >> 20, one.backend, one.reason] for one in receipt.ranges])
    print(json.dumps(results))
"""


def test_kernels_without_cachestat_are_asked_with_mincore_and_refusals_count_as_unknown(built, tmp_path):
    from test_transfer_faults import SIZE as SMALL_SIZE
    from test_transfer_faults import with_faults

    path = tmp_path / "pack"
    path.write_bytes(content(SMALL_SIZE))

    by_cachestat, by_mincore, unknown = with_faults(
        RESIDENCY.format(enosys=errno.ENOSYS, eperm=errno.EPERM), built, path, access="auto"
    )

    assert by_cachestat == by_mincore == [[0, 1, "buffered", "resident"], [1, 1, "direct", "not-resident"]]
    assert unknown == [[0, 2, "direct", "residency-unknown"]]
