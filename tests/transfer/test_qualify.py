"""The qualifications run, bounded, and write what they promise."""

import json
import os
import subprocess
import sys

import pytest
from native_build import ROOT

from coldsnap import Policy


def run(script, built, *arguments, driver=False):
    environment = dict(os.environ)
    if driver:
        environment["LD_LIBRARY_PATH"] = str(built / "tests" / "driver")
    return subprocess.run(
        [sys.executable, ROOT / "examples" / script, "--library", built / "libcoldsnap_io.so", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


SMALL = ("--bytes", "9MiB", "--repeat", "1", "--chunks", "1MiB", "--depths", "4")


@pytest.mark.parametrize("driver", [False, True], ids=["host", "device"])
def test_hydration_is_qualified(driver, built, tmp_path):
    device = ("--device", "0") if driver else ()
    done = run(
        "qualify_hydration.py", built, *SMALL, *device, "--directory", str(tmp_path), "--directory", "/dev/shm",
        "--accesses", "read,map,register" if driver else "read,map",
        "--json", str(tmp_path / "r.json"), "--profile", str(tmp_path / "p.toml"), driver=driver,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "r.json").read_text())

    assert result["host_ratio"] > 0
    disk, memory = result["places"]
    ways = {(row["cache"], row["backend"]) for row in disk["rows"] if "best" in row}
    assert ways >= {(cache, backend) for cache in ("cold", "hot") for backend in ("auto", "buffered", "direct")}
    assert ("hot", "python") in ways
    assert {row["cache"] for row in memory["rows"]} == {"hot"}
    assert disk["raw_direct"]["best"] > 0
    assert {"hot", "hot_of_limit", "hot_crc32", "cold", "cold_of_raw"} <= disk["checks"].keys()
    policy = Policy.load(tmp_path / "p.toml")
    assert policy.io.chunk_bytes == 1 << 20
    assert "GB/s" in done.stdout
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("coldsnap-qualify")]


@pytest.mark.parametrize("driver", [False, True], ids=["host", "device"])
def test_capture_is_qualified(driver, built, tmp_path):
    device = ("--device", "0") if driver else ()
    done = run(
        "qualify_capture.py", built, *SMALL, *device, "--directory", str(tmp_path), "--read-back",
        "--json", str(tmp_path / "r.json"), "--profile", str(tmp_path / "p.toml"), driver=driver,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "r.json").read_text())

    (place,) = result["places"]
    assert {row["backend"] for row in place["rows"] if "best" in row} == {"auto", "buffered", "direct", "python"}
    assert place["of_slower"] > 0
    assert Policy.load(tmp_path / "p.toml").io.queue_depth == 4


def test_a_missing_rival_fails_the_comparison(built):
    done = run("qualify_hydration.py", built, *SMALL, "--device", "0", "--compare", driver=True)

    assert done.returncode == 2
    assert "instanttensor" in done.stderr


def test_a_comparison_without_a_device_is_refused(built):
    done = run("qualify_hydration.py", built, *SMALL, "--compare")

    assert done.returncode == 2
    assert "--device" in done.stderr
