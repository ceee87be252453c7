"""An artifact is opened in milliseconds, admitted by evidence, and refused when a byte is wrong."""

from __future__ import annotations

import errno
import os
import pickle
import stat
from pathlib import Path

import attrs
import pytest
from made import FILES, descriptor, write_artifact

from coldsnap.artifact import Artifact, ArtifactWriter
from coldsnap.artifact import descriptor as documents
from coldsnap.artifact.durable import COMMITTED, UNCOMMITTED
from coldsnap.artifact.evidence import admit_tree
from coldsnap.errors import ArtifactError, FormatError, IntegrityError

PAGES = "capsule/rank0/images/pages-1.img"


@pytest.fixture(name="artifact")
def _artifact(tmp_path: Path) -> Artifact:
    return write_artifact(tmp_path / "made")


def flip(path: Path, offset: int = 0, *, restore_mtime: bool = False) -> None:
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    mtime = before.st_mtime_ns if restore_mtime else before.st_mtime_ns + 1
    os.utime(path, ns=(before.st_atime_ns, mtime))


def test_what_was_written_is_what_is_opened(artifact: Artifact) -> None:
    again = Artifact.open(artifact.path)

    assert artifact == again
    assert again.digest == again.descriptor.digest
    assert {"images": 70_011, "volatile": 4} == again.size_bytes
    assert again == pickle.loads(pickle.dumps(again))


def test_everything_is_private(artifact: Artifact) -> None:
    for path in (artifact.path, *artifact.path.rglob("*")):
        wanted = 0o700 if path.is_dir() else 0o600
        assert wanted == stat.S_IMODE(path.stat().st_mode), path


def test_a_new_artifact_is_admitted_by_stat_alone(artifact: Artifact) -> None:
    admission = artifact.verify()

    assert 0 == admission.bytes_hashed
    assert not admission.refreshed
    assert {"unchanged"} == {file.reason for file in admission.files}


def test_full_verification_reads_everything(artifact: Artifact) -> None:
    admission = artifact.verify("full")

    assert sum(map(len, FILES.values())) == admission.bytes_hashed
    assert {"full"} == {file.reason for file in admission.files}
    assert 0 == artifact.verify().bytes_hashed


def test_a_copy_has_no_valid_evidence_and_gets_its_own(artifact: Artifact, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    os.system(f"cp -r {artifact.path} {copy}")

    first = Artifact.open(copy).verify()
    second = Artifact.open(copy).verify()

    assert {"stale"} == {file.reason for file in first.files}
    assert first.refreshed
    assert 0 == second.bytes_hashed


def test_lost_or_damaged_evidence_costs_a_full_read_and_is_written_anew(artifact: Artifact) -> None:
    for damage in (b"", b"{}", b'{"format":2}', b"\xff"):
        (artifact.path / "evidence.json").write_bytes(damage)

        assert {"absent"} == {file.reason for file in artifact.verify().files}
        assert 0 == artifact.verify().bytes_hashed


@pytest.mark.parametrize("verify", ["evidence", "full"])
@pytest.mark.parametrize("name", FILES)
def test_a_flip_with_a_new_mtime_is_refused_under_both(artifact: Artifact, name: str, verify) -> None:
    flip(artifact.path / name)

    with pytest.raises(IntegrityError, match="evidence.5") as caught:
        artifact.verify(verify)
    assert caught.value.path == str(artifact.path / name)
    assert caught.value.expected != caught.value.actual


def test_a_flip_with_a_restored_mtime_is_refused_under_full_only(artifact: Artifact) -> None:
    flip(artifact.path / PAGES, restore_mtime=True)

    assert 0 == artifact.verify("evidence").bytes_hashed
    with pytest.raises(IntegrityError, match="evidence.5"):
        artifact.verify("full")


@pytest.mark.parametrize("verify", ["evidence", "full"])
def test_a_truncated_or_missing_file_is_refused(artifact: Artifact, verify) -> None:
    os.truncate(artifact.path / PAGES, 100)
    with pytest.raises(IntegrityError, match="evidence.4"):
        artifact.verify(verify)
    (artifact.path / PAGES).unlink()
    with pytest.raises(IntegrityError, match="missing"):
        artifact.verify(verify)


def test_a_file_nobody_listed_is_refused(artifact: Artifact) -> None:
    (artifact.path / "capsule/rank0/images/parent").symlink_to("/")

    with pytest.raises(FormatError) as caught:
        artifact.verify()
    assert caught.value.rule == "descriptor.9"


@pytest.mark.parametrize("verify", ["evidence", "full"])
def test_links_and_open_modes_are_refused(artifact: Artifact, tmp_path: Path, verify) -> None:
    path = artifact.path / PAGES
    path.chmod(0o640)
    with pytest.raises(FormatError, match="evidence.3"):
        artifact.verify(verify)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FormatError, match="evidence.1"):
        artifact.verify(verify)


def test_a_linked_or_open_directory_is_refused(artifact: Artifact, tmp_path: Path) -> None:
    images = artifact.path / "capsule/rank0/images"
    images.chmod(0o750)
    with pytest.raises(FormatError, match="evidence.3"):
        artifact.verify()
    images.rename(tmp_path / "images")
    images.symlink_to(tmp_path / "images")
    with pytest.raises(FormatError, match="descriptor.9|evidence.1"):
        artifact.verify()
    artifact.path.chmod(0o755)
    with pytest.raises(FormatError, match="evidence.3"):
        Artifact.open(artifact.path)


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_evidence_that_others_could_read_or_write_is_refused(artifact: Artifact, mode: int) -> None:
    (artifact.path / "evidence.json").chmod(mode)

    with pytest.raises(FormatError, match="evidence.3"):
        artifact.verify()


def test_linked_evidence_is_refused(artifact: Artifact, tmp_path: Path) -> None:
    (artifact.path / "evidence.json").rename(tmp_path / "elsewhere.json")
    (artifact.path / "evidence.json").symlink_to(tmp_path / "elsewhere.json")

    with pytest.raises(FormatError, match="evidence.1"):
        artifact.verify()


def test_every_flip_and_every_truncation_of_the_descriptor_is_refused(artifact: Artifact) -> None:
    data = (artifact.path / COMMITTED).read_bytes()
    assert documents.decode(data, path="x") == (artifact.descriptor, artifact.digest)

    for offset in range(len(data)):
        flipped = bytearray(data)
        flipped[offset] ^= (1, 0x20)[offset % 2]
        with pytest.raises(ArtifactError, match=r"rule (json|descriptor)\.\d+"):
            documents.decode(bytes(flipped), path="x")
    for size in range(0, len(data), 5):
        with pytest.raises(FormatError):
            documents.decode(data[:size], path="x")


def test_another_format_is_refused_by_name_before_anything_else(artifact: Artifact) -> None:
    path = artifact.path / COMMITTED
    path.write_bytes(path.read_bytes().replace(b'"format":9', b'"format":8'))

    with pytest.raises(FormatError, match="format 8 is not format 9") as caught:
        Artifact.open(artifact.path)
    assert caught.value.rule == "descriptor.2"


def test_an_absent_an_uncommitted_and_a_foreign_directory_have_their_own_sentences(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="there is no artifact at"):
        Artifact.open(tmp_path / "nothing")
    with pytest.raises(ArtifactError, match="is not an artifact"):
        Artifact.open(tmp_path)
    (tmp_path / UNCOMMITTED).touch()
    with pytest.raises(ArtifactError, match="is not committed"):
        Artifact.open(tmp_path)


def test_a_capture_refuses_an_output_that_exists(artifact: Artifact, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/data").touch()
    for output in (artifact.path, tmp_path / "file", tmp_path / "empty", tmp_path / "full"):
        with pytest.raises(ArtifactError, match="already exists"), ArtifactWriter.create(output):
            pass
        assert output.exists()


def test_two_captures_to_one_output_do_not_meet(tmp_path: Path) -> None:
    with ArtifactWriter.create(tmp_path / "made") as first:
        with pytest.raises(ArtifactError, match="being written by another capture"):
            write_artifact(tmp_path / "made")
        assert first.path.is_dir()


def test_a_failed_capture_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), ArtifactWriter.create(tmp_path / "made") as writer:
        writer.directory("capsule/rank0")
        1 / 0  # noqa: B018

    assert [] == list(tmp_path.iterdir())


def test_a_capture_that_was_undone_while_it_committed_says_so_and_nothing_is_there(tmp_path: Path) -> None:
    def undone(point: str) -> None:
        if point == f"{COMMITTED}:rename":
            (tmp_path / "made").rename(tmp_path / "aside")

    with pytest.raises(ArtifactError, match="was removed before it was complete: the keeper of its engine has ended"):
        write_artifact(tmp_path / "made", at=undone)

    assert not (tmp_path / "made").exists()


def test_a_descriptor_must_list_exactly_the_sealed_files(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="do not agree"), ArtifactWriter.create(tmp_path / "made") as writer:
        writer.directory("capsule/rank0")
        (writer.path / "capsule/rank0/data").write_bytes(b"x")
        writer.seal("capsule/rank0")
        writer.commit(descriptor())


def test_an_artifact_holds_only_regular_files(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="not a regular file"), ArtifactWriter.create(tmp_path / "made") as writer:
        (writer.directory("capsule/rank0") / "link").symlink_to("/etc/hostname")
        writer.seal("capsule/rank0")


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda unit: {"files": (attrs.evolve(unit.files[0], path="../out"),)}, "json.10"),
        (lambda unit: {"files": (*unit.files, unit.files[0])}, "json.11"),
        (lambda unit: {"images": "elsewhere"}, "descriptor.4"),
        (lambda unit: {"root_pid": 1}, "descriptor.4"),
    ],
)
def test_a_capsule_that_breaks_a_rule_cannot_be_described(artifact: Artifact, change, rule: str) -> None:
    unit = artifact.descriptor.capsule.units[0]

    with pytest.raises(ValueError) as caught:  # noqa: PT011
        attrs.evolve(unit, **change(unit))
    assert caught.value.rule == rule


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_medium_that_takes_no_evidence_does_not_change_the_admission(artifact: Artifact, number: int) -> None:
    def at(point: str) -> None:
        raise OSError(number, os.strerror(number))

    (artifact.path / "evidence.json").unlink()
    admission = admit_tree(artifact.path, artifact.descriptor.files, at=at)

    assert not admission.refreshed
    assert {"absent"} == {file.reason for file in admission.files}
    assert not (artifact.path / "evidence.json").exists()


def test_a_medium_that_fails_otherwise_is_an_error(artifact: Artifact) -> None:
    def at(point: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (artifact.path / "evidence.json").unlink()
    with pytest.raises(OSError, match="Input/output error"):
        admit_tree(artifact.path, artifact.descriptor.files, at=at)
