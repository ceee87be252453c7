"""Trees: packed alike everywhere, staged read-only, verified by content."""

import io
import os
import stat
import tarfile
import threading

import pytest

from coldsnap.artifact.canonical import sha256_of
from coldsnap.artifact.tree import Trees, pack_tree, unpack_tree
from coldsnap.errors import FormatError, IntegrityError

FILES = {"config.json": b"{}", "code/model.py": b"x = 1\n", "code/deep/a": b"", "ä" * 120: b"\0" * 5000}


@pytest.fixture
def trees(tmp_path):
    return Trees(tmp_path / "store")


def test_an_archive_depends_on_names_and_contents_alone():
    assert pack_tree(FILES) == pack_tree(dict(reversed(FILES.items())))
    assert unpack_tree(pack_tree(FILES), path="x") == FILES
    assert pack_tree({**FILES, "config.json": b"[]"}) != pack_tree(FILES)
    # What an older version packed must have the same name for ever.
    assert sha256_of(pack_tree({"a/b": b"c"})).endswith("c6b6acd639b9e3f9")


def test_a_staged_tree_is_read_only_and_used_by_its_path(trees):
    tree = trees.add(FILES)

    assert tree.path == trees.path(tree.sha256)
    for name, data in FILES.items():
        assert (tree.path / name).read_bytes() == data
        assert stat.S_IMODE((tree.path / name).stat().st_mode) == 0o444
    for directory, _, _ in os.walk(tree.path):
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o555
    assert stat.S_IMODE(trees.directory.stat().st_mode) == 0o700


def test_an_archive_is_brought_into_another_store(trees, tmp_path):
    tree = trees.add(FILES)
    there = Trees(tmp_path / "other").bring(tree.archive, sha256=tree.sha256)

    assert there.sha256 == tree.sha256 and there.path.parent != tree.path.parent
    assert (there.path / "code/model.py").read_bytes() == b"x = 1\n"


def test_an_archive_with_another_digest_is_not_staged(trees, tmp_path):
    tree = trees.add(FILES)
    other = Trees(tmp_path / "other")
    with pytest.raises(IntegrityError, match=r"tree\.4"):
        other.bring(tree.archive, sha256=f"sha256:{'0' * 64}")
    assert not other.root.exists()


def changed(path):
    os.chmod(path / "config.json", 0o644)
    (path / "config.json").write_bytes(b"[]")
    os.chmod(path / "config.json", 0o444)


def added(path):
    os.chmod(path / "code", 0o755)
    (path / "code" / "sitecustomize.py").write_bytes(b"")
    os.chmod(path / "code", 0o555)


def removed(path):
    os.chmod(path, 0o755)
    (path / "config.json").unlink()
    os.chmod(path, 0o555)


def linked(path):
    removed(path)
    os.chmod(path, 0o755)
    (path / "config.json").symlink_to("code/model.py")
    os.chmod(path, 0o555)


@pytest.mark.parametrize(
    ("harm", "where"),
    [
        (changed, "config.json"),
        (added, "code/sitecustomize.py"),
        (removed, "config.json"),
        (linked, "config.json"),
        (lambda path: os.chmod(path / "config.json", 0o644), "config.json"),
        (lambda path: os.chmod(path / "code", 0o755), "code"),
    ],
    ids=["changed", "added", "removed", "linked", "writable file", "writable directory"],
)
def test_a_tree_that_is_not_its_archive_is_refused_with_the_file(trees, harm, where):
    tree = trees.add(FILES)
    harm(tree.path)

    for use in (lambda: trees.verify(tree.sha256), lambda: trees.add(FILES)):
        with pytest.raises(IntegrityError, match=r"tree\.3") as caught:
            use()
        assert caught.value.path == str(tree.path / where)


def test_a_tree_that_was_staged_half_is_staged_again(tmp_path):
    class KilledError(BaseException):
        pass

    points = []
    Trees(tmp_path / "whole", at=points.append).add(FILES)
    assert len(points) > 5
    for number in range(len(points)):
        seen = []

        def kill(point, seen=seen, number=number):
            seen.append(point)
            if len(seen) > number:
                raise KilledError

        root = tmp_path / str(number)
        with pytest.raises(KilledError):
            Trees(root, at=kill).add(FILES)
        tree = Trees(root).add(FILES)
        assert (tree.path / "config.json").read_bytes() == b"{}"


def test_several_processes_stage_one_tree(trees):
    found, failed = [], []

    def stage():
        try:
            found.append(Trees(trees.root).add(FILES).path)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=stage) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len(set(found)) == 1 and len(found) == 6


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../b", "./a", "a//b", "a/", "a\0b"])
def test_a_name_that_leaves_the_tree_is_refused(name):
    with pytest.raises(FormatError) as caught:
        pack_tree({name: b""})
    assert caught.value.rule == "tree.2"


def test_a_file_cannot_be_a_directory_too():
    with pytest.raises(FormatError) as caught:
        pack_tree({"a": b"", "a/b": b""})
    assert caught.value.rule == "tree.2"


def tar_of(*entries):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry, data in entries:
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def entry(name, **more):
    made = tarfile.TarInfo(name)
    made.mode = 0o444
    for key, value in more.items():
        setattr(made, key, value)
    return made


@pytest.mark.parametrize(
    "data",
    [
        b"no tar at all",
        pack_tree({"a": b"1"})[:-512],
        tar_of((entry("a", mtime=1), b"")),
        tar_of((entry("a", mode=0o755), b"")),
        tar_of((entry("b"), b""), (entry("a"), b"")),
        tar_of((entry("a"), b""), (entry("a"), b"")),
        tar_of((entry("a", type=tarfile.SYMTYPE, linkname="/etc/passwd"), b"")),
        tar_of((entry("a", type=tarfile.DIRTYPE), b"")),
    ],
    ids=["nonsense", "cut", "mtime", "mode", "order", "twice", "link", "directory"],
)
def test_an_archive_that_was_made_in_another_way_is_refused(data):
    with pytest.raises(FormatError) as caught:
        unpack_tree(data, path="x.tar")
    assert caught.value.rule == "tree.1"
