"""Dolmen from Python: what the commands do, as functions of the same names, with the same checks
and messages; and `parallelize`, `step`, `save` and `restore` of modules, which have no command.

    models.py       a model in this process: load, generate
    runs.py         train, worker, show, plan, dryrun
    conversions.py  export, convert, tokenize, vocabularies
    evaluations.py  evaluate, verify, diff
    options.py      keywords to the options of a command
"""

from dolmen.api.conversions import (
    convert,
    export,
    extend_vocabulary,
    merge_vocabularies,
    tokenize,
    train_vocabulary,
)
from dolmen.api.evaluations import diff, evaluate, evaluate_tasks, verify
from dolmen.api.models import Model, generate, load
from dolmen.api.runs import RunFolder, dryrun, plan, plan_inference, show, train, worker
from dolmen.core.messages import Failed
from dolmen.parallel.styles import parallelize
from dolmen.training.modules import restore, save, step
