"""The configuration class of each verb, whose fields are its options. One is imported when its verb
is asked for: each takes some milliseconds.

Nothing here imports torch or transformers: `--help` and a mistyped option do not owe their seconds.
"""

from importlib import import_module
from typing import Any

from dolmen.core.config import config


@config()
class FamiliesOptions:
    """The families of models that are read, trained and written, how close each is to its
    reference, and on which layouts.
    """


@config()
class RecipesOptions:
    """The built-in runs, for `dolmen train RECIPE`; `dolmen train RECIPE --help` shows its
    defaults.
    """


RUNS = ("train", "dryrun")
"""Verbs whose options are those of a run and some of their own."""
HANDED = {
    "train": "dolmen.training.request.Request",
    "diff": "dolmen.comparison.config.DiffWork",
}
"""What the launcher hands its workers, where it is not the verb's class."""
VERBS = {
    "recipes": "dolmen.cli.options.RecipesOptions",
    "tokenize": "dolmen.data.config.TokenizeConfig",
    "families": "dolmen.cli.options.FamiliesOptions",
    "export": "dolmen.conversion.config.ExportConfig",
    "convert": "dolmen.conversion.config.ConvertConfig",
    "verify": "dolmen.evaluation.config.VerifyConfig",
    "diff": "dolmen.comparison.config.DiffConfig",
    "generate": "dolmen.serving.config.GenerateConfig",
    "chat": "dolmen.serving.config.ChatConfig",
    "serve": "dolmen.serving.http.config.ServeConfig",
    "evaluate": "dolmen.evaluation.config.EvaluateConfig",
    "schedule": "dolmen.planning.config.ScheduleOptions",
    "plan": "dolmen.planning.config.PlanConfig",
    "show": "dolmen.watching.config.ShowConfig",
}
PARTS = {
    "vocab": (
        "A vocabulary for another language: train one, merge it into a tokenizer, give a model its "
        "tokens.",
        {
            "train": "dolmen.vocabulary.config.VocabTrainConfig",
            "merge": "dolmen.vocabulary.config.VocabMergeConfig",
            "extend": "dolmen.vocabulary.config.VocabExtendConfig",
        },
    )
}
"""A verb of several parts -> what its help says, and each part with its class."""


def find(path: str) -> type[Any]:
    """The class at a path of modules."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)
