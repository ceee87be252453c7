"""Image files made by hand; the real ones are read in test_drivers_roundtrip."""

import os
import struct

import pytest

from coldsnap.drivers.images import (
    KINDS,
    FilesImage,
    RegularFile,
    encode_entries,
    read_claims,
    read_entries,
    read_pids,
    read_stats,
)
from coldsnap.drivers.messages import enum_value, message
from coldsnap.errors import FormatError

REG, INET = enum_value("fd_types", "REG"), enum_value("fd_types", "INETSK")


def regular(number, name, size=None, flags=os.O_RDONLY, mode=0o100644):
    entry = message("file_entry")(type=REG, id=number)
    entry.reg.id, entry.reg.name, entry.reg.flags, entry.reg.mode = number, name, flags, mode
    if size is not None:
        entry.reg.size = size
    return entry


def files_image(*entries):
    return encode_entries("files.img", entries)


@pytest.fixture
def images(tmp_path):
    fd = os.open(tmp_path, os.O_DIRECTORY)
    yield tmp_path, fd
    os.close(fd)


def test_regular_files_are_listed_with_recorded_sizes_but_not_directories_or_unlinked_ones(images):
    path, fd = images
    entries = [
        regular(1, "/usr/lib/libx.so", 100),
        regular(2, "dev/shm/psm_1", 200, os.O_RDWR),
        regular(3, "/", mode=0o040755),
        regular(4, "/gone", 5),
    ]
    (path / "files.img").write_bytes(files_image(*entries))
    remap = message("remap_file_path_entry")(orig_id=4, remap_id=9, remap_type=1)
    (path / "remap-fpath.img").write_bytes(encode_entries("remap-fpath.img", [remap]))
    assert FilesImage.read(fd).regular_files() == (
        RegularFile(path="/usr/lib/libx.so", size_bytes=100, writable=False),
        RegularFile(path="/dev/shm/psm_1", size_bytes=200, writable=True),
    )


def test_a_forgotten_size_is_gone_and_the_rest_stays(images):
    path, fd = images
    (path / "files.img").write_bytes(files_image(regular(1, "/log", 100, os.O_WRONLY), regular(2, "/data", 7)))
    image = FilesImage.read(fd)
    assert not image.edited
    image.forget_sizes(["/log"])
    assert image.edited
    (path / "files.img").write_bytes(image.encode())
    assert [file.size_bytes for file in FilesImage.read(fd).regular_files()] == [None, 7]


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (lambda data: data[:3], "image.2"),
        (lambda data: data[:5] + b"x" + data[6:], "image.2"),
        (lambda data: data[:-1], "image.3"),
        (lambda data: data + b"\x07", "image.3"),
        (lambda data: data[:8] + struct.pack("<I", 4) + b"\xff\xff\xff\xff", "image.3"),
    ],
)
def test_a_damaged_image_is_refused_with_its_rule(images, damage, rule):
    path, fd = images
    (path / "files.img").write_bytes(damage(files_image(regular(1, "/log", 100))))
    with pytest.raises(FormatError) as caught:
        FilesImage.read(fd)
    assert (caught.value.rule, caught.value.path) == (rule, "files.img")


def test_a_missing_image_is_refused_with_its_rule(images):
    with pytest.raises(FormatError) as caught:
        read_entries(images[1], "pstree.img")
    assert caught.value.rule == "image.1"


def test_pids_are_processes_and_claims_are_threads_too(images):
    path, fd = images
    tree = [
        message("pstree_entry")(pid=600, threads=[600, 602]),
        message("pstree_entry")(pid=601, ppid=600, threads=[601]),
    ]
    (path / "pstree.img").write_bytes(encode_entries("pstree.img", tree))
    assert read_pids(fd) == (600, 601)
    assert read_claims(fd) == (600, 602, 601)


def test_statistics_are_read_and_may_be_absent(images):
    path, fd = images
    assert read_stats(fd) is None
    stats = message("stats_entry")()
    stats.dump.freezing_time, stats.dump.frozen_time, stats.dump.pages_written = 1500, 2_000_000, 9
    (path / "stats-dump").write_bytes(encode_entries("stats-dump", [stats]))
    found = read_stats(fd)
    assert (found.freezing_s, found.frozen_s, found.pages_written) == (0.0015, 2.0, 9)


def test_every_kind_has_a_message():
    for _, _, entry in KINDS.values():
        assert message(entry)().SerializeToString() == b""
