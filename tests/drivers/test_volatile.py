"""Volatile files: saved, read back strictly, put back as they were. A directory stands for the tree's root."""

import json
import os
import socket
import stat
import subprocess
from contextlib import closing, contextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coldsnap.drivers.volatile import ROOT, put_back, remove_volatile, save_volatile
from coldsnap.drivers.volatile_index import BLOB, INDEX, VolatileEntry, VolatileFiles, encode_index, read_index
from coldsnap.errors import DriverError, FormatError

PAGE = 4096


@contextmanager
def opened(path):
    fd = os.open(path, os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


class Place:
    """A root with a /dev/shm of its own, and a capsule."""

    def __init__(self, directory):
        self.root, self.capsule = directory / "root", directory / "capsule"
        self.shm = self.root / ROOT.lstrip("/")
        self.shm.mkdir(parents=True)
        self.capsule.mkdir()

    def save(self, paths=(ROOT,), skip=()):
        with opened(self.root) as root, opened(self.capsule) as capsule:
            return save_volatile(root, capsule, paths, skip=skip)

    def read(self):
        with opened(self.capsule) as capsule:
            return read_index(capsule)

    def put_back(self, directory):
        other = Place.__new__(Place)
        other.root = directory
        other.shm = directory / ROOT.lstrip("/")
        other.shm.mkdir(parents=True, exist_ok=True)
        with opened(directory) as root, opened(self.capsule) as capsule:
            put_back(self.read(), root, capsule)
        return other


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def sparse(path, size, *pieces):
    with open(path, "wb") as file:
        file.truncate(size)
        for offset, data in pieces:
            file.seek(offset)
            file.write(data)


def test_files_directories_and_links_come_back_with_owner_mode_and_bytes(place, tmp_path):
    sparse(place.shm / "psm_1", 64 * PAGE, (8 * PAGE, b"x" * PAGE), (40 * PAGE, b"y" * 100))
    (place.shm / "tmp").mkdir(mode=0o711)
    (place.shm / "tmp" / "kept").write_text("kept")
    os.symlink("../psm_1", place.shm / "tmp" / "link")
    (place.shm / "empty").touch(mode=0o640)
    os.chmod(place.shm / "tmp" / "kept", 0o604)
    os.chown(place.shm / "tmp" / "kept", 12, 34)
    saved = place.save()
    other = place.put_back(tmp_path / "other")
    assert (other.shm / "psm_1").read_bytes() == (place.shm / "psm_1").read_bytes()
    assert (other.shm / "psm_1").stat().st_blocks * 512 <= 8 * PAGE
    assert saved.data_bytes == 2 * PAGE + len("kept")
    info = (other.shm / "tmp" / "kept").stat()
    assert (stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid) == (0o604, 12, 34)
    assert stat.S_IMODE((other.shm / "tmp").stat().st_mode) == 0o711
    assert os.readlink(other.shm / "tmp" / "link") == "../psm_1"
    assert (other.shm / "empty").stat().st_size == 0
    assert place.read() == saved


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    size=st.integers(0, 40 * PAGE),
    pieces=st.lists(st.tuples(st.integers(0, 40 * PAGE), st.binary(min_size=1, max_size=3 * PAGE)), max_size=4),
)
def test_any_sparse_file_comes_back_byte_for_byte(tmp_path_factory, size, pieces):
    directory = tmp_path_factory.mktemp("sparse")
    place = Place(directory)
    sparse(place.shm / "f", size, *pieces)
    place.save()
    assert (place.put_back(directory / "other").shm / "f").read_bytes() == (place.shm / "f").read_bytes()


def test_two_names_of_one_file_come_back_as_two_names_of_one_file(place, tmp_path):
    (place.shm / "sem.one").write_text("semaphore")
    os.link(place.shm / "sem.one", place.shm / "link_remap.1")
    saved = place.save()
    assert [entry.kind for entry in saved.entries] == ["file", "hardlink"]
    assert saved.data_bytes == len("semaphore")
    other = place.put_back(tmp_path / "other")
    assert os.path.samefile(other.shm / "sem.one", other.shm / "link_remap.1")
    assert (other.shm / "sem.one").read_text() == "semaphore"


def test_sockets_are_left_and_skipped_paths_are_not_saved(place):
    (place.shm / "coldsnap" / "run").mkdir(parents=True)
    (place.shm / "coldsnap" / "run" / "engine.log").touch()
    with closing(socket.socket(socket.AF_UNIX)) as ipc:
        ipc.bind(str(place.shm / "ipc"))
        saved = place.save(skip=[f"{ROOT}/coldsnap/run"])
    assert [entry.path for entry in saved.entries] == [f"{ROOT}/coldsnap"]


def test_single_files_bring_the_directories_above_them_and_nothing_else(place):
    (place.shm / "a" / "b").mkdir(parents=True)
    (place.shm / "a" / "b" / "mine").write_text("mine")
    (place.shm / "a" / "b" / "foreign").write_text("foreign")
    saved = place.save([f"{ROOT}/a/b/mine"])
    assert [(entry.path, entry.kind) for entry in saved.entries] == [
        (f"{ROOT}/a", "dir"),
        (f"{ROOT}/a/b", "dir"),
        (f"{ROOT}/a/b/mine", "file"),
    ]


def test_a_foreign_file_is_never_overwritten_and_what_was_put_back_is_removed(place, tmp_path):
    for name in ("a", "b", "c"):
        (place.shm / name).write_text("ours")
    place.save()
    other = tmp_path / "other" / ROOT.lstrip("/")
    other.mkdir(parents=True)
    (other / "b").write_text("foreign")
    with pytest.raises(DriverError, match=f"{ROOT}/b cannot be put back: File exists"):
        place.put_back(tmp_path / "other")
    assert sorted(path.name for path in other.iterdir()) == ["b"]
    assert (other / "b").read_text() == "foreign"


def test_a_symbolic_link_on_the_way_is_not_followed(place, tmp_path):
    (place.shm / "tmp").mkdir()
    (place.shm / "tmp" / "f").write_text("ours")
    place.save()
    other = tmp_path / "other" / ROOT.lstrip("/")
    other.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    os.symlink(tmp_path / "elsewhere", other / "tmp")
    with pytest.raises(DriverError, match="cannot be put back"):
        place.put_back(tmp_path / "other")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_full_filesystem_leaves_nothing_behind(place, tmp_path):
    (place.shm / "small").write_bytes(b"s" * PAGE)
    (place.shm / "zlarge").write_bytes(b"l" * (256 * PAGE))
    place.save()
    other = tmp_path / "other" / ROOT.lstrip("/")
    other.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(other)], check=True, timeout=10)
    try:
        with pytest.raises(DriverError, match="No space left on device"):
            place.put_back(tmp_path / "other")
        assert not list(other.iterdir())
    finally:
        subprocess.run(["umount", str(other)], check=True, timeout=10)


def test_removing_takes_ours_and_leaves_directories_that_others_use(place):
    (place.shm / "tmp").mkdir()
    (place.shm / "tmp" / "ours").touch()
    (place.shm / "tmp" / "theirs").touch()
    saved = place.save([f"{ROOT}/tmp/ours"])
    with opened(place.root) as root:
        remove_volatile(root, saved.entries)
        remove_volatile(root, saved.entries)
    assert [path.name for path in (place.shm / "tmp").iterdir()] == ["theirs"]


def entry(**changes):
    whole = {
        "path": f"{ROOT}/f",
        "kind": "file",
        "mode": 0o600,
        "uid": 0,
        "gid": 0,
        "size_bytes": 10,
        "extents": [[0, 4]],
        "target": "",
    }
    return whole | changes


def document(*entries, **changes):
    return {"format": 1, "entries": list(entries)} | changes


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", 1),
        ("{", 1),
        ("[]", 1),
        (json.dumps(document(format=2)), 1),
        (json.dumps(document(more=1)), 1),
        (json.dumps(document() | {"entries": {}}), 1),
        (json.dumps(document("text")), 2),
        (json.dumps(document(entry() | {"more": 1})), 2),
        (json.dumps(document(entry(kind="socket"))), 2),
        (json.dumps(document(entry(mode=-1))), 2),
        (json.dumps(document(entry(mode=0o20000))), 2),
        (json.dumps(document(entry(uid=True))), 2),
        (json.dumps(document(entry(size_bytes="10"))), 2),
        (json.dumps(document(entry(extents={}))), 2),
        (json.dumps(document(entry(extents=[[0]]))), 2),
        (json.dumps(document(entry(extents=[[0, 4.0]]))), 2),
        (json.dumps(document(entry(target=None))), 2),
        (json.dumps(document(entry(path="f"))), 3),
        (json.dumps(document(entry(path="/dev/shm/../../etc/passwd"))), 3),
        (json.dumps(document(entry(path="/dev/shm/a\x00b"))), 3),
        (json.dumps(document(entry(), entry())), 3),
        (json.dumps(document(entry(kind="hardlink", target="/dev/shm/g", extents=[]))), 3),
        (json.dumps(document(entry(kind="hardlink", target="/dev/shm/g"), entry(path="/dev/shm/g"))), 3),
        (json.dumps(document(entry(extents=[[8, 4]]))), 4),
        (json.dumps(document(entry(extents=[[0, 4], [2, 2]]))), 4),
        (json.dumps(document(entry(extents=[[0, 0]]))), 4),
    ],
)
def test_a_broken_index_is_refused_with_its_rule(place, text, rule):
    (place.capsule / INDEX).touch(mode=0o600)
    (place.capsule / INDEX).write_text(text)
    with pytest.raises(FormatError) as caught:
        place.read()
    assert caught.value.rule == f"volatile.{rule}"


def test_an_index_that_is_not_there_is_refused(place):
    with pytest.raises(FormatError, match=r"volatile\.1"):
        place.read()


def test_a_truncated_blob_is_refused_before_anything_is_made(place, tmp_path):
    (place.shm / "f").write_bytes(b"f" * PAGE)
    place.save()
    os.truncate(place.capsule / BLOB, PAGE - 1)
    with pytest.raises(FormatError) as caught:
        place.put_back(tmp_path / "other")
    assert caught.value.rule == "volatile.4"
    assert not list((tmp_path / "other" / ROOT.lstrip("/")).iterdir())


names = st.text(st.characters(exclude_characters="/\x00", exclude_categories=["Cs"]), min_size=1, max_size=9).filter(
    lambda name: name not in {".", ".."}
)


@given(st.lists(names, max_size=5, unique=True), st.integers(0, 0o7777), st.integers(0, 2**32 - 1))
def test_an_index_read_is_the_index_written(tmp_path_factory, found, mode, owner):
    directory = tmp_path_factory.mktemp("index")
    files = VolatileFiles(
        entries=tuple(
            VolatileEntry(
                path=f"{ROOT}/{name}", kind="file", mode=mode, uid=owner, gid=0, size_bytes=9, extents=((1, 2), (5, 4))
            )
            for name in found
        )
    )
    (directory / INDEX).touch(mode=0o600)
    (directory / INDEX).write_bytes(encode_index(files))
    with opened(directory) as capsule:
        assert read_index(capsule) == files
