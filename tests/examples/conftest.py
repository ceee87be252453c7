"""The examples, imported as a user runs them, on the reference engine in place of vLLM."""

import importlib.util
import socket
import sys
from pathlib import Path

import pytest

import coldsnap as cs
from coldsnap.errors import EngineError
from coldsnap.keeper.rundir import new_name
from coldsnap.testing.reference import ReferenceEngine

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))  # what the examples share lies beside them


@pytest.fixture(scope="session")
def example():
    """Import an example by name."""

    def load(name):
        spec = importlib.util.spec_from_file_location(
            f"coldsnap_example_{name.replace('/', '_')}", EXAMPLES / f"{name}.py"
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def described(engine_python):
    """Describe reference engines."""
    return lambda **options: ReferenceEngine(python=engine_python, **options)


@pytest.fixture
def engine_name():
    """A name for an engine that a test leaves running; it is stopped afterwards."""
    name = new_name("example")
    yield name
    try:
        cs.Engine.attach(name).stop()
    except EngineError:
        return  # the test has stopped it


@pytest.fixture(scope="session")
def artifact(tmp_path_factory, example, described, criu):
    """One artifact of a reference engine, made by ``capture.py``."""
    module = example("capture")
    output = tmp_path_factory.mktemp("examples") / "artifact"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = module.arguments(["reference", str(output), "--criu", criu, "--port", str(port)])
    module.capture(described(), options)
    return output
