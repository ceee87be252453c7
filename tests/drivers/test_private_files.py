"""Whatever decides what is started is read only when it is ours alone: owner, mode and kind, at open."""

import os

import pytest

from coldsnap.artifact import Artifact
from coldsnap.drivers.tree_record import TREE, TreeRecord, read_tree_record, write_tree_record
from coldsnap.drivers.volatile import put_back, save_volatile
from coldsnap.drivers.volatile_index import BLOB, INDEX, read_index
from coldsnap.errors import AdmissionError, FormatError
from coldsnap.keeper.client import Keeper
from coldsnap.keeper.directive import Directive, Endpoint, read_acks, read_directive, write_directive

STRANGER = 65534


def opened(path):
    return os.open(path, os.O_DIRECTORY | os.O_RDONLY)


class Files:
    """Small files of each kind, and how each is read."""

    def __init__(self, base):
        self.base = base
        capsule, root = base / "capsule", base / "root"
        for directory in (capsule, root / "data", base / "rank" / "ack"):
            directory.mkdir(mode=0o700, parents=True)
        (root / "data" / "kept").write_text("kept")
        self.capsule_fd, self.root_fd = opened(capsule), opened(root)
        write_tree_record(self.capsule_fd, TreeRecord(nvidia_pids=(), image_bytes={}))
        self.saved = save_volatile(self.root_fd, self.capsule_fd, {"/data/kept"}, skip=())
        write_directive(base / "rank", Directive.new(operation="launch", endpoint=Endpoint(host="127.0.0.1", port=1)))
        ack = '{"engine":"e","incarnation":"i","pid":1,"plugin_abi":1,"reseeded":[],"role":"api","versions":{}}'
        (base / "rank" / "ack" / "1.json").write_text(ack)
        (base / "rank" / "ack" / "1.json").chmod(0o600)
        self.readers = {
            f"capsule/{TREE}": lambda: read_tree_record(self.capsule_fd),
            f"capsule/{INDEX}": lambda: read_index(self.capsule_fd),
            f"capsule/{BLOB}": self.put_back,
            "rank/directive.json": lambda: read_directive(base / "rank" / "directive.json"),
            "rank/ack/1.json": lambda: read_acks(base / "rank"),
        }

    def put_back(self):
        (self.base / "root" / "data" / "kept").unlink()
        put_back(self.saved, self.root_fd, self.capsule_fd)

    def close(self):
        os.close(self.capsule_fd)
        os.close(self.root_fd)


@pytest.fixture
def files(tmp_path):
    files = Files(tmp_path)
    yield files
    files.close()


NAMES = [
    "capsule/tree.json",
    "capsule/volatile.json",
    "capsule/volatile.blob",
    "rank/directive.json",
    "rank/ack/1.json",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_ours_alone_is_read(files, name):
    files.readers[name]()


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_another_user_is_refused(files, name):
    os.chown(files.base / name, STRANGER, STRANGER)

    with pytest.raises(FormatError, match="belongs to uid 65534") as refused:
        files.readers[name]()

    assert refused.value.rule == "evidence.2"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", [0o640, 0o602])
def test_a_file_that_others_may_read_or_write_is_refused(files, name, mode):
    (files.base / name).chmod(mode)

    with pytest.raises(FormatError, match="is open to group or others") as refused:
        files.readers[name]()

    assert refused.value.rule == "evidence.3"


@pytest.mark.parametrize("name", NAMES)
def test_a_symbolic_link_in_the_place_of_a_file_is_refused(files, name):
    path = files.base / name
    path.rename(files.base / "moved")
    path.symlink_to(files.base / "moved")

    with pytest.raises((FormatError, OSError), match="symbolic link|cannot be"):
        files.readers[name]()


def test_the_keeper_of_another_users_run_directory_is_not_asked(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    run_dir.chmod(0o722)

    with pytest.raises(AdmissionError, match="writable by nobody else, found uid 0, mode 722"):
        Keeper.connect(run_dir)


def test_an_artifact_of_another_user_is_refused(tmp_path):
    artifact = tmp_path / "artifact"
    artifact.mkdir(mode=0o700)
    (artifact / "artifact.json").touch(mode=0o600)
    os.chown(artifact, STRANGER, STRANGER)

    with pytest.raises(FormatError, match="belongs to uid 65534"):
        Artifact.open(artifact)
