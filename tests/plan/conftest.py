"""Plans need nothing but data."""

import pytest
from fleet import cpu_host, facts, gpu_host

from coldsnap.policy import Policy
from coldsnap.resolve import resolve


@pytest.fixture
def cpu():
    return cpu_host()


@pytest.fixture
def gpu():
    return gpu_host()


@pytest.fixture
def planned():
    """Resolve an operation on one machine, with policy leaves by dotted path."""

    def plan(operation, host=None, **leaves):
        return resolve(Policy().evolve(**leaves), operation, facts(host or cpu_host()))

    return plan
