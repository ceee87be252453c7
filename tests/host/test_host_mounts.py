"""Filesystems behind paths."""

import os

import pytest
from attrs import evolve

from coldsnap.host.facts import FilesystemFacts
from coldsnap.host.mounts import choose_io, filesystem_behind, filesystem_of, find_mount, kind_of, parse_mountinfo

MOUNTINFO = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 master:2 - ext4 /dev/vda rw,discard
30 27 0:27 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=24684092k
31 27 0:40 /sub /data rw,noatime shared:9 - btrfs /dev/sdb rw,subvol=/sub
32 27 0:41 / /mnt/with\040space ro - nfs4 server:/export ro,vers=4.2
33 32 0:42 / /mnt/with\040space/deeper rw - fuse.sshfs me@there: rw
34 27 0:43 / /data rw - xfs /dev/sdc rw
a line that is none
"""
MOUNTS = parse_mountinfo(MOUNTINFO)
EXT4 = FilesystemFacts(
    path="/x",
    type="ext4",
    source="/dev/vda",
    mountpoint="/",
    device="254:0",
    free_bytes=1,
    kind="local",
    read_only=False,
)


def test_mountinfo_is_read_with_optional_fields_and_escapes():
    by_point = {mount.mountpoint: mount for mount in MOUNTS}

    assert by_point["/"].source == "/dev/vda"
    assert by_point["/mnt/with space"].type == "nfs4"
    assert by_point["/mnt/with space"].options == ("ro",)
    assert len(MOUNTS) == 7


def test_the_kernels_mount_id_decides_when_it_is_known():
    assert find_mount(MOUNTS, "/data/x", "0:43", 31).type == "btrfs"


def test_without_an_id_the_longest_mount_point_of_the_device_decides():
    assert find_mount(MOUNTS, "/mnt/with space/deeper/f", "0:42", None).type == "fuse.sshfs"
    assert find_mount(MOUNTS, "/mnt/with space/deeperf", "0:41", None).type == "nfs4"
    assert find_mount(MOUNTS, "/database", "254:0", None).type == "ext4"


def test_of_two_mounts_on_one_point_the_later_covers_the_earlier():
    assert find_mount(MOUNTS, "/data/x", "9:9", None).type == "xfs"


def test_no_mount_at_all_is_none():
    assert find_mount((), "/x", "1:1", None) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ext4", "local"),
        ("xfs", "local"),
        ("btrfs", "local"),
        ("nfs4", "remote"),
        ("fuse.anything", "remote"),
        ("tmpfs", "memory"),
        ("overlay", "unknown"),
        ("fuseblk", "unknown"),
    ],
)
def test_a_filesystem_type_has_a_kind(name, kind):
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    ("kind", "choice"),
    [
        ("local", ("direct", "qualified-local-filesystem")),
        ("remote", ("buffered", "remote-filesystem-prefers-page-cache")),
        ("memory", ("buffered", "memory-filesystem-is-the-page-cache")),
        ("unknown", ("buffered", "unknown-filesystem-safe-default")),
    ],
)
def test_auto_reads_directly_only_from_known_local_filesystems(kind, choice):
    assert choose_io(evolve(EXT4, kind=kind)) == choice


def test_an_explicit_choice_is_never_changed():
    assert choose_io(evolve(EXT4, kind="remote"), "direct") == ("direct", "explicit-policy")


def test_the_machines_own_dev_shm_is_memory():
    found = filesystem_of("/dev/shm")

    assert (found.type, found.kind, found.mountpoint) == ("tmpfs", "memory", "/dev/shm")
    assert found.free_bytes > 0


def test_a_path_that_does_not_exist_yet_has_the_filesystem_of_its_nearest_ancestor(tmp_path):
    wanted = filesystem_of(tmp_path / "not" / "yet")

    assert evolve(wanted, path="", free_bytes=0) == evolve(filesystem_of(tmp_path), path="", free_bytes=0)
    assert wanted.path == str(tmp_path / "not" / "yet")


def test_a_link_is_followed_to_where_the_bytes_are(tmp_path):
    (tmp_path / "link").symlink_to("/dev/shm")

    assert filesystem_of(tmp_path / "link").kind == "memory"


def test_an_open_file_is_enough(tmp_path):
    (tmp_path / "f").write_text("x")
    descriptor = os.open(tmp_path / "f", os.O_RDONLY)
    try:
        found = filesystem_behind(descriptor, path="renamed since")
    finally:
        os.close(descriptor)

    assert found.type == filesystem_of(tmp_path).type
    assert found.path == "renamed since"
