"""What every test may ask for: real CRIU, a real engine's interpreter, facts of this machine, free ports."""

import os
import socket
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # ``provided`` and ``strategies``

import provided

# A deadline asserts the speed of the machine, and so does the check of how long the first examples take.
settings.register_profile("coldsnap", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("coldsnap")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Where every test must be able to run, a skipped one has failed."""
    report = yield
    if report.skipped and os.environ.get("CI"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, and in CI nothing may be: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def criu():
    """The CRIU of this test session."""
    return provided.criu()


@pytest.fixture(scope="session")
def engine_python():
    """The interpreter that engines are started with."""
    return provided.engine_python()


@pytest.fixture(scope="session")
def sglang_python():
    """The interpreter that SGLang is started with."""
    return provided.sglang_python()


@pytest.fixture(scope="session")
def facts(criu):
    """This machine, probed once; a test about ports probes again."""
    from coldsnap.host.probe import probe

    return probe(criu=criu)


@pytest.fixture
def free_port():
    """A port that nobody listens on."""
    return unused_port()


@pytest.fixture
def free_ports():
    """A maker of ports that nobody listens on, each another."""
    return lambda count: [unused_port() for _ in range(count)]


def unused_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def reference(engine_python):
    """The reference engine, as a user would describe it."""
    from coldsnap.testing.reference import ReferenceEngine

    return ReferenceEngine(python=engine_python)
