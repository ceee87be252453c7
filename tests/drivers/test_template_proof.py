"""A template is proven to be free of accelerators, or refused; what is unknown counts as present."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from coldsnap.drivers import template
from coldsnap.errors import AdmissionError, EngineError, FormatError

SLEEP = """
import mmap, sys, time
file = open(sys.argv[1], "rb") if sys.argv[1:] else None
mapped = file and mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print(flush=True)
time.sleep(60)
"""


@pytest.fixture
def tree(tmp_path):
    """Make a tree of one process that maps a file; return what a driver sees of its keeper."""
    started = []

    def grow(name=None, proc="/proc"):
        words = []
        if name:
            path = tmp_path / name
            path.write_bytes(b"x" * 4096)
            words = [str(path)]
        process = subprocess.Popen([sys.executable, "-c", SLEEP, *words], stdout=subprocess.PIPE)
        started.append(process)
        process.stdout.readline()
        one = SimpleNamespace(pid=process.pid, ppid=os.getpid(), state="S", comm="python")
        fd = os.open(proc, os.O_RDONLY | os.O_DIRECTORY)
        return SimpleNamespace(tree=lambda: [one], proc_fd=fd, rank_dir=tmp_path), said(process.pid)

    yield grow
    for process in started:
        process.kill()
        process.communicate()


def said(pid, accelerators=(), phase="pre_exec"):
    return {"format": 1, "kind": "x", "pid": pid, "phase": phase, "accelerators": list(accelerators)}


def test_a_process_without_anything_is_proven(tree):
    keeper, own = tree()

    proven = template.prove_template(keeper, "pre_exec", own)

    assert proven.pids == (own["pid"],)
    assert (proven.looks, proven.driver) == (10, ())


@pytest.mark.parametrize("name", ["libcuda.so.1", "libnvidia-ml.so.580.82.07"])
def test_a_library_of_the_driver_is_found_from_outside_whatever_the_process_says(tree, name):
    keeper, own = tree(name)

    with pytest.raises(AdmissionError) as refused:
        template.prove_template(keeper, "pre_exec", own)

    assert any(name in line for line in refused.value.mismatches)


def test_what_only_the_process_itself_knows_counts_too(tree):
    keeper, own = tree()

    with pytest.raises(AdmissionError, match="not proven") as refused:
        template.prove_template(keeper, "pre_exec", {**own, "accelerators": ["/dev/nvidia0 is open"]})

    assert "by its own account" in refused.value.mismatches[0]


@pytest.mark.parametrize("phase", ["pre_exec", "imported"])
def test_a_process_that_cannot_be_looked_at_is_refused_at_every_phase(tree, tmp_path, phase):
    keeper, own = tree(proc=tmp_path)  # in which no process is found

    with pytest.raises(AdmissionError) as refused:
        template.prove_template(keeper, phase, {**own, "phase": phase})

    assert "cannot be read" in refused.value.mismatches[0]


@pytest.mark.parametrize("change", [{"pid": 1}, {"phase": "imported"}, {"accelerators": None}])
def test_a_process_that_says_something_else_than_its_tree_is_refused(tree, change):
    keeper, own = tree()

    with pytest.raises(AdmissionError, match="does not fit its tree"):
        template.prove_template(keeper, "pre_exec", {**own, **change})


def test_an_imported_template_may_hold_the_driver_but_no_context(tree, monkeypatch):
    keeper, own = tree("libcuda.so.1")

    proven = template.prove_template(keeper, "imported", {**own, "phase": "imported"})
    assert "libcuda.so.1 is loaded" in proven.driver[0]

    with pytest.raises(AdmissionError, match="not proven") as refused:
        template.prove_template(
            keeper, "imported", {**own, "phase": "imported", "accelerators": ["/dev/nvidia0 is mapped"]}
        )
    assert len(refused.value.mismatches) == 1


def test_a_tree_that_does_not_stand_still_is_refused(tree, monkeypatch):
    keeper, own = tree()
    pids = iter(range(10**6, 2 * 10**6))
    moving = SimpleNamespace(
        tree=lambda: [*keeper.tree(), SimpleNamespace(pid=next(pids), ppid=1, state="Z", comm="x")],
        proc_fd=keeper.proc_fd,
    )
    monkeypatch.setattr(template, "PATIENCE_S", 0.2)

    with pytest.raises(AdmissionError, match="does not stand still"):
        template.prove_template(moving, "pre_exec", own)


def test_a_template_that_ends_or_says_nonsense_is_an_error(tmp_path):
    keeper = SimpleNamespace(rank_dir=tmp_path)

    with pytest.raises(EngineError, match="exited"):
        template.await_template(keeper, timeout_s=5, ended=lambda: "exited (1)")
    path = Path(tmp_path, "template.json")
    path.touch(mode=0o600)
    path.write_text('{"format":1,"kind":"something","pid":1,"phase":"pre_exec"}')
    with pytest.raises(FormatError):
        template.await_template(keeper, timeout_s=5, ended=lambda: None)
