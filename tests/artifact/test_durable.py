"""SIGKILL at every write, fsync and rename leaves a name absent or whole, and the next run succeeds."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest
from faults import failing_at, killed_at, points_of
from made import write_artifact

from coldsnap.artifact import Artifact
from coldsnap.artifact.durable import (
    is_committed,
    locked,
    remove_committed,
    remove_partials,
    staged_file,
    unharmed,
    write_file_durably,
)
from coldsnap.errors import ArtifactError


def test_a_capture_killed_at_any_point_leaves_no_artifact_or_a_whole_one(tmp_path: Path) -> None:
    points = points_of(lambda at: write_artifact(tmp_path / "counted", at=at))
    acts = {point.rpartition(":")[2] for point in points}
    assert {"mkdir", "create", "write", "fsync", "rename"} == acts
    commits = []

    for count in range(len(points)):
        output = tmp_path / "made"
        assert killed_at(count, lambda at: write_artifact(tmp_path / "made", at=at))
        commits.append(is_committed(output))
        if commits[-1]:
            assert Artifact.open(output).verify("full").files
            remove_committed(output)
        else:
            with pytest.raises(ArtifactError):
                Artifact.open(output)
        # The same run without the fault succeeds, and leaves nothing of the one before.
        assert write_artifact(output).verify().bytes_hashed == 0
        remove_committed(output)
        assert ["counted"] == [path.name for path in tmp_path.iterdir()]

    # One commit point: before it nothing, after it the whole.
    assert sorted(commits) == commits
    assert points[commits.index(True) - 1] == "artifact.json:rename"


def test_a_deletion_killed_at_any_point_leaves_the_artifact_whole_or_gone(tmp_path: Path) -> None:
    write_artifact(tmp_path / "made")
    points = points_of(lambda at: remove_committed(tmp_path / "made", at=at))

    for count in range(len(points)):
        write_artifact(tmp_path / "made")
        assert killed_at(count, lambda at: remove_committed(tmp_path / "made", at=at))
        if is_committed(tmp_path / "made"):
            Artifact.open(tmp_path / "made").verify("full")
            remove_committed(tmp_path / "made")
        else:
            write_artifact(tmp_path / "made")
            remove_committed(tmp_path / "made")
        assert [] == list(tmp_path.iterdir())


def test_a_file_killed_at_any_point_has_its_old_or_its_new_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    points = points_of(lambda at: write_file_durably(path, b"old", at=at))
    assert ["file:create", "file:write", "file:fsync", "file:rename"] == points[:4]

    for count in range(len(points)):
        path.write_bytes(b"old")
        assert killed_at(count, lambda at: write_file_durably(path, b"new", at=at))
        assert path.read_bytes() in {b"old", b"new"}
        remove_partials(tmp_path)
        assert [path] == list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_an_io_error_at_any_point_leaves_nothing_behind(tmp_path: Path, error: int) -> None:
    points = points_of(lambda at: write_artifact(tmp_path / "counted", at=at))
    commit = points.index("artifact.json:rename")

    for count in range(commit + 1):
        with pytest.raises((OSError, ArtifactError)):
            write_artifact(tmp_path / "made", at=failing_at(count, error))
        assert ["counted"] == [path.name for path in tmp_path.iterdir()]


def test_a_partial_name_in_use_is_not_stale(tmp_path: Path) -> None:
    with staged_file(tmp_path, "pack") as staged:
        assert [] == remove_partials(tmp_path)
        assert staged.path.exists()
    assert [] == list(tmp_path.iterdir())


def test_stale_partial_names_are_named_by_a_dry_run_and_removed_by_the_real_one(tmp_path: Path) -> None:
    (tmp_path / ".pack.partial-00").touch()
    (tmp_path / ".made.partial-00").mkdir()
    (tmp_path / ".made.partial-00/file").touch()
    (tmp_path / "innocent").touch()

    assert 2 == len(remove_partials(tmp_path, dry_run=True))
    assert 3 == len(list(tmp_path.iterdir()))
    assert 2 == len(remove_partials(tmp_path))
    assert ["innocent"] == [path.name for path in tmp_path.iterdir()]


def test_a_lock_is_private_and_excludes(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with locked(path):
        other = os.open(path, os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)

    assert 0o600 == path.stat().st_mode & 0o777


def test_the_fault_point_of_real_life_does_nothing() -> None:
    unharmed("anything")
