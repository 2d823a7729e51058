"""The small run of tests/train, for all tests of commands."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

from tinyrun import material, one_thread  # noqa: E402, F401
