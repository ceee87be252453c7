"""Real CRIU under real keepers."""

import pytest
from drivers_lab import Lab


@pytest.fixture
def lab(tmp_path, criu):
    lab = Lab(tmp_path, criu)
    yield lab
    lab.close()
