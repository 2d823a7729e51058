"""The configuration class of each verb, whose fields are its options. One is imported when its verb
is asked for: each takes some milliseconds.

Nothing here imports torch or transformers: `--help` and a mistyped option do not owe their seconds.
"""

from importlib import import_module
from typing import Annotated, Any

from dolmen.core.config import Mark, Name, config


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


@config()
class ScheduleOptions:
    """Time a pipeline schedule, and draw it; or search the shortest for measured times and a
    memory. Times are of one microbatch through all layers of a rank, in any unit.
    """

    schedule: Annotated[str, Mark.POSITIONAL]
    """gpipe, 1f1b, interleaved, zero-bubble, zero-bubble-v, a .txt or .yaml file with one line of
    actions (F0 F1 B0 B1) per rank, or search, which finds such lists.
    """
    pp: int | None = None
    """Pipeline ranks. Default: 4; those of the file."""
    microbatches: int | None = None
    """Microbatches per step. Default: 8; those of the file."""
    virtual_stages: int | None = None
    """Chunks of layers per rank. Default: 1, or 2 where the schedule needs several; those of
    the file; of search both, and the shortest is told.
    """
    out: Name | None = None
    """File to write: the picture, .svg or .png, or the actions, .txt or .yaml, as
    --layout.schedule takes them.
    """
    list: bool = False
    """Print the actions of each rank, as a file would hold them."""
    forward: float = 1
    """Time of a forward (F)."""
    backward: float = 2
    """Time of a whole backward (B)."""
    input: float = 1
    """Time of the part of a backward that earlier stages wait for (I)."""
    weight: float = 1
    """Time of the rest of it (W)."""
    send: float = 0
    """Time from the end of an action until another rank has its result."""
    costs: str | None = None
    """JSON file with these times instead (forward, backward, input, weight, send), each one number
    or a list of every rank, or of every stage.
    """
    memory: float | None = None
    """Of search: the most microbatches that a rank may hold activations of, in units of the
    activations of all its layers, as the column `live microbatches` counts. Default: --pp, what
    1f1b, zero-bubble and zero-bubble-v hold.
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
    "schedule": "dolmen.cli.options.ScheduleOptions",
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
