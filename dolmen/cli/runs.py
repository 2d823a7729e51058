"""The verbs train and replay, and the options of a run, which dryrun has too. A run comes from a
recipe or YAML file, then --init, then options, each overriding the one before.

    dolmen train RECIPE|FILE.yaml
    dolmen train RECIPE --help          one command and the most important options, a line each
    dolmen train RECIPE --help --all    every option, with the fields of the model's family
"""

from collections.abc import Mapping, Set
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from dolmen import families
from dolmen.cli.parse import (
    HELP,
    Option,
    OptionGroup,
    full_help,
    groups,
    help_width,
    options,
    parse,
)
from dolmen.core.config import Mark, Words, from_dict, plain_type, to_dict
from dolmen.core.messages import BadInput, unknown_options
from dolmen.families import Field, ModelConfig
from dolmen.families import start as models
from dolmen.families.start import option_type
from dolmen.launch import process
from dolmen.recipes import RECIPES
from dolmen.recipes.overrides import MODEL_TYPE, build_request, load_run, load_run_to_inspect
from dolmen.training.config import RunConfig
from dolmen.training.folder import check_folder
from dolmen.training.request import LaunchOptions, ReplayConfig, TrainRequest

if TYPE_CHECKING:
    from dolmen.planning.config import DryrunRequest


LENGTH = ("train.sequence-length", "train.global-batch-size", "train.microbatch-size")
MACHINE = ("train.dtype", "layout.tp")
TUNING = (
    *("train.epochs", *LENGTH, "optimizer.lr", "adapter.rank", *MACHINE),
    *("finish.export", "out"),
)
ROLLOUTS = ("train.steps", "train.global-batch-size", "train.microbatch-size", "optimizer.lr")
ROWS = {
    "text": "Text: files, folders, .jsonl, .parquet, .bin or hub ids",
    "chats": "Rows with `messages`, `conversations` or `instruction`",
    "pairs": "Rows with `chosen` and `rejected`, and a `prompt`",
    "completions": "Rows with a `completion`, its `label`, and a `prompt`",
    "prompts": "Rows with a `prompt` or `messages`",
}
"""Content of --data.path by --data.rows."""
FAMILY = "Family of a new model; --help --all lists its sizes"


@dataclass(frozen=True)
class ShortHelp:
    """The short help of a recipe: an example and its most important options, each with the first
    sentence of its help text.
    """

    example: str
    options: tuple[str, ...]
    required: frozenset[str]
    """Options that have no default."""
    note: str = ""
    """A line below the options; "" for none."""


SHORT = {
    "pretrain": ShortHelp(
        "dolmen train {name} --data.path text/",
        (
            *("init", "model.model-type", "data.path", "data.tokenizer", "train.steps", *LENGTH),
            *(
                "optimizer.lr",
                *MACHINE,
                "layout.dp",
                "layout.pp",
                "checkpoint.every",
                "finish.export",
                "out",
            ),
        ),
        frozenset({"data.path"}),
    ),
    "sft": ShortHelp(
        "dolmen train sft --init Qwen/Qwen3-0.6B --data.path chats.jsonl --finish.export",
        (
            *("init", "data.path", "data.template", "data.masking-strategy"),
            *("data.validation-fraction", *TUNING),
        ),
        frozenset({"init", "data.path"}),
    ),
    "reward": ShortHelp(
        "dolmen train reward --init runs/sft --data.path pairs.jsonl --finish.export",
        (
            *("init", "data.path", "objective.margin", "objective.center-rewards-coefficient"),
            *("data.validation-fraction", *TUNING),
        ),
        frozenset({"init", "data.path"}),
    ),
    "dpo": ShortHelp(
        "dolmen train dpo --init runs/sft --data.path pairs.jsonl --finish.export",
        (
            *("init", "data.path", "objective.loss-type", "objective.beta", "objective.reference"),
            *TUNING,
        ),
        frozenset({"init", "data.path"}),
    ),
    "grpo": ShortHelp(
        "dolmen train grpo --init runs/sft --data.path questions.jsonl --reward gsm8k",
        (
            *("init", "data.path", "reward", "rollout.num-generations", "rollout.max-new-tokens"),
            *("rollout.temperature", "rollout.loss-type", "rollout.beta", *ROLLOUTS),
            *("adapter.rank", "layout.tp", "out"),
        ),
        frozenset({"init", "data.path", "reward"}),
    ),
    "ppo": ShortHelp(
        "dolmen train ppo --init runs/sft --data.path questions.jsonl --reward runs/reward/hf",
        (
            *("init", "data.path", "reward", "critic.init", "rollout.max-new-tokens"),
            *("rollout.temperature", "rollout.epochs", "ppo.kl-coef", *ROLLOUTS),
            *("critic.lr", "layout.tp", "out"),
        ),
        frozenset({"reward"}),
        "With --init other defaults apply: dolmen train ppo --init MODEL --help shows them.",
    ),
}
"""Short help by recipe; other runs have that of their objective."""
START = {"init": "MODEL", "data.tokenizer": "DIR"}
"""Values that stand in the example for what a run of pretraining starts from."""
PAGES = {"pretrain": "how-to/data.md", "continue-language": "how-to/vocabulary.md"}
"""Page of docs by recipe."""


def short_help(name: str | None, run: RunConfig) -> str:
    """Return the text of `dolmen train NAME --help`, the most important options only: `name` is a
    recipe or YAML file (None: none was named); the values of `run` are shown as defaults.
    """
    about = "a built-in recipe (dolmen recipes) or a YAML file, changed by options"
    if name in RECIPES:
        # the docstring of a recipe is its text
        about = " ".join((RECIPES[name].__doc__ or "").split())
    # a YAML file, and recipes that share an objective
    kind = _short_kind(run) if name not in SHORT else name
    return _format_short_help(kind, name or "RECIPE", about, run)


def _short_kind(run: RunConfig) -> str:
    """Return for a run the recipe whose short help (SHORT) suits it: "sft" if its data are chats,
    else the name of its objective if there is such a help, else "pretrain".
    """
    if run.data.rows == "chats":
        return "sft"
    # objectives have the names of their recipes
    return run.objective.name if run.objective.name in SHORT else "pretrain"


def _format_short_help(kind: str, name: str, about: str, run: RunConfig) -> str:
    """Return the short help text that SHORT has for recipes of the `kind`, with the name and
    description (`about`) of the recipe `name`, and the values of `run` as defaults.
    """
    short, page = SHORT[kind], PAGES.get(name, PAGES.get(kind, "how-to/tuning.md"))
    # without a name the run is not yet known
    needed = _start_options(run) if kind == "pretrain" and name != "RECIPE" else ()
    example = " ".join([short.example, *(f"--{option} {START[option]}" for option in needed)])
    required = {*short.required, *needed}
    # one column of names, so texts are aligned
    width = max(map(len, short.options)) + 2
    model_type = run.model and run.model.model_type
    values = to_dict(run) | to_dict(LaunchOptions()) | {"model": {"model_type": model_type}}
    texts = {name: _summarize(option) for name, option in run_options("train").items()}
    texts |= {"data.path": ROWS[run.data.rows], MODEL_TYPE.replace("_", "-"): FAMILY}
    lines = []
    for option in short.options:
        value = _format_value(values, option)
        note = " (needed)" if option in required and not value else value and f" [{value}]"
        line, indent = f"  --{option:{width}}{texts[option]}{note}", " " * (width + 4)
        lines += wrap(line, help_width(100), subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(
        [
            f"usage: dolmen train {name} [OPTIONS]",
            "",
            *wrap(f"{name}: {about}.", help_width(96)),
            "",
            f"  {example.format(name=name)}",
            "",
            "The most important options, with their defaults in []:",
            "",
            *lines,
            "",
            *([short.note] if short.note else []),
            *wrap(
                f"dolmen train {name} --help --all lists every option; docs/{page} explains them.",
                help_width(100),
            ),
        ]
    )


def _start_options(run: RunConfig) -> tuple[str, ...]:
    """Return the options of pretraining that a run needs besides its data: the model to start from,
    or the tokenizer of a new model.
    """
    if run.init:
        return ()
    if run.model is None:
        return ("init",)
    return () if run.data.tokenizer else ("data.tokenizer",)


def _summarize(option: Option) -> str:
    """Return the first sentence of an option's help text, with its choices if there are some."""
    text, kind = option.text.partition(". ")[0].rstrip("."), plain_type(option.hint)
    return (
        f"{text} ({', '.join(map(str, get_args(kind)))})" if get_origin(kind) is Literal else text
    )


def _format_value(values: Mapping[str, Any], option: str) -> str:
    """Return the value of an option (dotted name with dashes) as text for the help: yes or no for a
    bool, words for a list, "" for None. `values`: all options, nested by section.
    """
    value: Any = values
    for part in option.replace("-", "_").split("."):
        value = value[part]
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case list() | tuple():
            return " ".join(map(str, value))
        case float():
            return f"{value:g}"
    return str(value)


PREFIX = "model."


def model_groups(model: ModelConfig) -> list[OptionGroup]:
    """Return the groups of options --model.*: model-type and the config.json fields of the model's
    family, with the model's values as defaults; then a group for each nested field, such as
    rope_parameters. The help text of a field lists other names that it may be given by.
    """
    family, values = model.family, families.explicit_fields(model)
    # shown as the choices of --model.model-type
    known = Literal[tuple(families.families())]
    text = "Model family (model_type of config.json), which determines the other options."
    kind = Option(f"{PREFIX}model-type", known, text, model.model_type)
    options = [
        _model_option(PREFIX, field, values)
        for field in family.fields
        if field.help and not field.nested
    ]
    about = "Fields of the model's config.json, which depend on its family."
    return [
        OptionGroup("model", about, (kind, *options)),
        *(_group(field, values.get(field.name) or {}) for field in family.fields if field.nested),
    ]


def _group(field: Field, values: dict[str, Any]) -> OptionGroup:
    """Return the group of options of a nested config.json field of a model, such as
    rope_parameters. `values`: its fields' values, shown as defaults.
    """
    prefix = f"{PREFIX}{field.name.replace('_', '-')}."
    inner = tuple(_model_option(prefix, inside, values) for inside in field.nested if inside.help)
    return OptionGroup(prefix.rstrip("."), f"Fields of {field.name}.", inner)


def _model_option(prefix: str, field: Field, values: dict[str, Any]) -> Option:
    """Return the option --PREFIXfield of a config.json field of a model. Its default is the field's
    value in `values`, its text lists other names of the field that work.
    """
    # nested names are no options
    aliases = [name for name in (*field.aliases, *field.common) if "." not in name]
    also = (
        f" Also {', '.join(f'--{PREFIX}{n}'.replace('_', '-') for n in aliases)}."
        if aliases
        else ""
    )
    name = f"{prefix}{field.name.replace('_', '-')}"
    return Option(name, option_type(field.kind), field.help + also, values.get(field.name))


ALL = "--all"  # with --help: list every option
DEFAULT_RECIPE = "pretrain"  # whose help is shown where none is named
ABOUT = "Train a model: a built-in recipe (dolmen recipes) or a YAML file, changed by options."


def extra_options(verb: str) -> type:
    """Return the config class of the options that the verb has beside those of a run: LaunchOptions
    for "train", otherwise DryrunConfig.
    """
    if verb == "train":
        return LaunchOptions
    from dolmen.planning.config import DryrunConfig  # 15 ms to import, which `train` does not need

    return DryrunConfig


def parse_run(verb: str, argv: list[str]) -> "TrainRequest | DryrunRequest":
    """Parse the arguments of `dolmen train` or `dolmen dryrun`: a recipe or YAML file, and options
    that change it; return the checked request. For `train`, a folder of the run that exists is
    refused before a model is opened. Prints the help and exits with 0 for --help, which opens no
    model and no device. Raises BadInput, ValueError, KeyError or OSError.
    """
    # the only option of one letter beside -h
    argv = ["--log.verbose" if word == "-v" else word for word in argv]
    # the recipe, which must come first
    words = [word for word in argv[:1] if not word.startswith("-")]
    if HELP & {*argv}:
        _print_run_help(verb, words, argv)
    if not words:
        has_init = any(word.partition("=")[0] == "--init" for word in argv)
        example = "pretrain --init MODEL" if has_init else "quickstart"
        raise BadInput(
            f"name a recipe or a YAML file first: dolmen {verb} {example} (dolmen recipes "
            "lists them)"
        )
    cls, (name,) = extra_options(verb), words
    # fields of the model are parsed once its family is known
    overrides = parse(argv[1:], run_options(verb), verb, rest=True)
    extra = {f.name: overrides.pop(f.name) for f in fields(cls) if f.name in overrides}
    if verb == "train":
        run = load_run(name, adapt=False, init=overrides.get("init"))
        unknown = [n for n, v in overrides.items() if isinstance(v, Words) and n[:6] != "model."]
        # a misspelled option comes before a folder that is taken: build_request refuses it
        if not unknown:
            request = TrainRequest.from_config(run, LaunchOptions(out=extra.get("out")), name)
            # the folder of a run at a URL is checked after that URL
            if overrides.get("checkpoint.to", request.config.checkpoint.to) is None:
                _check_out({*extra}, request.out)
        return build_request(name, overrides | extra)
    # a dry run writes no folder and resumes nothing
    if handling := [f.name for f in fields(LaunchOptions) if f.name in overrides]:
        advice = f"dolmen {verb} --help lists them"
        raise BadInput(unknown_options({f"--{name}": advice for name in handling}))
    from dolmen.planning.config import DryrunRequest  # 15 ms to import, which `train` does not need

    dryrun_config: Any = from_dict(cls, extra)
    return DryrunRequest(build_request(load_run_to_inspect(name), overrides).config, dryrun_config)


def _check_out(names: Set[str], out: Path) -> None:
    """Raise ValueError if the run's folder `out` is not empty. Nothing is checked if `names`, the
    options given, have resume or overwrite, or on ranks that a launcher started: then the folder is
    checked with the run.
    """
    if process.read_launch() is None and not {"resume", "overwrite"} & names:
        check_folder(out, resume=False, overwrite=False)


def run_options(verb: str) -> dict[str, Option]:
    """Return name -> option of `train` or `dryrun`, without --model.*, which depend on the family
    of the run's model.
    """
    return options([*groups(extra_options(verb)), *_run_groups()])


def _run_groups(run: RunConfig | None = None) -> list[OptionGroup]:
    """Return the option groups of RunConfig without name and model, with the values of `run`, or of
    the class, as defaults.
    """
    # the options outside of any section come first
    first, *sections = groups(RunConfig, run)
    top = tuple(option for option in first.options if option.name not in ("name", "model"))
    return [OptionGroup(first.title, first.about, top), *sections]


def _print_run_help(verb: str, words: list[str], argv: list[str]) -> None:
    """Print the help of `train` or `dryrun` and exit with 0: the short help for `train` without
    --all, else every option. `words`: [recipe], or [] if none was named. The other options in
    `argv` are checked too; of these --init and --model.model-type change the defaults that are
    shown. Raises BadInput.
    """
    cls, name = extra_options(verb), words[0] if words else DEFAULT_RECIPE
    changes = [word for word in argv[len(words) :] if word not in (*HELP, ALL)]
    overrides = parse(changes, run_options(verb), verb, rest=True)
    init = overrides.get("init")
    run = load_run_to_inspect(name) if verb == "dryrun" else load_run(name, adapt=False, init=init)
    if verb == "train" and ALL not in argv:
        print(short_help(words[0] if words else None, run))
        raise SystemExit(0)
    model = models.start_model(run.model, " ".join(overrides.get(MODEL_TYPE, ())) or None).model
    (first, *sections), (verb_group,) = _run_groups(run), groups(cls)
    recipe = Option("recipe", str, "Recipe or YAML file.", MISSING, (Mark.POSITIONAL,))
    top = OptionGroup("", "", (recipe, *first.options, *verb_group.options))
    about = ABOUT if verb == "train" else cls.__doc__ or ""
    print(full_help(verb, about, [top, *model_groups(model), *sections]))
    raise SystemExit(0)


def run_replay(options: ReplayConfig) -> int:
    """Run `dolmen replay`: repeat a step of a run with exact numerics, print whether its bits are
    those recorded, and return the exit code: 0 if they are, 1 if not. Raises BadInput.
    """
    from dolmen.training import replay

    return replay.replay(options, process.run_worker)


def run_train(request: TrainRequest) -> int:
    """Run `dolmen train`: train the run of the request, in this process or in workers that it
    starts, and return the exit code. Raises BadInput.
    """
    # imports torch, which a mistyped option and --help do not wait for
    from dolmen.training import worker

    return worker.run(request, process.run_worker)
