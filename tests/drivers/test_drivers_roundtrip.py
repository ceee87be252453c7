"""A small real tree, dumped and restored by real CRIU under real keepers."""

import os
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from drivers_lab import ask, free_port

from coldsnap.drivers import n610
from coldsnap.drivers.volatile import ROOT
from coldsnap.errors import AdmissionError

pytestmark = pytest.mark.criu
SAME = ("pid", "child", "mark", "digest", "private", "kept", "held", "echo")


def same(before, after):
    """The restored tree has the memory, files, processes and connections of the captured one, and goes on counting."""
    assert {key: after[key] for key in SAME} == {key: before[key] for key in SAME}
    assert after["shared"] > before["shared"]
    assert after["counter"] >= before["counter"]


def test_a_tree_comes_back_three_times_from_one_capsule(lab):
    keeper, port = lab.launch()
    before = ask(port)
    capsule, dumped = lab.dump(keeper)
    assert {process.state for process in keeper.tree()} == {"T"}
    lab.stop(keeper)
    times = []
    for _ in range(3):
        began = time.monotonic()
        keeper, thawed = lab.restore(capsule)
        same(before, ask(port))
        times.append(time.monotonic() - began)
        assert thawed.root_pid == dumped.root_pid == before["pid"]
        assert keeper.status().state == "running"
        lab.stop(keeper)
    print(f"\nkeeper to answer {', '.join(f'{seconds:.3f}' for seconds in times)} s")
    print(
        f"dump {dumped.dump_s:.3f} s (frozen {dumped.stats.frozen_s:.3f}, volatile {dumped.volatile_s:.4f}), "
        f"{dumped.image_bytes >> 20} MiB; thaw {thawed.thaw_s:.3f} s"
    )


def test_a_tree_left_stopped_continues_with_its_connections_alive(lab):
    keeper, port = lab.launch()
    before = ask(port)
    lab.dump(keeper)
    n610.continue_tree(keeper)
    after = ask(port)
    same(before, after)
    assert not [name for name in os.listdir(f"/proc/{keeper.keeper_pid}/root{ROOT}") if name.startswith("link_remap")]
    capsule, _ = lab.dump(keeper)
    lab.stop(keeper)
    lab.restore(capsule)
    same(after, ask(port))


def test_a_tree_left_running_serves_on_and_its_capsule_is_good(lab):
    keeper, port = lab.launch()
    before = ask(port)
    capsule, _ = lab.dump(keeper, leave="running")
    assert "T" not in {process.state for process in keeper.tree()}
    same(before, ask(port))
    lab.stop(keeper)
    lab.restore(capsule)
    same(before, ask(port))


def test_a_caller_that_goes_away_leaves_a_stopped_tree_serving(lab):
    keeper, port = lab.launch()
    before = ask(port)
    keeper.begin("capture", [n610_continue()])
    n610.dump_tree(keeper, lab.criu, lab.capsule(), leave="stopped", timeout_s=30)
    run_dir = keeper.run_dir
    lab.keepers.remove(keeper)
    keeper.close()
    again = lab.connect(run_dir)
    same(before, ask(port))
    assert again.status().interrupted.operation == "capture"


def n610_continue():
    from coldsnap.keeper.undo import CONTINUE

    return CONTINUE


def test_clones_serve_beside_the_living_original_from_a_capsule_that_cannot_be_written(lab):
    keeper, port = lab.launch()
    before = ask(port)
    capsule, dumped = lab.dump(keeper, leave="running")
    lab.read_only(capsule)
    ports = [free_port(), free_port()]
    for other in ports:
        _, thawed = lab.restore(capsule, rebind=n610.Rebind(port=port, to_port=other, to_address="127.0.0.1"))
        assert other in {each.port for each in thawed.listeners}
        assert len(thawed.listeners) == len(dumped.listeners)
    for each in (port, *ports, port):
        same(before, ask(each))


def test_a_clone_listens_on_another_address(lab):
    keeper, port = lab.launch()
    before = ask(port)
    capsule, _ = lab.dump(keeper)
    lab.stop(keeper)
    lab.restore(capsule, rebind=n610.Rebind(port=port, to_port=port, to_address="127.0.0.2"))
    same(before, ask(port, host="127.0.0.2"))


def test_a_port_that_is_taken_is_refused_and_nothing_is_left(lab):
    keeper, port = lab.launch()
    capsule, _ = lab.dump(keeper, leave="running")
    with pytest.raises(AdmissionError, match=f"port {port} .* is taken"):
        lab.restore(capsule, rebind=n610.Rebind(port=port, to_port=port))
    assert ask(port)


def test_a_log_that_has_grown_since_is_no_obstacle_and_a_file_that_changed_is(lab):
    log = lab.directory / "server.log"
    keeper, port = lab.launch(log=str(log))
    before = ask(port)
    capsule, _ = lab.dump(keeper)
    lab.stop(keeper)
    with log.open("a") as file:
        file.write("written after the dump\n")
    keeper, thawed = lab.restore(capsule)
    assert thawed.grown == (str(log),)
    same(before, ask(port))
    lab.stop(keeper)
    log.write_text("")
    with pytest.raises(AdmissionError, match=rf"{log}: expected 6 bytes, found 0"):
        lab.restore(capsule)
    log.unlink()
    with pytest.raises(AdmissionError, match=rf"{log}: expected the regular file that was open, found none"):
        lab.restore(capsule)


def test_captured_pids_may_be_taken_on_the_host_when_the_tree_has_its_own_namespace(lab):
    keeper, port = lab.launch()
    before = ask(port)
    capsule, dumped = lab.dump(keeper)
    lab.stop(keeper)
    lab.hold_pid(dumped.root_pid)
    lab.restore(capsule)
    same(before, ask(port))


def test_in_the_hosts_namespaces_a_tree_comes_back_where_its_pids_are_free(lab):
    run_dir = lab.directory / "run-host"
    keeper, port = lab.launch("host", run_dir=run_dir)
    before = ask(port)
    capsule, dumped = lab.dump(keeper)
    assert all("psm_" in entry.path or "sem." in entry.path or "link_remap" in entry.path or "run-host" in entry.path
               for entry in dumped.volatile.entries)  # fmt: skip
    lab.stop(keeper)
    n610.remove_leftovers(dumped.volatile)
    for _ in range(2):
        keeper, _ = lab.restore(capsule, "host", run_dir=run_dir)
        same(before, ask(port))
        lab.stop(keeper)
        n610.remove_leftovers(dumped.volatile)
    lab.hold_pid(dumped.root_pid)
    with pytest.raises(AdmissionError, match=f"captured pids are taken by other processes: {dumped.root_pid}"):
        lab.restore(capsule, "host", run_dir=run_dir)
    assert not [entry.path for entry in dumped.volatile.entries if os.path.exists(entry.path)]


def test_in_the_hosts_namespaces_foreign_shared_memory_is_not_overwritten(lab):
    run_dir = lab.directory / "run-host"
    keeper, _ = lab.launch("host", run_dir=run_dir)
    capsule, dumped = lab.dump(keeper)
    lab.stop(keeper)
    (shared,) = (entry.path for entry in dumped.volatile.entries if "/psm_" in entry.path)
    n610.remove_leftovers(dumped.volatile)
    with open(shared, "x") as foreign:
        foreign.write("foreign")
    try:
        with pytest.raises(Exception, match=f"{shared} cannot be put back: File exists"):
            lab.restore(capsule, "host", run_dir=run_dir)
        with open(shared) as foreign:
            assert foreign.read() == "foreign"
    finally:
        os.unlink(shared)


@pytest.mark.slow
def test_twenty_cycles_leak_nothing(lab):
    keeper, port = lab.launch()
    before = ask(port)
    descriptors, shared = set(os.listdir("/proc/self/fd")), set(os.listdir(ROOT))
    for _ in range(20):
        capsule, _ = lab.dump(keeper)
        lab.stop(keeper)
        keeper, _ = lab.restore(capsule)
        same(before, ask(port))
        subprocess.run(["rm", "-r", str(capsule)], check=True, timeout=10)
    lab.stop(keeper)
    assert set(os.listdir("/proc/self/fd")) - descriptors <= {str(max(map(int, os.listdir("/proc/self/fd"))))}
    assert set(os.listdir(ROOT)) == shared
    mounts = Path("/proc/self/mounts").read_text()
    assert str(lab.directory) not in mounts
    with pytest.raises(OSError), closing(socket.create_connection(("127.0.0.1", port), timeout=1)):
        pass
    children = subprocess.run(
        ["ps", "--no-headers", "--ppid", str(os.getpid()), "-o", "comm"], capture_output=True, text=True, timeout=10
    )
    assert set(children.stdout.split()) <= {"ps", os.path.basename(sys.executable)}
