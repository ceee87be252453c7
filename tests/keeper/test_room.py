"""Where there is no room for a run directory, nothing is started and nothing is left."""

import contextlib
import json
import os
import subprocess

import pytest
from keeper_world import tagged, until

from coldsnap.errors import AdmissionError, ColdSnapError, StepError
from coldsnap.keeper import kernel
from coldsnap.keeper.client import Keeper
from coldsnap.keeper.connection import Interpreter
from coldsnap.keeper.directive import Directive, Endpoint, write_directive
from coldsnap.keeper.undo import KILL


@contextlib.contextmanager
def small(path, size):
    path.mkdir()
    kernel.mount("tmpfs", str(path), "tmpfs", 0, f"size={size},mode=700")
    try:
        yield path
        # Nobody holds anything there, once the guard's end has come to an end itself.
        until(lambda: subprocess.run(["umount", "-q", str(path)]).returncode == 0, "the end of every use")
    finally:
        if os.path.ismount(path):
            subprocess.run(["umount", "-l", str(path)], check=True)


def fill(root):
    """Leave no page of a filesystem."""
    fd = os.open(root / "ballast", os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while os.write(fd, bytes(1 << 16)):
            pass
    os.close(fd)


def test_a_run_root_without_room_is_refused_in_one_sentence(tmp_path):
    with small(tmp_path / "root", "64k") as root:
        with pytest.raises(AdmissionError, match=r"has room for \d+ KiB .* at least 4096 KiB .*Placement.run_dir"):
            Keeper.start(root / "engine")
        assert list(root.iterdir()) == []


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "coldsnap").write_text("a file")

    for place in (tmp_path / "coldsnap" / "engine", tmp_path / "coldsnap" / "deeper" / "engine"):
        with pytest.raises(AdmissionError, match=r"coldsnap(/deeper)? is not a directory, so that .*/engine"):
            Keeper.start(place)
    with pytest.raises(AdmissionError, match="coldsnap is not a directory; choose another run directory"):
        Keeper.start(tmp_path / "coldsnap")
    assert (tmp_path / "coldsnap").read_text() == "a file"


def test_room_that_goes_while_a_keeper_starts_leaves_nothing(tmp_path):
    with small(tmp_path / "root", "64k") as root:
        fill(root)
        with pytest.raises(AdmissionError, match="there is no room left for the run directory .*; free some there, or"):
            Interpreter(os.sys.executable).keep(root / "engine", private=True, labels={}, timeout_s=10)
        (root / "ballast").unlink()
        until(lambda: list(root.iterdir()) == [], "the end of the guard")


def test_room_that_goes_later_is_told_by_whoever_needs_it(private, tmp_path):
    with small(tmp_path / "root", "8m") as root:
        keeper = private.start(root / "engine")
        with keeper.operation("launch"):
            pass
        fill(root)
        with pytest.raises(StepError, match=r"No space left on device: 'journal\.jsonl'"):
            keeper.begin("launch", [KILL] * 400)  # a line of more than a page: what fits of it is taken back
        assert not keeper.in_flight
        journal = root / "engine" / "journal.jsonl"
        assert [json.loads(line)["event"] for line in journal.read_text().splitlines()] == ["begin", "end"]
        directive = Directive.new(operation="launch", endpoint=Endpoint(host="127.0.0.1", port=1))
        with pytest.raises(OSError, match=r"No space left on device: 'directive\.json'"):
            write_directive(keeper.rank_dir, directive)
        assert sorted(os.listdir(keeper.rank_dir)) == ["ack", "control", "engine.log"]

        keeper.stop(grace_s=0)
        assert not (root / "engine").exists()
        assert not tagged(private.tag)


def test_an_operation_is_undone_without_room_to_say_so(private, tmp_path):
    with small(tmp_path / "root", "8m") as root:
        half = tmp_path / "half"
        half.mkdir()
        keeper = private.start(root / "engine")
        private.serve(keeper)
        keeper.begin("capture", [{"kind": "remove", "path": str(half), "unless": "", "kept": ""}])
        fill(root)

        keeper.abort()

        assert not half.exists()
        assert keeper.status().state == "running"
        keeper.stop(grace_s=0)
        with pytest.raises(ColdSnapError):
            Keeper.connect(root / "engine")
