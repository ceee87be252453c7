"""What an undo removes while its caller commits is gone as a whole, or whole."""

import os
import random
import threading
import time

from coldsnap.keeper import undo

FILES = 40


def born(path):
    (path / "images").mkdir(parents=True)
    for number in range(FILES):
        (path / "images" / f"{number}.img").write_bytes(b"x")
    (path / "artifact.json.partial").write_bytes(b"{}")


def committed_after(path, delay_s, told):
    def commit():
        time.sleep(delay_s)
        try:
            os.rename(path / "artifact.json.partial", path / "artifact.json")
            (path / "artifact.json").read_bytes()  # a capture opens what it has committed before it says so
        except FileNotFoundError:
            told.append("gone")

    thread = threading.Thread(target=commit)
    thread.start()
    return thread


def test_what_is_committed_while_it_is_undone_is_whole_or_not_there(tmp_path):
    root_fd, chance, seen = os.open("/", os.O_RDONLY | os.O_DIRECTORY), random.Random(5), set()
    try:
        for number in range(60):
            path, told = tmp_path / f"artifact-{number}", []
            born(path)
            thread = committed_after(path, chance.uniform(0, 0.002), told)
            time.sleep(0.0005)
            did = undo.remove_path(root_fd, undo.remove(path, unless="artifact.json"))
            thread.join()

            stays = did == f"{path} is complete and stays"
            assert stays or did == f"removed {path}"
            assert path.exists() == stays
            assert stays or told == ["gone"]
            if stays:
                assert len(os.listdir(path / "images")) == FILES
            seen.add(stays)
    finally:
        os.close(root_fd)
    assert seen == {True, False}
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
