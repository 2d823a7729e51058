"""From the words after `dolmen train` and `dolmen dryrun` to a request. A run comes from a recipe
or YAML file, then --init, then options, each over the one before.
"""

from collections.abc import Set
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dolmen.cli import help, model_options, short
from dolmen.cli.parse import HELP, Group, Option, groups, options, parse
from dolmen.core.config import Mark, from_dict
from dolmen.core.messages import BadInput
from dolmen.families import start as models
from dolmen.launch import process
from dolmen.recipes.changed import MODEL_TYPE, request
from dolmen.recipes.named import described, named
from dolmen.training.config import RunConfig
from dolmen.training.folder import check_folder
from dolmen.training.request import Handling, Request

if TYPE_CHECKING:
    from dolmen.planning.config import DryrunRequest

ALL = "--all"  # beside --help: every option
NEUTRAL = "pretrain"  # the recipe of a help that names none
ABOUT = "Train a model: a built-in recipe (dolmen recipes) or a YAML file, changed by options."


def verb_options(verb: str) -> type:
    """The class of the options that `train` or `dryrun` has beside those of a run."""
    if verb == "train":
        return Handling
    from dolmen.planning.config import DryrunConfig  # 15 ms, which `train` does not owe

    return DryrunConfig


def parse_run(verb: str, argv: list[str]) -> "Request | DryrunRequest":
    """A run, and what is to be done with it. Exits with 0 after --help, which reads no model and
    asks nothing of the machine. Raises BadInput, ValueError, KeyError or OSError.
    """
    argv = ["--log.verbose" if word == "-v" else word for word in argv]
    words = [word for word in argv[:1] if not word.startswith("-")]
    if HELP & {*argv}:
        _help_of_run(verb, words, argv)
    if not words:
        raise BadInput(
            f"name a recipe or a YAML file first: dolmen {verb} quickstart (dolmen recipes "
            "lists them)"
        )
    cls, (name,) = verb_options(verb), words
    said = parse(argv[1:], options_of_run(verb), verb, rest=True)
    own = {one.name: said.pop(one.name) for one in fields(cls) if one.name in said}
    if verb == "train":
        run = named(name, here=False, init=said.get("init"))
        _check_out({*own}, Request.of(run, Handling(out=own.get("out")), name).out)
        return request(name, said | own)
    asked: Any = from_dict(cls, own)
    if handling := [one.name for one in fields(Handling) if one.name in said]:
        raise BadInput(f"unknown option --{handling[0]}: dolmen {verb} --help lists them")
    from dolmen.planning.config import DryrunRequest  # as in `verb_options`

    return DryrunRequest(request(described(name), said).config, asked)


def _check_out(said: Set[str], out: Path) -> None:
    """Raises ValueError for a folder that holds something, before a model is opened; with --resume
    and --overwrite, and of ranks that a launcher started, it is checked with the run.
    """
    if process.read_launch() is None and not {"resume", "overwrite"} & said:
        check_folder(out, resume=False, overwrite=False)


def options_of_run(verb: str) -> dict[str, Option]:
    """The options of a verb whose options are those of a run, but for its model's."""
    return options([*groups(verb_options(verb)), *_groups_of_run()])


def _groups_of_run(run: RunConfig | None = None) -> list[Group]:
    """The options of a run, but for its name and its model."""
    first, *sections = groups(RunConfig, run)
    own = tuple(one for one in first.options if one.name not in ("name", "model"))
    return [Group(first.title, first.about, own), *sections]


def _help_of_run(verb: str, words: list[str], argv: list[str]) -> None:
    """Show the help of a verb whose options are those of a run, and exit with 0."""
    cls, name = verb_options(verb), words[0] if words else NEUTRAL
    given = [word for word in argv[len(words) :] if word not in (*HELP, ALL)]
    said = parse(given, options_of_run(verb), verb, rest=True)
    init = said.get("init")
    run = described(name) if verb == "dryrun" else named(name, here=False, init=init)
    if verb == "train" and ALL not in argv:
        print(short.short(words[0] if words else None, run))
        raise SystemExit(0)
    model = models.start_model(run.model, " ".join(said.get(MODEL_TYPE, ())) or None).model
    (first, *sections), (own,) = _groups_of_run(run), groups(cls)
    recipe = Option("recipe", str, "Recipe or YAML file.", MISSING, (Mark.POSITIONAL,))
    top = Group("", "", (recipe, *first.options, *own.options))
    about = ABOUT if verb == "train" else cls.__doc__ or ""
    print(help.full(verb, about, [top, *model_options.groups(model), *sections]))
    raise SystemExit(0)
