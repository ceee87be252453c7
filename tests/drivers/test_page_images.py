"""Pages of real process images: without zeros, compressed, and back in memory as they were."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from drivers_lab import Lab

from coldsnap.artifact.pageimage import read_image
from coldsnap.drivers import n610
from coldsnap.drivers.page_images import Feed, RebuiltPages, page_images, rebuild_pages, shrink_pages, zeros_may_be_many
from coldsnap.drivers.pagemap import Pagemap, PagemapEntry, anonymous_private, without_zero_pages
from coldsnap.errors import DriverError, FormatError, IntegrityError, NativeError
from coldsnap.keeper.undo import KILL
from still_memory import STILL, private_memory

pytestmark = pytest.mark.criu
TREE = Path(__file__).with_name("memory_tree.py")


@pytest.fixture(scope="module")
def still(tmp_path_factory, criu):
    """A dumped tree that stood still when it was dumped: its capsule, and digests of its memory."""
    directory = tmp_path_factory.mktemp("still")
    lab = Lab(directory, criu)
    (directory / "mapped").write_bytes(b"content " * 8192)
    keeper = lab.keeper()
    with keeper.operation("launch", [KILL]):
        argv = [sys.executable, str(TREE), str(directory / "mapped"), str(directory / "ready")]
        keeper.spawn_engine(argv, env=STILL | {"PATH": os.environ["PATH"]}, cwd="/")
        while not (directory / "ready").exists():
            time.sleep(0.01)
    keeper.signal(signal.SIGSTOP, whom="tree")
    capsule, dumped = lab.dump(keeper)
    memory = private_memory(keeper)
    assert len({pid for pid, _ in memory}) == 2
    lab.stop(keeper)
    yield lab, capsule, dumped, memory
    lab.close()


def copied(lab, capsule):
    path = lab.capsule()
    shutil.copytree(capsule, path, dirs_exist_ok=True)
    return path


@contextmanager
def opened(directory):
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


WAYS = [
    ("none", "many", Feed()),
    ("none", "keep", Feed()),
    ("lz4", "drop", Feed()),
    ("lz4", "drop", Feed(workers=4)),
    ("lz4", "drop", Feed(way="stream")),
    ("lz4", "drop", Feed(way="stream", workers=4)),
    ("lz4", "keep", Feed()),
]


@pytest.mark.parametrize(("compression", "zero_pages", "feed"), WAYS)
def test_restored_memory_is_the_dumped_memory(still, compression, zero_pages, feed):
    lab, capsule, _, memory = still
    capsule = copied(lab, capsule)

    shrunk = shrink_pages(capsule, compression=compression, zero_pages=zero_pages)
    keeper, thawed = lab.restore(capsule, feed=feed)

    restored = private_memory(keeper)
    assert [key for key in memory if restored.get(key) != memory[key]] == []
    assert restored == memory
    assert (shrunk.zero_bytes > (512 + 256) * 4096) == (zero_pages != "keep")
    assert len(thawed.pages) == (shrunk.images if compression == "lz4" else 0)
    lab.stop(keeper)


@pytest.fixture(scope="module")
def compressed(still):
    lab, capsule, _, _ = still
    capsule = copied(lab, capsule)
    return lab, capsule, shrink_pages(capsule, compression="lz4")


def test_compressed_pages_take_the_place_of_those_of_criu(still, compressed):
    _, original, dumped, _ = still
    _, capsule, shrunk = compressed

    names = {path.name for path in (capsule / "images").iterdir()}
    before = {path.name for path in (original / "images").iterdir()}
    assert {name.removesuffix(".img") for name in before} == {name.rsplit(".", 1)[0] for name in names}
    assert not [name for name in names if name.startswith("pages-") and not name.endswith(".blocks")]
    assert shrunk.raw_bytes == sum(path.stat().st_size for path in (original / "images").glob("pages-*.img"))
    assert shrunk.stored_bytes == sum(path.stat().st_size for path in (capsule / "images").glob("pages-*.blocks"))
    assert shrunk.image_bytes == sum(path.stat().st_size for path in (capsule / "images").iterdir())
    assert shrunk.stored_bytes * 3 < shrunk.raw_bytes < dumped.image_bytes


def test_zero_pages_of_files_and_shared_memory_stay(still, compressed):
    """Of the pages that are left, those that are zeros lie in mappings that are not anonymous and private."""
    _, capsule, _ = compressed
    kept_zeros = 0
    with opened(capsule / "images") as images_fd, closed(rebuild_pages(images_fd, Feed())) as rebuilt:
        for path in sorted((capsule / "images").glob("pagemap-*.img")):
            pagemap = Pagemap.read(images_fd, path.name)
            fd = rebuilt.fds[pagemap.pages_name]
            assert os.fstat(fd).st_size == pagemap.pages * 4096
            at, zeros = 0, []
            for entry in pagemap.entries:
                for page in range(entry.pages):
                    if os.pread(fd, 4096, at) == bytes(4096):
                        zeros.append(entry.address + page * 4096)
                    at += 4096
            kept_zeros += len(zeros)
            droppable = anonymous_private(images_fd, pagemap.mm_name) if pagemap.mm_name else ()
            assert not [address for address in zeros for low, high in droppable if low <= address < high]
    assert kept_zeros >= 2 * 8  # the eight pages over the file, in either process


@contextmanager
def closed(rebuilt):
    try:
        yield rebuilt
    finally:
        rebuilt.close()
        assert rebuilt.fds == {}


def test_a_flipped_byte_in_a_block_is_refused_before_any_process_exists(compressed):
    lab, capsule, _ = compressed
    capsule = copied(lab, capsule)
    path = max((capsule / "images").glob("*.blocks"), key=lambda path: path.stat().st_size)
    with path.open("r+b") as file:
        block = max(read_image(file.fileno()).blocks(), key=lambda block: block.length)
        file.seek(block.offset + block.length // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    keeper = lab.keeper()
    descriptors = len(os.listdir("/proc/self/fd"))

    with pytest.raises(IntegrityError, match=path.name):
        n610.stage_tree(keeper, capsule, rebind=None)

    assert not keeper.tree()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    lab.stop(keeper)


@pytest.mark.parametrize("feed", [Feed(), Feed(way="stream")], ids=["rebuilt", "stream"])
def test_a_truncated_page_image_is_refused(compressed, feed):
    lab, capsule, _ = compressed
    capsule = copied(lab, capsule)
    path = max((capsule / "images").glob("*.blocks"), key=lambda path: path.stat().st_size)
    os.truncate(path, path.stat().st_size - 4096)

    with pytest.raises(IntegrityError, match=path.name):  # the sizes of all files are compared first
        lab.restore(capsule, feed=feed)


def test_a_stream_that_breaks_fails_the_restore_with_its_reason(compressed):
    lab, capsule, _ = compressed
    capsule = copied(lab, capsule)
    path = max((capsule / "images").glob("*.blocks"), key=lambda path: path.stat().st_size)
    with path.open("r+b") as file:
        block = list(read_image(file.fileno()).blocks())[-1]
        file.seek(block.offset)
        file.write(bytes(16))

    with pytest.raises(IntegrityError, match=path.name):
        lab.restore(capsule, feed=Feed(way="stream"))

    run_dir, deadline = Path(lab.keepers[-1].run_dir), time.monotonic() + 10
    while run_dir.exists():  # until the keeper has ended what was there
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def full_disk(still, tmp_path):
    """A capsule on a filesystem with no room for a second copy of its pages."""
    _, capsule, _, _ = still
    used = sum(path.stat().st_size + 4096 for path in capsule.rglob("*"))
    size = f"size={used + (1 << 20)}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", tmp_path], check=True, timeout=10)
    shutil.copytree(capsule, tmp_path, dirs_exist_ok=True)
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True, timeout=10)


@pytest.mark.parametrize("compression", ["none", "lz4"])
def test_a_full_disk_is_an_error_that_names_it(full_disk, compression):
    with pytest.raises((NativeError, DriverError), match="No space left on device"):
        shrink_pages(full_disk, compression=compression)


def test_without_compressed_pages_nothing_is_rebuilt(still):
    _, capsule, _, _ = still
    with opened(capsule / "images") as images_fd:
        assert page_images(images_fd) == {}
        assert rebuild_pages(images_fd, Feed()) == RebuiltPages()


def test_pagemaps_are_written_as_they_were_read(still):
    _, capsule, _, _ = still
    with opened(capsule / "images") as images_fd:
        for path in (capsule / "images").glob("pagemap-*.img"):
            pagemap = Pagemap.read(images_fd, path.name)
            again = capsule / "again"
            again.mkdir(exist_ok=True)
            (again / path.name).write_bytes(pagemap.encode())
            with opened(again) as again_fd:
                assert Pagemap.read(again_fd, path.name) == pagemap
            shutil.rmtree(again)


def entries_of(text):
    """Read entries like 10:3 (three pages from page 10), with an L for lazy or a - for not present."""
    found = []
    for word in text.split():
        address, _, count = word.partition(":")
        flags = {"L": 6, "-": 2}.get(count[-1], 4)
        found.append(PagemapEntry(int(address) * 4096, int(count.rstrip("L-")), flags))
    return tuple(found)


@pytest.mark.parametrize(
    ("entries", "droppable", "zero", "left", "kept"),
    [
        ("10:4", [(10, 14)], "0000", "10:4", [(0, 4)]),
        ("10:4", [(10, 14)], "1111", "", []),
        ("10:4", [(10, 14)], "1001", "11:2", [(1, 3)]),
        ("10:4", [(10, 14)], "0110", "10:1 13:1", [(0, 1), (3, 4)]),
        ("10:4", [], "1111", "10:4", [(0, 4)]),
        ("10:4", [(0, 10), (14, 20)], "1111", "10:4", [(0, 4)]),
        ("10:4", [(11, 13)], "1111", "10:1 13:1", [(0, 1), (3, 4)]),
        ("10:4", [(0, 11), (13, 99)], "1111", "11:2", [(1, 3)]),
        ("10:4L", [(10, 14)], "0100", "10:1L 12:2L", [(0, 1), (2, 4)]),
        ("10:4- 20:2", [(10, 22)], "10", "10:4- 21:1", [(1, 2)]),
        ("10:2 20:2", [(10, 22)], "0110", "10:1 21:1", [(0, 1), (3, 4)]),
        ("10:2 20:2", [(20, 22)], "1110", "10:2 21:1", [(0, 2), (3, 4)]),
    ],
)
def test_runs_are_split_around_zero_pages_and_nothing_else_changes(entries, droppable, zero, left, kept):
    pagemap = Pagemap(name="pagemap-1.img", pages_id=1, entries=entries_of(entries))
    ranges = [(low * 4096, high * 4096) for low, high in droppable]

    assert without_zero_pages(pagemap, ranges, bytes(map(int, zero))) == (entries_of(left), tuple(kept))


def test_another_number_of_pages_than_the_entries_have_is_refused():
    pagemap = Pagemap(name="pagemap-1.img", pages_id=1, entries=entries_of("10:4"))
    with pytest.raises(FormatError) as caught:
        without_zero_pages(pagemap, [], bytes(3))
    assert caught.value.rule == "pagemap.3"


@pytest.mark.parametrize(
    ("encoded", "rule"),
    [
        (b"", "pagemap.1"),
        (Pagemap(name="", pages_id=3, entries=(PagemapEntry(4096, 1, 1),)), "pagemap.2"),
        (Pagemap(name="", pages_id=3, entries=(PagemapEntry(4096, 1, 12),)), "pagemap.2"),
    ],
)
def test_a_pagemap_of_another_kind_is_refused_with_its_rule(tmp_path, encoded, rule):
    data = Pagemap(name="", pages_id=3, entries=()).encode()[:8] + encoded if encoded == b"" else encoded.encode()
    (tmp_path / "pagemap-1.img").write_bytes(data)
    with opened(tmp_path) as images_fd, pytest.raises(FormatError) as caught:
        Pagemap.read(images_fd, "pagemap-1.img")
    assert caught.value.rule == rule


def test_a_pagemap_entry_with_a_field_nobody_here_knows_is_refused(tmp_path):
    """A newer CRIU says there how its pages are compressed, for one."""
    pagemap = Pagemap(name="", pages_id=3, entries=())
    entry = bytes([0x08, 0x80, 0x20, 0x10, 1, 0x20, 4, 0x28, 1]) + bytes([0x30, 7])
    (tmp_path / "pagemap-1.img").write_bytes(pagemap.encode() + len(entry).to_bytes(4, "little") + entry)
    with opened(tmp_path) as images_fd, pytest.raises(FormatError) as caught:
        Pagemap.read(images_fd, "pagemap-1.img")
    assert caught.value.rule == "pagemap.2"


@pytest.mark.parametrize(
    ("zeros", "worth"),
    [
        (range(0), False),
        (range(0, 10_000, 64), False),  # a 64th, evenly
        (range(0, 10_000, 12), True),
        (range(9250, 10_000), True),  # all at the end
        (range(250, 1000), True),
    ],
)
def test_a_few_pages_tell_whether_zeros_are_worth_looking_for(zeros, worth, tmp_path):
    path = tmp_path / "pages"
    with path.open("wb") as file:
        for number in range(10_000):
            file.write((b"\0" if number in zeros else b"x") * 4096)
    with path.open("rb") as file:
        assert zeros_may_be_many(file.fileno(), 10_000) == worth


def test_a_small_file_is_looked_through_without_a_guess(tmp_path):
    path = tmp_path / "pages"
    path.write_bytes(b"x" * 4096)
    with path.open("rb") as file:
        assert zeros_may_be_many(file.fileno(), 1)
