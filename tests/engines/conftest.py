"""Real interpreters and real sockets."""

import os

import pytest

from coldsnap.keeper.directive import Directive, Endpoint, write_directive

# The main job starts templates of the same vLLM out of their packs; what these see of a load beside that is a minute.
collect_ignore = [] if "COLDSNAP_TEST_FULL" in os.environ else ["test_vllm_fresh.py"]


@pytest.fixture
def rank_dir(tmp_path):
    """What the keeper makes for the ranks, with a directive in it."""
    for name in ("control", "ack"):
        (tmp_path / name).mkdir(mode=0o700)
    write_directive(tmp_path, Directive.new(operation="launch", endpoint=Endpoint(host="127.0.0.1", port=8000)))
    return tmp_path
