"""Make ``strategies`` importable from the directory above, and keep Hypothesis free of deadlines."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parents[1]))

# A deadline asserts the speed of the machine.
settings.register_profile("coldsnap", deadline=None)
settings.load_profile("coldsnap")
