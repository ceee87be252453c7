"""The process that waits, and what it lets itself be told."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from attrs import evolve

from coldsnap.artifact import canonical, record
from coldsnap.keeper import template
from coldsnap.keeper.directive import Directive, Endpoint, Start, write_directive

SAY = "import json,os,sys;print(json.dumps([sys.argv[1:],dict(os.environ)]))"
START = Start(unit="unit-0", phase="pre_exec")


@pytest.fixture
def waiting(tmp_path):
    """Start a template in a directory; return a function that lets it go on, and says what became of it."""
    started = []

    def run(*words, env=None, directive=None):
        directive = directive or Directive.new(operation="launch", endpoint=Endpoint(host="127.0.0.1", port=8000))
        write_directive(tmp_path, directive)
        command = [sys.executable, "-c", SAY, "--host", "0.0.0.0", "--port", "1", *words]
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", template.__file__, "pre_exec", *command],
            env={"COLDSNAP_DIRECTIVE": str(tmp_path / "directive.json"), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        while not (tmp_path / template.READY).exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.005)
        return process, directive

    yield run
    for process in started:
        process.kill()
        process.communicate()


def became(process):
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    return json.loads(out)


def refused(process):
    _, err = process.communicate(timeout=30)
    assert process.returncode == 78
    return err


def restored(tmp_path, directive, *, variables=None, **changes):
    """Write what a restore writes: names of the network, then a directive with a start."""
    document = {
        "format": 1,
        "kind": template.TRANSPORT_KIND,
        "unit": "unit-0",
        "incarnation": directive.incarnation,
        "variables": variables or {},
    } | changes.pop("transport", {})
    path = tmp_path / template.TRANSPORT
    path.touch(mode=0o600)
    path.write_bytes(canonical.encode(document))
    value = record.write(directive)
    value |= {"operation": "restore", "endpoint": {"host": "::1", "port": 9000}}
    value["start"] = {"unit": "unit-0", "phase": "pre_exec", "transport": template.TRANSPORT, **changes}
    target = tmp_path / "new"
    target.touch(mode=0o600)
    target.write_bytes(canonical.encode(value))
    os.replace(target, tmp_path / "directive.json")


def test_a_template_waits_says_what_it_holds_and_becomes_its_command(waiting, tmp_path):
    process, directive = waiting("--more", env={"NCCL_DEBUG": "INFO"})
    said = json.loads((tmp_path / template.READY).read_text())
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())

    assert said == {"format": 1, "kind": template.KIND, "pid": process.pid, "phase": "pre_exec", "accelerators": []}
    assert status["Threads"] == "1"
    assert len(os.listdir(f"/proc/{process.pid}/fd")) == 3
    assert process.poll() is None, "it waits"

    write_directive(tmp_path, Directive.new(operation="launch", endpoint=directive.endpoint))
    time.sleep(0.05)
    assert process.poll() is None, "a directive without a start lets nobody go on"
    write_directive(tmp_path, evolve(directive, start=START))
    words, environment = became(process)

    assert words == ["--host", "127.0.0.1", "--port", "8000", "--more"]
    assert environment["NCCL_DEBUG"] == "INFO", "a launch is where it was captured"


def test_at_a_destination_it_takes_what_is_on_the_lists_and_nothing_else(waiting, tmp_path):
    captured = {"NCCL_SOCKET_IFNAME": "old0", "UCX_TLS": "rc", "OMPI_MCA_btl": "tcp", "VLLM_HOST_IP": "10.0.0.1"}
    process, directive = waiting(
        "--load-format", "auto", env={**captured, "CUDA_VISIBLE_DEVICES": "0", "MINE": "kept", "TZ": "UTC"}
    )

    restored(
        tmp_path,
        directive,
        variables={"NCCL_SOCKET_IFNAME": "new0"},
        load_format="coldsnap",
        environment={"CUDA_VISIBLE_DEVICES": "3"},
    )
    words, environment = became(process)

    assert words == ["--host", "::1", "--port", "9000", "--load-format", "coldsnap"]
    assert environment["NCCL_SOCKET_IFNAME"] == "new0"
    assert environment["CUDA_VISIBLE_DEVICES"] == "3"
    assert environment["MINE"] == "kept"
    assert not {"UCX_TLS", "OMPI_MCA_btl", "VLLM_HOST_IP", "TZ"} & set(environment), "they belonged to another place"
    assert environment[template.TRANSPORT_PATH] == str(tmp_path / template.TRANSPORT)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"environment": {"LD_PRELOAD": "/x.so"}}, "LD_PRELOAD is not one of the names"),
        ({"environment": {"TZ": "a\0b"}}, "without NUL"),
        ({"variables": {"PATH": "/x"}}, "PATH is not one of the names"),
        ({"variables": {"NCCL_DEBUG": "x" * 5000}}, "at most 4096 bytes"),
        ({"transport": {"unit": "unit-1"}}, "was not written for this restore: unit is 'unit-1'"),
        ({"transport": {"incarnation": "0" * 32}}, "was not written for this restore: incarnation"),
        ({"transport": {"format": True}}, "was not written for this restore: format"),
        ({"transport": {"surprise": 1}}, "surprise"),
        ({"phase": "imported"}, "not for a template that waits at pre_exec"),
        ({"command": ["sh"]}, "not for a template that waits at pre_exec"),
    ],
)
def test_what_it_may_not_be_told_ends_it_with_a_sentence(waiting, tmp_path, changes, sentence):
    process, directive = waiting()

    restored(tmp_path, directive, **changes)

    assert sentence in refused(process)


@pytest.mark.parametrize("words", [["--host", "x"], [], ["--host", "x", "--port", "1", "--port", "2"]])
def test_a_command_without_one_place_for_each_cannot_be_moved(words):
    with pytest.raises(ValueError, match="a template needs it once"):
        template.command_at(["engine", *words], "h", 1, None)


def test_every_spelling_of_the_load_format_gives_way():
    words = ["e", "--load-format=dummy", "--host", "a", "--load-format", "auto", "--port", "1", "--last"]

    placed = template.command_at(words, "b", 2, "coldsnap")

    assert placed == ["e", "--host", "b", "--port", "2", "--last", "--load-format", "coldsnap"]


MAPS = "7f00-7f01 r-xp 00000000 08:01 7 {}\n"


@pytest.mark.parametrize(
    ("links", "path", "found"),
    [
        (["/dev/nvidiactl"], "/usr/bin/python3", ["/dev/nvidiactl is open"]),
        (["/dev/null", "pipe:[7]"], "/usr/lib/libcuda.so.580.82.07", ["/usr/lib/libcuda.so.580.82.07 is loaded"]),
        ([], "/usr/lib/libnvidia-ml.so.1", ["/usr/lib/libnvidia-ml.so.1 is loaded"]),
        ([], "/dev/nvidia0", ["/dev/nvidia0 is mapped"]),
        (
            ["/dev/infiniband/uverbs0", "/dev/dri/card0"],
            "[heap]",
            ["/dev/dri/card0 is open", "/dev/infiniband/uverbs0 is open"],
        ),
        (["/dev/null"], "/usr/lib/libcudart.so.13", []),
    ],
)
def test_devices_and_libraries_of_a_driver_are_what_an_accelerator_is_known_by(links, path, found):
    assert template.accelerators(links, MAPS.format(path)) == found
