"""From the words after `dolmen VERB` to what the verb is asked. A run comes from a recipe or YAML
file, then --init, then options, each over the one before.

    named     the run of a recipe or file
    begun     with the model that it starts from
    start     that model, of the family that options name: the options are its fields
    parse     words over all of it
    asked     the model with what they changed
"""

from dataclasses import fields, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import tyro

from dolmen.cli import model_options
from dolmen.cli.options import BARE, HANDED, NEVER, PARTS, RUNS, SECTIONS, VERBS, run_options
from dolmen.cli.parse import HELP, last, parse, said
from dolmen.core.config import from_dict
from dolmen.core.messages import BadInput, message
from dolmen.core.paths import refuse_empty
from dolmen.families import start as models
from dolmen.files import gate, kinds
from dolmen.launch import process
from dolmen.planning.config import DryrunConfig, DryrunRequest
from dolmen.recipes import RECIPES
from dolmen.recipes.named import begun, described, named, otherwise_long
from dolmen.training.config import RunConfig
from dolmen.training.folder import check_folder
from dolmen.training.request import Handling, Request

T = TypeVar("T", Handling, DryrunConfig)
ALL = "--all"  # beside --help: every option
NEUTRAL = "pretrain"  # the recipe of a help that names none


def read(verb: str, argv: list[str]) -> Any:
    """What the words after `dolmen VERB` ask for, as that verb's `run` takes it. Exits with 0 after
    --help. Raises BadInput.
    """
    try:
        for name in ("out", "to", "init"):
            refuse_empty(f"--{name}", last(argv, name))
        if verb in RUNS:
            return parse_run(verb, argv)
        if verb in PARTS:
            return parse_part(verb, argv)
        return parse(VERBS[verb], whole(argv, BARE.get(verb, {}), NEVER.get(verb, {})), verb)
    except BrokenPipeError:  # who reads the help has left
        raise
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(message(error)) from None


def parse_part(verb: str, argv: list[str]) -> Any:
    """What a verb of several parts is asked: the first word says which. Exits with 0 after --help.
    Raises BadInput.
    """
    told, parts = PARTS[verb]
    named = argv[0] if argv else ""
    if named in parts:
        return parse(parts[named], argv[1:], f"{verb} {named}")
    if named in HELP:
        print(f"usage: dolmen {verb} {{{','.join(parts)}}} ...\n\n{told}\n")
        print("\n".join(f"  dolmen {verb} {part} --help says more" for part in parts))
        raise SystemExit(0)
    said = f"{named} is none of them" if named else "say which part"
    raise BadInput(f"{said}: dolmen {verb} has {', '.join(parts)}")


def whole(argv: list[str], bare: dict[str, str], never: dict[str, str]) -> list[str]:
    """`argv` with the values of options that stand without one: those that are `bare` have theirs,
    and those of `never` switch another one off.
    """
    found: list[str] = []
    for word, after in zip_longest(argv, argv[1:], fillvalue="--"):
        name = word.removeprefix("--").replace("_", "-")
        if word.startswith("--") and name in never:
            found += [f"--{never[name]}", "False"]
        elif word.startswith("--") and name in bare and after.startswith("--"):
            found += [word, bare[name]]
        else:
            found.append(word)
    return found


def take(verb: str, file: Path) -> Any:
    """What our launcher hands its workers in `file`, as `read` gave it there. Raises BadInput."""
    cls = HANDED.get(verb) or VERBS[verb]
    try:
        return from_dict(cls, gate.read_yaml(file, kinds.RUN))
    except ValueError as error:
        raise BadInput(message(error)) from None


def parse_run(verb: str, argv: list[str]) -> Request | DryrunRequest:
    """A run, and what is to be done with it. Exits with 0 after --help, which reads no model and
    asks nothing of the machine. Raises BadInput, ValueError, KeyError or OSError.
    """
    argv = ["--log.verbose" if word == "-v" else word for word in argv]
    words, helped = [word for word in argv[:1] if not word.startswith("-")], bool(HELP & {*argv})
    if not words and not helped:
        raise BadInput(
            f"name a recipe or a YAML file first: dolmen {verb} quickstart (dolmen recipes "
            "lists them)"
        )
    name = words[0] if words else NEUTRAL
    init = last(argv, "init")
    run = described(name) if verb == "dryrun" else named(name, here=not helped, init=init)
    if helped:
        if verb == "train" and words and ALL not in argv:
            _show_short(name, run)
        argv = [word for word in argv if word != ALL]
    else:
        if verb == "train":
            _check_out(argv, Request.of(run, Handling(out=last(argv, "out")), name).out)
        run = begun(otherwise_long(run, said(argv)), init)
    start = models.start(run.model, last(argv, model_options.MODEL_TYPE))
    family = start.model.family
    model_cls = model_options.options(family)
    before, cls = model_options.default(model_cls, start.model), run_options(model_cls, RUNS[verb])
    sections = {section.name: getattr(run, section.name) for section in SECTIONS}
    default = cls(recipe=tyro.MISSING, model=before, init=run.init, **sections)
    options = parse(cls, model_options.resolve_aliases(argv, family), verb, default)
    model = models.asked(start, model_options.said(before, options.model))
    asked_for = {section.name: getattr(options, section.name) for section in SECTIONS}
    asked = replace(run, model=model, **asked_for)
    if verb == "dryrun":
        return DryrunRequest(asked, _part(DryrunConfig, options))
    return Request.of(asked, _part(Handling, options), name)


def _check_out(argv: list[str], out: Path) -> None:
    """Raises ValueError for a folder that holds something, before a model is opened; with --resume
    and --overwrite, and of ranks that a launcher started, it is checked with the run.
    """
    if process.started() is None and not {"resume", "overwrite"} & said(argv):
        check_folder(out, resume=False, overwrite=False)


def _show_short(name: str, run: RunConfig) -> None:
    """Show the short help of a recipe that has one, and exit with 0."""
    from dolmen.cli import short  # of few words

    if name in short.SHORT:
        print(short.text(name, " ".join((RECIPES[name].__doc__ or "").split()), run))
        raise SystemExit(0)


def _part(cls: type[T], options: Any) -> T:
    """The fields of `options` that a `cls` has."""
    return cls(**{one.name: getattr(options, one.name) for one in fields(cls)})
