"""Live probes: real CRIU on a real process; the CUDA ones against a driver made for tests."""

import os
import time
from pathlib import Path

import pytest

from coldsnap.errors import AdmissionError
from coldsnap.host.canary import Canary, CanaryError
from coldsnap.host.contracts import FEATURES
from coldsnap.host.facts import Facts
from coldsnap.host.freeze import FreezeError, dump
from coldsnap.host.probe import probe
from coldsnap.host.qualify import qualify_host
from coldsnap.host.selection import select_driver

FAKE_CUDA = Path(__file__).parent / "fake_cuda"


def soon():
    return time.monotonic() + 60


@pytest.fixture
def fake_gpu(monkeypatch, tmp_path, machine):
    shared = tmp_path / "fake"
    shared.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(FAKE_CUDA))
    monkeypatch.setenv("FAKE_CUDA", str(shared))
    machine.put("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1  Tue\n")
    return machine


def test_a_canary_answers_and_ends_with_its_block(tmp_path):
    with Canary(tmp_path / "c", soon()) as canary:
        assert canary.ask("pid") == str(canary.pid)
        assert canary.alive()

    assert not canary.alive()


def test_a_canary_ends_when_its_directory_goes(tmp_path):
    with Canary(tmp_path / "c", soon()) as canary:
        canary.ask("digest")
        (tmp_path / "c").rename(tmp_path / "elsewhere")

        assert canary.gone()


def test_what_fails_inside_a_canary_is_its_answer(tmp_path):
    with Canary(tmp_path / "c", soon()) as canary, pytest.raises(CanaryError, match=r"^no-such-thing: \w+Error: "):
        canary.ask("no-such-thing")


def test_a_canary_that_dies_is_noticed(tmp_path):
    with Canary(tmp_path / "c", soon()) as canary:
        canary.ask("digest")
        os.kill(canary.pid, 9)

        with pytest.raises(CanaryError, match="died"):
            canary.ask("digest")


def test_a_canary_that_says_nothing_is_given_up(tmp_path):
    with Canary(tmp_path / "c", time.monotonic() - 1) as canary, pytest.raises(CanaryError, match="no answer in time"):
        canary.ask("digest")


@pytest.mark.criu
def test_criu_says_why_it_refuses(tmp_path, criu):
    with Canary(tmp_path / "c", soon()) as canary:
        canary.ask("digest")
        canary.kill()

        with pytest.raises(FreezeError, match="criu dump") as caught:
            dump(criu, canary, tmp_path / "images")

    assert caught.value.phase == "dump"


@pytest.mark.criu
def test_this_machine_passes_the_probes_of_criu_and_says_why_there_are_none_of_cuda(criu, cache, machine):
    record = qualify_host(criu=criu, cache=cache, kernel=machine.kernel)

    assert [result.name for result in record.features] == list(FEATURES)
    assert record.result("criu-process-tree").status == "passed"
    assert record.result("criu-process-template").status == "passed"
    assert record.result("cuda-checkpoint-api").status == "unsupported"
    assert "no NVIDIA driver" in record.result("cuda-checkpoint-api").reason
    assert record.result("nccl-graph-resource-retention").status == "unqualified"
    assert all(result.reason for result in record.features if result.status != "passed")
    assert probe(criu=criu, cache=cache, kernel=machine.kernel).hosts["local"].qualification == record


def test_without_a_criu_its_features_are_unsupported(cache, machine, tmp_path):
    record = qualify_host(criu=tmp_path / "none", cache=cache, kernel=machine.kernel)

    assert record.result("criu-process-tree").status == "unsupported"


@pytest.mark.criu
def test_every_cuda_probe_passes_on_a_driver_that_works_and_admits_one_worker(fake_gpu, criu, cache):
    record = qualify_host(criu=criu, cache=cache, kernel=fake_gpu.kernel)

    failed = [
        result for result in record.features if result.name.startswith(("cuda", "criu")) and result.status != "passed"
    ]
    assert {result.name for result in failed} == {"cuda-uvm-checkpoint", "cuda-vmm-exported-handle-checkpoint"}
    host = probe(criu=criu, cache=cache, kernel=fake_gpu.kernel).hosts["local"]
    facts = Facts(hosts={"local": host})
    assert select_driver(facts, ["local"], compatibility_driver="probed")[0] == "n610"


@pytest.mark.parametrize(
    ("fault", "feature", "phase"),
    [
        ("lock", "cuda-checkpoint-api", "cuCheckpointProcessLock"),
        ("stuck", "cuda-checkpoint-api", "checkpointed"),
        ("thread", "cuda-checkpoint-api", "restore-thread"),
        ("lost", "cuda-checkpoint-roundtrip", "compare"),
        ("moved", "cuda-vmm-exact-address", "reserve"),
        ("ipc", "cuda-classic-ipc", "ipc-import"),
    ],
)
def test_a_driver_that_fails_is_caught_with_the_phase(fake_gpu, cache, tmp_path, monkeypatch, fault, feature, phase):
    monkeypatch.setenv("FAKE_CUDA_FAULT", fault)

    record = qualify_host(criu=tmp_path / "none", cache=cache, kernel=fake_gpu.kernel)

    assert record.result(feature).status == "failed"
    assert record.result(feature).failure_phase == phase
    assert record.result("cuda-initialized-state").status == "unqualified"


def test_a_host_whose_gpus_cannot_be_listed_is_not_qualified(machine, cache, monkeypatch, tmp_path):
    machine.put("/sys/module/nvidia/version", "610.1")
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "__init__.py").write_text("raise ImportError('none here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    with pytest.raises(AdmissionError, match="coldsnap\\[cuda\\]"):
        qualify_host(cache=cache, kernel=machine.kernel, criu=tmp_path / "none")
