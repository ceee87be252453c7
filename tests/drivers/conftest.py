"""Real CRIU, found like a user finds it; without it the tests marked ``criu`` cannot run."""

import pytest
from drivers_lab import Lab, find_criu


@pytest.fixture(scope="session")
def criu():
    path = find_criu()
    assert path, "no CRIU: run tools/get_criu.py, or name one in COLDSNAP_TEST_CRIU"
    return path


@pytest.fixture
def lab(tmp_path, criu):
    lab = Lab(tmp_path, criu)
    yield lab
    lab.close()
