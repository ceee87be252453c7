"""Where the documents are."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def root():
    """The checkout."""
    return Path(__file__).parents[2]
