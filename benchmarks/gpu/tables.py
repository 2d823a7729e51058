"""Modules of the tests that a GPU is asked too: its tables of rows, and what drives them."""

import importlib
import sys
from types import ModuleType

from benchmarks.gpu.packages import ROOT


def load(folder: str, name: str) -> ModuleType:
    """tests/FOLDER/NAME.py under its own name, as pytest imports it."""
    path = str(ROOT / "tests" / folder)
    if path not in sys.path:
        sys.path.append(path)
    return importlib.import_module(name)
