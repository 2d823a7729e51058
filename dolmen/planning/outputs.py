"""Output files of `dolmen plan`: checked before the search, and --as-recipe."""

import shlex
from dataclasses import replace
from pathlib import Path

import yaml

from dolmen.core.config import to_dict
from dolmen.core.messages import escape
from dolmen.files import gate, write
from dolmen.planning.config import PlanConfig
from dolmen.planning.plan import Plan
from dolmen.planning.question import Question
from dolmen.planning.report import NAME

RECIPE = "# Written by dolmen plan --as-recipe."
TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
"""Files of which a folder of transformers with a tokenizer has one."""


def check(options: PlanConfig) -> None:
    """Raise ValueError for an output file that exists, cannot be written, or has the wrong suffix,
    before anything is planned.
    """
    if options.as_recipe is not None and Path(options.as_recipe).suffix not in (".yaml", ".yml"):
        raise ValueError(f"--as-recipe {options.as_recipe}: give a .yaml file")
    if options.as_recipe is not None:
        write.check_new("--as-recipe", options.as_recipe)
    if options.json not in (None, "-"):
        write.check_new("--json", options.json)
    if options.report is not None:
        write.check_new("--report", Path(options.report) / NAME, parents=True)


def write_recipe(question: Question, found: Plan, file: Path) -> str:
    """Write the first layout as a run for the plan's tokens to `file`. Returns the command that
    trains it, with placeholders for data and tokenizer if they are missing. Raises ValueError where
    it cannot be written.
    """
    run = question.run_with_layout(found.ranked[0].layout)
    if found.tokens:
        # one length, that of the plan
        train = replace(run.train, tokens=found.tokens, steps=None, epochs=None)
        run = replace(run, train=train)
    folder = Path(question.name)
    if run.data.tokenizer is None and any((folder / name).is_file() for name in TOKENIZER):
        # the model's folder has one
        run = replace(run, data=replace(run.data, tokenizer=str(folder.absolute())))
    # in the order of the options, as people read them
    text = gate.seal_yaml(yaml.safe_dump(to_dict(run), sort_keys=False))
    text = f"{RECIPE}\n{text}"
    try:
        write.replace(file, text)
    except OSError as error:
        raise ValueError(f"--as-recipe {file}: {error.strerror}") from None
    words = ["" if run.data.path else " --data.path TEXT"]
    words.append("" if run.data.tokenizer or run.init else " --data.tokenizer FOLDER")
    return f"dolmen train {shlex.quote(escape(file))}{''.join(words)}"
