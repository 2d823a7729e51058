"""The configuration of each verb, from the words after `dolmen VERB`. The fields of its class are
its options.

Nothing here imports torch or transformers: `--help` and a mistyped option do not wait 2 s for them.
A class is imported only for its verb, as each takes some milliseconds.
"""

from importlib import import_module
from pathlib import Path
from textwrap import wrap
from typing import Any

from dolmen.cli.parse import HELP, WIDTH, full_help, groups, help_width, options, parse
from dolmen.core.config import config, from_dict, unflatten
from dolmen.core.messages import BadInput, as_bad_input, message


@config()
class FamiliesOptions:
    """List the families of models that can be read, trained and written, how close each is to its
    reference, and on which layouts it runs.
    """


@config()
class RecipesOptions:
    """List the built-in runs for `dolmen train RECIPE`; `dolmen train RECIPE --help` shows the
    defaults of one.
    """


RUNS = ("train", "dryrun")
"""Verbs whose options are those of a run and some of their own."""
HANDED = {
    "train": "dolmen.training.request.TrainRequest",
    "diff": "dolmen.comparison.config.DiffWork",
}
"""Classes that the launcher hands its workers, where it is not the verb's own."""
CONFIGS = {
    "replay": "dolmen.training.request.ReplayConfig",
    "recipes": "dolmen.cli.command.RecipesOptions",
    "tokenize": "dolmen.data.config.TokenizeConfig",
    "families": "dolmen.cli.command.FamiliesOptions",
    "export": "dolmen.conversion.config.ExportConfig",
    "convert": "dolmen.conversion.config.ConvertConfig",
    "verify": "dolmen.evaluation.config.VerifyConfig",
    "diff": "dolmen.comparison.config.DiffConfig",
    "generate": "dolmen.serving.config.GenerateConfig",
    "chat": "dolmen.serving.config.ChatConfig",
    "serve": "dolmen.serving.config.ServeConfig",
    "evaluate": "dolmen.evaluation.config.EvaluateConfig",
    "schedule": "dolmen.planning.config.ScheduleOptions",
    "plan": "dolmen.planning.config.PlanConfig",
    "show": "dolmen.watching.page.ShowConfig",
}
PARTS = {
    "vocab": (
        "Adapt a model to another language: train a tokenizer, merge it into the model's, and add "
        "its tokens to the model.",
        {
            "train": "dolmen.vocabulary.config.VocabTrainConfig",
            "merge": "dolmen.vocabulary.config.VocabMergeConfig",
            "extend": "dolmen.vocabulary.config.VocabExtendConfig",
        },
    ),
    "launch": (
        "Write the job file of a run for a scheduler, and submit it.",
        {
            "slurm": "dolmen.launch.config.SlurmConfig",
            "kubeflow": "dolmen.launch.config.KubeflowConfig",
            "skypilot": "dolmen.launch.config.SkypilotConfig",
        },
    ),
}
"""Verb of several parts -> its help text, and each part with its class."""
MODULES = {
    "conversion": ("convert", "export", "tokenize", "vocab"),
    "evaluation": ("evaluate", "diff", "verify"),
    "generation": ("generate", "chat", "serve"),
    "jobs": ("launch",),
    "listings": ("recipes", "families", "show"),
    "planning": ("plan", "dryrun", "schedule"),
    "runs": ("train", "replay"),
}
"""Module of this package -> the verbs whose functions `run_VERB` it has."""


def run(verb: str, config: Any) -> int:
    """Run a verb of the command line: import its module, call its function run_VERB with the
    configuration `config`, and return the exit code.
    """
    (module,) = (module for module, verbs in MODULES.items() if verb in verbs)
    return getattr(import_module(f"dolmen.cli.{module}"), f"run_{verb}")(config)


def find(path: str) -> type[Any]:
    """Return the class at a dotted path (module.Class), importing its module."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def read(verb: str, argv: list[str]) -> Any:
    """Return the configuration, an instance of the verb's config class, for the command line
    `dolmen VERB ARGV...`. Prints the help and exits with 0 for --help. Raises BadInput for anything
    that is wrong with the options.
    """
    try:
        if verb in RUNS:
            # recipes and families take 0.1 s to import, and parsing other verbs needs neither
            from dolmen.cli.runs import parse_run

            return parse_run(verb, argv)
        if verb in PARTS:
            return parse_part(verb, argv)
        # only this verb's class is imported
        return parse_config(find(CONFIGS[verb]), verb, argv)
    except BrokenPipeError:  # the reader of the help has closed the pipe
        raise
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(message(error)) from None


def parse_config(cls: type[Any], verb: str, argv: list[str]) -> Any:
    """Return an instance of the config class `cls` of the verb, with fields set by the options in
    `argv`. Prints the help and exits with 0 for --help. Raises BadInput or ValueError.
    """
    # parses the source of the class, 2 ms per module
    option_groups = groups(cls)
    if HELP & set(argv):
        print(full_help(verb, cls.__doc__ or "", option_groups))
        raise SystemExit(0)
    config: Any = from_dict(cls, unflatten(parse(argv, options(option_groups), verb)))
    if verb == "generate":
        # none of these rules is the range of one option
        config.check_source()
    return config


def full_verb(argv: list[str]) -> str:
    """Return the verb of a command line, with its second word if the verb has parts: "train",
    "vocab extend".
    """
    _, parts = PARTS.get(argv[0], ("", {}))
    return " ".join(argv[:2] if argv[1:] and argv[1] in parts else argv[:1])


def parse_part(verb: str, argv: list[str]) -> Any:
    """Return the configuration for a verb that has parts, such as `vocab train`; the first word of
    `argv` is the part. Prints the help of the verb or its part and exits with 0 for --help. Raises
    BadInput, also for an unknown or missing part, or ValueError.
    """
    about, parts = PARTS[verb]
    part = argv[0] if argv else ""
    if part in parts:
        return parse_config(find(parts[part]), f"{verb} {part}", argv[1:])
    if part in HELP:
        lines = "\n".join(wrap(about, help_width(WIDTH)))
        print(f"usage: dolmen {verb} {{{','.join(parts)}}} ...\n\n{lines}\n")
        print("\n".join(f"  dolmen {verb} {part} --help explains it" for part in parts))
        raise SystemExit(0)
    problem = f"{part!r} is not a part of it" if part else "name a part"
    raise BadInput(f"{problem}: dolmen {verb} has {', '.join(parts)}")


def read_handed(verb: str, file: Path) -> Any:
    """Return the configuration of the verb that dolmen's launcher wrote to `file`, as YAML, for its
    workers. Raises BadInput.
    """
    from dolmen.files import gate, kinds  # YAML, which no help needs

    cls = find(HANDED.get(verb) or CONFIGS[verb])
    with as_bad_input(ValueError):
        return from_dict(cls, gate.read_yaml(file, kinds.RUN))
