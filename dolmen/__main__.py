"""`python -m dolmen` is `dolmen`."""

import sys

from dolmen.cli import main

if __name__ == "__main__":
    sys.exit(main())
