"""`dolmen` and `python -m dolmen`: one command line in a process of its own."""

import gc
import sys
from typing import NoReturn

from dolmen import cli
from dolmen.launch import process


def main() -> NoReturn:
    """Run this process's command line, and exit with its code."""
    process.open_standard_streams()
    # Torch and transformers make a million objects on import, none of them garbage. Looking through
    # them takes a process 0.4 s of CPU time while it imports (threshold 700) and 0.7 s at its exit.
    gc.set_threshold(100_000)
    try:
        sys.exit(cli.main())
    finally:
        gc.freeze()  # nothing is left for the interpreter's last collections


if __name__ == "__main__":
    main()
