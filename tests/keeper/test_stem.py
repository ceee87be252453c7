"""The process above an engine is nothing that anyone could notice."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coldsnap.keeper.stem import wrapped

READY = "print('ready', flush=True); import time; time.sleep(60)"


@pytest.fixture
def start():
    started = []

    def below_a_stem(code, **options):
        argv = wrapped((sys.executable, "-S", "-c", code), python=sys.executable)
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, **options)
        started.append(process)
        return process

    yield below_a_stem
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def children(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("status", [0, 3, 255])
def test_it_ends_with_the_status_of_the_engine(start, status):
    assert start(f"raise SystemExit({status})").wait(30) == status


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_it_ends_by_the_signal_that_ended_the_engine(start, number):
    assert start(f"import os; os.kill(os.getpid(), {int(number)})").wait(30) == -number


def test_a_signal_to_it_reaches_the_engine_which_decides(start):
    handler = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7));"
    process = start(handler + READY)
    process.stdout.readline()

    process.send_signal(signal.SIGTERM)

    assert process.wait(30) == 7


def test_a_signal_that_the_engine_does_not_handle_ends_both(start):
    process = start(READY)
    process.stdout.readline()

    process.send_signal(signal.SIGHUP)

    assert process.wait(30) == -signal.SIGHUP


def test_the_engine_has_its_own_session_and_the_signals_of_any_new_program(start):
    code = (
        "import os; print(os.getsid(0) == os.getpid(), *(line.split()[1] for line in open('/proc/self/status')"
        " if line[:6] in ('SigBlk', 'SigIgn')))"
    )
    found = start(code).communicate(timeout=30)[0].split()

    # Python itself ignores two signals, whoever starts it.
    pythons_own = 1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1
    assert found[:2] == ["True", "0" * 16]
    assert int(found[2], 16) & ~pythons_own == 0


def test_a_program_that_cannot_start_is_told_where_the_engine_writes(tmp_path):
    missing = str(tmp_path / "missing")
    done = subprocess.run(
        wrapped((missing,), python=sys.executable), capture_output=True, text=True, check=False, timeout=30
    )

    assert (done.returncode, done.stderr) == (127, f"cannot start {missing}: No such file or directory\n")


def test_it_is_small_and_has_one_thread(start):
    process = start(READY)
    process.stdout.readline()
    (engine,) = children(process.pid)
    rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    anonymous = int(rollup.split("Anonymous:")[1].split()[0]) << 10

    assert engine != process.pid
    assert len(os.listdir(f"/proc/{process.pid}/task")) == 1
    assert Path(f"/proc/{process.pid}/comm").read_text() == "coldsnap-stem\n"
    assert anonymous < 16 << 20


def test_signals_sent_at_any_moment_are_not_lost(start):
    count = "import signal; signal.signal(signal.SIGUSR1, lambda *_: print('seen', flush=True));"
    process = start(count + READY)
    process.stdout.readline()
    for _ in range(20):
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "seen\n"
    assert process.poll() is None
