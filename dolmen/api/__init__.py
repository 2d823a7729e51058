"""Dolmen from Python: what the commands do, as functions of the same names, with the same checks
and messages; and `parallelize`, `step`, `save` and `restore` of modules, which have no command.

    models.py, generation.py  a model in this process
    runs.py                   train, show
    plans.py                  plan, dryrun
    conversions.py            export, convert
    comparisons.py            verify, diff
    evaluations.py            evaluate
    vocabularies.py           tokenize, vocabularies
    modules.py                modules of torch
    asked.py                  keywords to the options of a command
"""

from dolmen.api.comparisons import diff, verify
from dolmen.api.conversions import convert, export
from dolmen.api.evaluations import evaluate, evaluate_tasks
from dolmen.api.models import Model, generate, load
from dolmen.api.modules import parallelize, restore, save, step
from dolmen.api.plans import dryrun, plan, plan_inference
from dolmen.api.runs import RunFolder, show, train
from dolmen.api.vocabularies import (
    extend_vocabulary,
    merge_vocabularies,
    tokenize,
    train_vocabulary,
)

__all__ = [
    "Model",
    "RunFolder",
    "convert",
    "diff",
    "dryrun",
    "evaluate",
    "evaluate_tasks",
    "export",
    "extend_vocabulary",
    "generate",
    "load",
    "merge_vocabularies",
    "parallelize",
    "plan",
    "plan_inference",
    "restore",
    "save",
    "show",
    "step",
    "tokenize",
    "train",
    "train_vocabulary",
    "verify",
]
