"""Paths as users write them."""

import os
from pathlib import Path


def expand(name: str | Path) -> Path:
    """`~` and `~user` as folders; of a user that there is not, the name as it stands, as a shell
    does (Path.expanduser raises RuntimeError).
    """
    return Path(os.path.expanduser(name))
