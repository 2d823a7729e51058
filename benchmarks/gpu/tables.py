"""Import modules of the tests that also run on a GPU: the tables of rows, and what drives them."""

import importlib
import sys
from types import ModuleType

from benchmarks.gpu.packages import ROOT


def load(folder: str, name: str) -> ModuleType:
    """Import tests/FOLDER/NAME.py under its own name, as pytest does: modules of tests/ and of
    tests/FOLDER import each other without a package.
    """
    for path in (str(ROOT / "tests"), str(ROOT / "tests" / folder)):
        if path not in sys.path:
            sys.path.append(path)
    return importlib.import_module(name)
