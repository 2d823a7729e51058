"""The files that a plan is asked for: that they can be written is known before it is made."""

import errno
import os
from pathlib import Path

import yaml

from dolmen.core.config import to_dict
from dolmen.files import gate, write
from dolmen.planning.config import PlanConfig
from dolmen.planning.plan import Plan
from dolmen.planning.question import Question
from dolmen.planning.report import NAME


def refuse(asked: PlanConfig) -> None:
    """Raises ValueError for a file that could not be written."""
    if asked.as_recipe is not None and Path(asked.as_recipe).suffix not in (".yaml", ".yml"):
        raise ValueError(f"--as-recipe {asked.as_recipe}: give a .yaml file")
    json = None if asked.json == "-" else asked.json
    for option, told in (("as-recipe", asked.as_recipe), ("json", json)):
        if told is not None:
            _refuse(f"--{option} {told}", Path(told), Path(told).parent)
    if asked.report is not None:
        folder = Path(asked.report).absolute()
        found = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
        _refuse(f"--report {asked.report}", folder / NAME, found)


def _refuse(words: str, file: Path, folder: Path) -> None:
    """`folder`: where the file is written, or the first folder on its way."""
    number = 0
    if file.is_dir():
        number = errno.EISDIR
    elif file.exists() and not file.is_file():  # a device, which would be one no more
        number = errno.EINVAL
    elif not folder.is_dir():
        number = errno.ENOTDIR if os.path.lexists(folder) else errno.ENOENT
    elif not os.access(folder, os.W_OK | os.X_OK):
        number = errno.EACCES
    if number:
        raise ValueError(f"{words}: {os.strerror(number)}")


def write_recipe(question: Question, found: Plan, file: Path) -> None:
    """The first layout as a run that `dolmen train` takes. Raises ValueError where it cannot be
    written.
    """
    run = question.as_run(found.ranked[0].layout)
    text = gate.whole_yaml(yaml.safe_dump(to_dict(run), sort_keys=False))
    try:
        write.replace(file, text)
    except OSError as error:
        raise ValueError(f"--as-recipe {file}: {error.strerror}") from None
