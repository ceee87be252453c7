"""Real interpreters and real sockets."""

import pytest

from coldsnap.keeper.directive import Directive, Endpoint, write_directive


@pytest.fixture
def rank_dir(tmp_path):
    """What the keeper makes for the ranks, with a directive in it."""
    for name in ("control", "ack"):
        (tmp_path / name).mkdir(mode=0o700)
    write_directive(tmp_path, Directive.new(operation="launch", endpoint=Endpoint(host="127.0.0.1", port=8000)))
    return tmp_path
