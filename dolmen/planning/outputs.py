"""The files that a plan is asked for: that they can be written, and take the place of nothing that
dolmen has not written, is known before it is made.
"""

import errno
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from dolmen.core.config import to_dict
from dolmen.files import gate, write
from dolmen.planning.config import PlanConfig
from dolmen.planning.plan import Plan
from dolmen.planning.question import Question
from dolmen.planning.report import MARK, NAME

RECIPE = "# Written by dolmen plan --as-recipe."
# what is at the beginning of each file that we write
MARKS = {"as-recipe": (RECIPE,), "json": ('{\n "model": ', '\n "cluster": '), "report": (MARK,)}
TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
"""Files of which a folder of transformers with a tokenizer has one."""
BEGINNING = 4096
"""Bytes in which a mark is."""


def refuse(options: PlanConfig) -> None:
    """Raises ValueError for a file that could not be written, or is not ours to replace."""
    if options.as_recipe is not None and Path(options.as_recipe).suffix not in (".yaml", ".yml"):
        raise ValueError(f"--as-recipe {options.as_recipe}: give a .yaml file")
    json = None if options.json == "-" else options.json
    for option, file in (("as-recipe", options.as_recipe), ("json", json)):
        if file is not None:
            _refuse(f"--{option} {file}", Path(file), Path(file).parent)
            refuse_anothers(f"--{option} {file}", Path(file), MARKS[option])
    if options.report is not None:
        folder = Path(options.report).absolute()
        found = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
        _refuse(f"--report {options.report}", folder / NAME, found)
        refuse_anothers(f"--report {options.report}", folder / NAME, MARKS["report"])


def refuse_anothers(words: str, file: Path, marks: Sequence[str]) -> None:
    """Raises ValueError for a file that is there and has not all `marks` that ours begin with."""
    if not file.is_file():
        return
    try:
        with file.open("rb") as stream:
            beginning = stream.read(BEGINNING)
    except OSError as error:
        raise ValueError(f"{words}: {error.strerror}") from None
    if not all(mark.encode() in beginning for mark in marks):
        raise ValueError(
            f"{words}: {file.name} is there, and dolmen has not written it: move it, or give "
            "another name"
        )


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


def write_recipe(question: Question, found: Plan, file: Path) -> str:
    """The first layout as a run for the tokens that were planned; returned is the command that
    trains it, with a place for what it must still be given. Raises ValueError where it cannot be
    written.
    """
    run = question.run_with_layout(found.ranked[0].layout)
    if found.tokens:
        train = replace(run.train, tokens=found.tokens, steps=None, epochs=None)
        run = replace(run, train=train)
    folder = Path(question.name)
    if run.data.tokenizer is None and any((folder / name).is_file() for name in TOKENIZER):
        run = replace(run, data=replace(run.data, tokenizer=str(folder.absolute())))
    text = gate.whole_yaml(yaml.safe_dump(to_dict(run), sort_keys=False))
    text = f"{RECIPE}\n{text}"
    try:
        write.replace(file, text)
    except OSError as error:
        raise ValueError(f"--as-recipe {file}: {error.strerror}") from None
    words = ["" if run.data.path else " --data.path TEXT"]
    words.append("" if run.data.tokenizer or run.init else " --data.tokenizer FOLDER")
    return f"dolmen train {shlex.quote(str(file))}{''.join(words)}"
