"""The engine's log does not fill the filesystem of its run directory, and loses no line that it keeps."""

import os

import pytest
from keeper_world import until

from coldsnap.keeper import engine_log, layout

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def log(tmp_path):
    path = tmp_path / layout.ENGINE_LOG
    tree_fd = os.open(tmp_path, layout.DIRECTORY)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    yield path, tree_fd, fd
    os.close(fd)
    os.close(tree_fd)


def taken(path):
    return path.stat().st_blocks * 512


def lines(first, last):
    return b"".join(b"%08d a line that an engine writes\n" % number for number in range(first, last))


def test_the_beginning_of_a_long_log_is_given_back_and_what_stays_begins_with_a_line(log):
    path, tree_fd, fd = log
    os.write(fd, lines(0, 20_000))
    size = path.stat().st_size

    begins = engine_log.shorten(tree_fd, limit_bytes=256 * KIB, kept_bytes=64 * KIB)
    os.write(fd, lines(20_000, 20_010))

    text = path.read_bytes()
    assert len(text) == path.stat().st_size == size + len(lines(0, 10))
    assert text[:begins] == bytes(begins)
    first = int(text[begins : begins + 8])
    assert text[begins:] == lines(first, 20_010)
    assert 60 * KIB < len(text) - begins < 68 * KIB
    assert taken(path) < 128 * KIB
    assert layout.tail(str(path), 2).splitlines()[1].startswith("00020009 ")


def test_a_log_within_its_limit_is_left_alone(log):
    path, tree_fd, fd = log
    os.write(fd, lines(0, 100))

    assert engine_log.shorten(tree_fd, limit_bytes=256 * KIB, kept_bytes=64 * KIB) == 0
    assert path.read_bytes() == lines(0, 100)


def test_an_engine_that_writes_no_log_is_fine(tmp_path):
    tree_fd = os.open(tmp_path, layout.DIRECTORY)
    assert engine_log.shorten(tree_fd) == 0
    os.close(tree_fd)


def test_a_keeper_shortens_the_log_of_its_engine_unless_an_operation_is_in_flight(private):
    keeper = private.start()
    with open(keeper.log_path, "ab") as log:
        log.write(b"x" * 1023 + b"\n" + bytes(engine_log.LIMIT_BYTES))

    with keeper.operation("launch"):
        keeper.spawn_engine(["sleep", "1000"], env=private.env, cwd="/")
        assert keeper.status().state == "running"
        assert taken(keeper.log_path) > engine_log.LIMIT_BYTES
    keeper.stop(grace_s=0)

    keeper = private.start()
    with open(keeper.log_path, "ab") as log:
        log.write(b"x" * 1023 + b"\n" + bytes(engine_log.LIMIT_BYTES))
    keeper.spawn_engine(["sleep", "1000"], env=private.env, cwd="/")

    until(lambda: taken(keeper.log_path) <= engine_log.KEPT_BYTES + MIB, "the cut")
    assert keeper.log_path.stat().st_size == engine_log.LIMIT_BYTES + 1024
