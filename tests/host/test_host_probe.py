"""This machine, described; and one made of files."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from attrs import evolve

from coldsnap.errors import AdmissionError
from coldsnap.host import private
from coldsnap.host.criu import examine, find_criu
from coldsnap.host.doctor import problems
from coldsnap.host.facts import FeatureResult, QualificationRecord
from coldsnap.host.gpus import CACHE, probe_gpus
from coldsnap.host.probe import QUALIFICATION, probe, read_qualification
from coldsnap.host.record import to_plain

FAKE_CUDA = Path(__file__).parent / "fake_cuda"


@pytest.fixture
def script(tmp_path):
    """A maker of small executables that are not CRIU."""

    def make(text, name="criu"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    return make


@pytest.fixture
def fake_cuda(monkeypatch, tmp_path, machine):
    """A machine with an NVIDIA driver of release 580 whose CUDA is the fake one."""
    shared = tmp_path / "fake"
    shared.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(FAKE_CUDA))
    monkeypatch.setenv("FAKE_CUDA", str(shared))
    machine.put("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1  Tue\n")
    return machine


@pytest.mark.criu
def test_this_machine_is_described_and_has_no_problem(criu, cache, tmp_path):
    host = probe(criu=criu, cache=cache, paths=[tmp_path, "/dev/shm"]).hosts["local"]

    assert host.kernel.release == os.uname().release
    assert host.criu.check_ok
    assert host.criu.version >= (4, 2)
    assert host.filesystem("/dev/shm").kind == "memory"
    assert problems(host) == ()


@pytest.mark.criu
def test_a_port_in_use_is_seen(criu, cache):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        host = probe(criu=criu, cache=cache, ports=[port, 1]).hosts["local"]

    assert host.listening_ports == (port,)


@pytest.mark.criu
def test_the_identity_of_a_criu_covers_its_libraries_and_not_its_place(criu, cache):
    facts = probe(criu=criu, cache=cache).hosts["local"].criu
    recorded = Path(criu).with_name("criu.json").read_text()

    assert f'"build_digest": "{facts.build_digest}"' in recorded
    assert "libc.so.6" in facts.libraries
    assert facts.found == "argument"


@pytest.mark.criu
def test_a_second_probe_runs_and_hashes_nothing(criu, cache):
    first = probe(criu=criu, cache=cache).hosts["local"].criu
    record = private.read("criu.json", cache)
    record[criu]["facts"]["check_message"] = "from the record"
    private.write("criu.json", record, cache)

    assert probe(criu=criu, cache=cache).hosts["local"].criu == evolve(first, check_message="from the record")


@pytest.mark.criu
@pytest.mark.parametrize("change", ["boot", "privileges", "file", "record"])
def test_the_record_of_a_criu_holds_only_as_long_as_what_it_depends_on(criu, cache, host, change):
    privileges, boot = host().privileges, "b"
    find_criu(criu, boot_id=boot, privileges=privileges, cache=cache)
    record = private.read("criu.json", cache)
    record[criu]["facts"]["check_message"] = "from the record"
    if change == "file":
        record[criu]["files"][criu][3] -= 1
    if change == "record":
        del record[criu]["facts"]["sha256"]
    private.write("criu.json", record, cache)
    if change == "privileges":
        privileges = evolve(privileges, capabilities=())
    if change == "boot":
        boot = "c"

    assert find_criu(criu, boot_id=boot, privileges=privileges, cache=cache).check_message != "from the record"


def test_an_executable_that_was_named_is_never_replaced(host, cache, tmp_path):
    named = tmp_path / "nowhere" / "criu"

    facts = find_criu(named, boot_id="b", privileges=host().privileges, cache=cache)

    assert facts.path == str(named)
    assert facts.version == ()
    assert "No such file" in problems(host(criu=facts))[0]


def test_a_script_is_no_identity_of_a_criu(script):
    facts, files = examine(script("echo Version: 4.2"), "argument")

    assert "no ELF executable" in facts.check_message
    assert files == ()


@pytest.mark.criu
def test_without_a_name_the_path_and_then_the_tool_cache_are_searched(criu, cache, host, script, monkeypatch, tmp_path):
    tools = tmp_path / "tools"
    (tools / "criu-x").mkdir(parents=True)
    (tools / "criu-x" / ".complete").touch()
    (tools / "criu-x" / "criu").symlink_to(criu)
    monkeypatch.setenv("PATH", str(script("echo Version: 3.17").parent))

    facts = find_criu(None, boot_id="b", privileges=host().privileges, cache=cache, tools=tools)

    assert facts.found == "tool cache"
    assert facts.check_ok


def test_when_none_is_good_the_first_is_reported(cache, host, script, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(script("echo Version: 3.17").parent))

    facts = find_criu(None, boot_id="b", privileges=host().privileges, cache=cache, tools=tmp_path)

    assert facts.found == "PATH"
    assert not facts.check_ok


@pytest.mark.criu
def test_a_home_that_cannot_be_written_only_costs_time(criu, host, tmp_path):
    (tmp_path / "file").write_text("")

    facts = find_criu(criu, boot_id="b", privileges=host().privileges, cache=tmp_path / "file" / "cache")

    assert facts.check_ok


def test_a_machine_without_nvidia_starts_no_child(machine, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")

    assert probe_gpus(machine.kernel) == {
        "known": True,
        "reason": "no NVIDIA driver is loaded",
        "gpus": [],
        "cuda": None,
    }


def test_gpus_are_listed_through_the_driver_in_a_child(fake_cuda, cache, script, monkeypatch):
    monkeypatch.delitem(sys.modules, "cuda.bindings.driver", raising=False)  # of a test before
    host = probe(kernel=fake_cuda.kernel, cache=cache, criu=script("")).hosts["local"]

    (gpu,) = host.gpus
    assert (gpu.name, gpu.compute_capability, gpu.capacity_class_bytes) == ("Fake GPU", "9.0", 140 << 30)
    assert gpu.uuid == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert (host.nvidia_driver, host.cuda_userspace, host.gpus_known) == ("580.1", "13.1", True)
    assert "cuda.bindings.driver" not in sys.modules


def test_no_device_is_a_complete_inventory(fake_cuda, cache, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_FAULT", "no device")

    found = probe_gpus(fake_cuda.kernel, cache)

    assert found["known"]
    assert "NO_DEVICE" in found["reason"]


def test_a_gpu_machine_whose_gpus_cannot_be_listed_is_an_incomplete_inventory(machine, cache, monkeypatch, tmp_path):
    machine.put("/sys/module/nvidia/version", "610.1")
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "__init__.py").write_text("raise ImportError('none here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    found = probe_gpus(machine.kernel, cache)

    assert not found["known"]
    assert "coldsnap[cuda]" in found["reason"]


class TestListing:
    """GPUs are listed once, and again when anything that the listing depends on has changed."""

    @pytest.fixture
    def listed(self, fake_cuda, cache):
        fake_cuda.put("/dev/nvidiactl", "")
        return probe_gpus(fake_cuda.kernel, cache)

    def test_a_listing_that_holds_starts_no_child(self, listed, fake_cuda, cache, monkeypatch):
        monkeypatch.setattr(subprocess, "run", None)

        assert probe_gpus(fake_cuda.kernel, cache) == listed
        assert [gpu["name"] for gpu in listed["gpus"]] == ["Fake GPU"]

    @pytest.mark.parametrize(
        "change",
        [
            lambda machine, _: machine.put("/proc/sys/kernel/random/boot_id", "another"),
            lambda machine, _: machine.put("/proc/driver/nvidia/version", "NVRM version: NVIDIA Module  610.1  Tue\n"),
            lambda machine, _: machine.put("/dev/nvidia1", ""),
            lambda _, monkeypatch: monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0"),
        ],
        ids=["boot", "driver", "device node", "visible devices"],
    )
    def test_a_listing_from_before_a_change_is_made_anew(self, listed, fake_cuda, cache, monkeypatch, change):
        change(fake_cuda, monkeypatch)
        monkeypatch.setenv("FAKE_CUDA_FAULT", "no device")

        assert probe_gpus(fake_cuda.kernel, cache)["gpus"] == []
        assert listed["gpus"]

    @pytest.mark.parametrize("damage", [{"gpus": [{}]}, {"gpus": []}, {"known": 1}, {"more": 1}])
    def test_a_damaged_listing_is_made_anew(self, listed, fake_cuda, cache, damage):
        record = json.loads((cache / CACHE).read_text())
        record["answer"] |= damage
        (cache / CACHE).write_text(json.dumps(record))

        assert probe_gpus(fake_cuda.kernel, cache) == listed

    def test_what_could_not_be_listed_is_not_kept(self, fake_cuda, cache, monkeypatch):
        monkeypatch.setenv("FAKE_CUDA_FAULT", "no device")
        assert probe_gpus(fake_cuda.kernel, cache)["gpus"] == []
        monkeypatch.delenv("FAKE_CUDA_FAULT")

        assert probe_gpus(fake_cuda.kernel, cache)["gpus"]


RECORD = QualificationRecord(
    boot_id="b",
    nvidia_driver="580.1",
    devices=("GPU-0",),
    criu_build_digest=None,
    features=(FeatureResult(name="criu-process-tree", status="passed"),),
    created_unix_ns=1,
)


def test_a_qualification_record_is_read_back_where_it_was_made(cache):
    private.write(QUALIFICATION, to_plain(RECORD), cache)

    assert read_qualification("b", "580.1", ("GPU-0",), cache) == (RECORD, "")


@pytest.mark.parametrize(
    ("boot", "driver", "devices", "says"),
    [
        ("c", "580.1", ("GPU-0",), "another boot"),
        ("b", "580.2", ("GPU-0",), "for NVIDIA driver 580.1, this is 580.2"),
        ("b", None, ("GPU-0",), "this is none"),
        ("b", "580.1", ("GPU-1",), "other devices"),
        ("b", "580.1", (), "other devices"),
    ],
)
def test_a_qualification_record_is_ignored_elsewhere_with_the_reason(cache, boot, driver, devices, says):
    private.write(QUALIFICATION, to_plain(RECORD), cache)

    record, reason = read_qualification(boot, driver, devices, cache)

    assert record is None
    assert says in reason


def test_a_qualification_record_of_another_shape_is_ignored(cache):
    private.write(QUALIFICATION, {"boot_id": "b"}, cache)

    assert "cannot be read" in read_qualification("b", None, (), cache)[1]


def test_a_qualification_record_that_others_could_have_written_stops_the_probe(cache, machine, script):
    private.write(QUALIFICATION, to_plain(RECORD), cache)
    (cache / QUALIFICATION).chmod(0o622)

    with pytest.raises(AdmissionError, match="written by others"):
        probe(kernel=machine.kernel, cache=cache, criu=script(""))


def test_the_packs_of_a_store_are_listed_by_name_and_nothing_else_is(machine, cache, tmp_path, script):
    packs = tmp_path / "store" / "model-payloads" / "sha256"
    packs.mkdir(parents=True)
    (packs / f"{'a' * 64}.pack").write_bytes(b"12345")
    (packs / f"{'b' * 64}.pack.tmp").write_bytes(b"")
    (packs / "notes.pack").write_bytes(b"")

    store = probe(kernel=machine.kernel, cache=cache, store=tmp_path / "store", criu=script("")).store

    (pack,) = store.packs
    assert (pack.digest, pack.size_bytes) == (f"sha256:{'a' * 64}", 5)


def test_probes_in_parallel_share_one_cache(cache, machine, script):
    failures = []

    def run():
        try:
            probe(kernel=machine.kernel, cache=cache, criu=script(""))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
