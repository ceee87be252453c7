"""The reference engine under a real keeper."""

import socket
from contextlib import ExitStack, suppress

import pytest

from coldsnap.engines.control import Ranks
from coldsnap.engines.endpoint import await_ready
from coldsnap.engines.settings import inherited_environment
from coldsnap.errors import EngineError
from coldsnap.keeper.client import Keeper
from coldsnap.keeper.directive import Directive, Endpoint, write_directive
from coldsnap.keeper.undo import KILL
from coldsnap.testing.reference import ReferenceEngine


class Running:
    """One reference engine that serves."""

    def __init__(self, spec, keeper, endpoint):
        self.spec, self.keeper, self.endpoint = spec, keeper, endpoint
        self.ranks = Ranks(keeper.rank_dir)

    def ended(self):
        status = self.keeper.status()
        return None if status.state == "running" else f"{status.state} ({status.exit})"

    def direct(self, operation="restore", directive=None):
        directive = directive or Directive.new(operation=operation, endpoint=self.endpoint)
        write_directive(self.keeper.rank_dir, directive)
        return directive


@pytest.fixture
def launch(tmp_path, engine_python):
    """Start reference engines; everything is ended and removed afterwards."""
    with ExitStack() as stack:
        yield lambda **options: start(stack, tmp_path, engine_python, **options)


@pytest.fixture(scope="module")
def running(tmp_path_factory, engine_python):
    """One reference engine for the tests that leave it as they found it."""
    with ExitStack() as stack:
        yield start(stack, tmp_path_factory.mktemp("shared"), engine_python, loopback=True)


def start(stack, directory, python, *, wait=True, **options):
    spec = ReferenceEngine(python=python, **options)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = Endpoint(host="127.0.0.1", port=probe.getsockname()[1])
    keeper = stack.enter_context(Keeper.start(directory / f"run{endpoint.port}"))
    running = Running(spec, keeper, endpoint)
    environ = {name: value for name, value in inherited_environment().items() if name != "PYTHONPATH"}
    command = spec.launch_command(endpoint, environ=environ)
    with keeper.operation("launch", [KILL]):
        running.direct("launch")
        keeper.spawn_engine(command.argv, env=command.env, cwd=command.cwd)
        stack.callback(stop, keeper)
        if wait:
            await_ready(endpoint, timeout_s=60, ended=running.ended, log=keeper.log_path)
    return running


def stop(keeper):
    with suppress(EngineError):  # it ended by itself, and its keeper with it
        keeper.stop(grace_s=5)
