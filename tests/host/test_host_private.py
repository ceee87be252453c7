"""Records that only their owner could have written."""

import os

import pytest

from coldsnap.errors import AdmissionError
from coldsnap.host import private


def test_a_record_comes_back_and_is_private(cache):
    private.write("r.json", {"a": 1}, cache)

    assert private.read("r.json", cache) == {"a": 1}
    assert cache.stat().st_mode & 0o777 == 0o700
    assert (cache / "r.json").stat().st_mode & 0o777 == 0o600


def test_a_shorter_record_leaves_nothing_of_the_longer_one(cache):
    private.write("r.json", {"a": "x" * 1000}, cache)
    private.write("r.json", {}, cache)

    assert private.read("r.json", cache) == {}
    assert (cache / "r.json").read_text() == "{}\n"


def test_an_absent_record_is_empty_and_nothing_is_created(cache):
    assert private.read("r.json", cache) == {}
    assert not cache.exists()


@pytest.mark.parametrize("text", ["", '{"a": 1', "[1]", "\x00\xff"])
def test_a_torn_record_counts_as_absent(cache, text):
    private.write("r.json", {}, cache)
    (cache / "r.json").write_text(text)

    assert private.read("r.json", cache) == {}


def test_a_record_that_others_may_write_is_refused(cache):
    private.write("r.json", {}, cache)
    (cache / "r.json").chmod(0o666)

    with pytest.raises(AdmissionError, match="written by others"):
        private.read("r.json", cache)


def test_a_directory_that_others_may_write_is_refused(cache):
    cache.mkdir(mode=0o700)
    cache.chmod(0o777)

    with pytest.raises(AdmissionError, match="written by others"):
        private.write("r.json", {}, cache)


def test_a_link_is_refused_in_place_of_the_directory(cache, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    cache.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(AdmissionError, match="link"):
        private.write("r.json", {}, cache)


def test_a_link_is_refused_in_place_of_the_record(cache, tmp_path):
    private.write("other.json", {}, cache)
    (tmp_path / "target").write_text("{}")
    (cache / "r.json").symlink_to(tmp_path / "target")

    with pytest.raises(AdmissionError, match="symbolic link"):
        private.write("r.json", {"a": 1}, cache)
    assert (tmp_path / "target").read_text() == "{}"


def test_a_pipe_in_place_of_the_record_is_refused_at_once(cache):
    cache.mkdir(mode=0o700)
    os.mkfifo(cache / "r.json", 0o600)

    with pytest.raises(AdmissionError, match="no regular file"):
        private.read("r.json", cache)


@pytest.mark.criu
def test_a_record_of_another_user_is_refused(cache):
    private.write("r.json", {}, cache)
    os.chown(cache / "r.json", 12345, 12345)

    with pytest.raises(AdmissionError, match="belongs to uid 12345"):
        private.read("r.json", cache)
