"""Paths as users write them."""

import os
import re
from pathlib import Path


def expand(name: str | Path) -> Path:
    """`~` and `~user` as folders; of a user that there is not, the name as it stands, as a shell
    does (Path.expanduser raises RuntimeError).
    """
    return Path(os.path.expanduser(name))


def may_be_hub_id(name: str) -> bool:
    """Whether a name that is no path here can be meant for the hub: `name` or `org/name`; below a
    folder that exists it is a path that was misspelled.
    """
    word = r"[A-Za-z0-9][\w.-]*"
    here = "/" in name and Path(name).parent.exists()
    return re.fullmatch(rf"({word}/)?{word}", name) is not None and not here


def is_absent(name: str | Path) -> bool:
    """Whether a name can be of a folder alone, and there is none."""
    return not expand(name).is_dir() and not may_be_hub_id(str(name))


def refuse_empty(option: str, *names: str | None) -> None:
    """Raises ValueError if one of the names is empty: as the value of a variable of a shell that
    was never set, it would be taken for the option's default, or for the current folder.
    """
    if any(name is not None and not name.strip() for name in names):
        raise ValueError(f"{option} is empty: give a name, or leave the option out")
