"""What a run would hold, send and take: `dryrun`, `plan`, `plan_inference`."""

from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from dolmen.api.asked import asked_of, value_errors
from dolmen.core.messages import brief
from dolmen.planning import dryrun as dry
from dolmen.planning import inference as serving_plan
from dolmen.planning import outputs, search
from dolmen.planning.config import DryrunConfig, DryrunRequest, PlanConfig, PlanRequest
from dolmen.planning.dry_report import Report as Dry
from dolmen.planning.plan import Plan
from dolmen.planning.question import Question
from dolmen.recipes.changed import plain, request
from dolmen.recipes.named import described, planned
from dolmen.training.config import RunConfig

OF_COMMAND = ("explain", "json", "report", "measure", "inference", "batch", "length")
"""Options of `dolmen plan` that are not those of `plan`."""


def dryrun(
    recipe: str | PathLike | RunConfig,
    *,
    ranks: str | Sequence[int] = "first,middle,last",
    device: str = "h100",
    exact: bool = False,
    max_load: float = 1.0,
    progress: bool = True,
    **changes: Any,
) -> Dry:
    """`dolmen dryrun RECIPE`: a step of a recipe, the run of a YAML file, a folder with a
    config.json or a RunConfig with `changes` as in `train`, run as some `ranks` of its layout on
    tensors without values, with the kernels of `device`. `report.ledgers` has every operation of
    each rank, `report.as_dict()` what --json writes, `report.table()` both in words. Raises
    ValueError on bad input, and for a step that would crash.

        report = dolmen.dryrun("gpt3-175b", layout={"tp": 8, "pp": 16, "dp": 8}, ranks=[0, 1023])
        report.ledgers[0].peak
    """
    with value_errors():
        named = ranks if isinstance(ranks, str) else ",".join(str(plain(one)) for one in ranks)
        how = {"device": device, "exact": exact, "max_load": max_load}
        asked = asked_of(DryrunConfig, ranks=named, **how)
        name = plain(recipe)
        run = described(name) if isinstance(name, str) else recipe
        return dry.report(DryrunRequest(request(run, changes).config, asked), progress)


def plan(
    model: str | PathLike | RunConfig,
    cluster: str | PathLike,
    *,
    progress: bool = True,
    **options: Any,
) -> Plan:
    """`dolmen plan MODEL --cluster CLUSTER`: the fastest layouts of a model (a recipe, a YAML file,
    a folder with a config.json, or a RunConfig) on a cluster (NAME, NAME:NODES or a YAML file).
    `options` are those of the command: `layout` gives parts of the layout, `train` the batch, the
    length, the microbatch and the dtype, in mappings.
    The answer is a frozen value: `ranked` has the layouts, each with `estimate` (seconds, low,
    high, parts), `memory` of each stage, `mfu`, `bound` and `changes`; `dry` what a dry run of the
    first of them counted beside the closed forms, unless `dryrun` is False. Raises ValueError on
    bad input, and where nothing fits.

        found = dolmen.plan("gpt-1t", "dgx-a100:384", layout={"tp": 8})
        found.ranked[0].layout, found.ranked[0].estimate.seconds
    """
    with value_errors():
        asked = replace(asked_of(PlanConfig, OF_COMMAND, cluster=cluster, **options), explain=True)
        outputs.check(asked)
        question = Question.from_request(_planned(model, asked))
        found = search.make_plan(question, asked, progress)
        if asked.as_recipe is not None:
            outputs.write_recipe(question, found, Path(asked.as_recipe))
        return found


def plan_inference(
    model: str | PathLike | RunConfig,
    cluster: str | PathLike,
    *,
    batch: int = 1,
    length: int | None = None,
    tp: int | None = None,
    dtype: str | None = None,
) -> serving_plan.Inference:
    """`dolmen plan MODEL --cluster CLUSTER --inference`: what weights and cache take, and how fast
    `batch` texts of `length` tokens go on, for each tp within a node. Raises ValueError on bad
    input.

        dolmen.plan_inference("llama-70b", "hgx-h100:1", batch=32, length=8192).rows[-1].seconds
    """
    with value_errors({"layout.tp": "tp"}):
        asked = asked_of(
            PlanConfig,
            cluster=cluster,
            inference=True,
            batch=batch,
            length=length,
            layout={} if tp is None else {"tp": tp},
            train={} if dtype is None else {"dtype": dtype},
        )
        question = Question.from_request(_planned(model, asked))
        return serving_plan.inference(question, asked.batch, asked.length)


def _planned(model: str | PathLike | RunConfig, asked: PlanConfig) -> PlanRequest:
    if isinstance(model, RunConfig):
        return PlanRequest(model.name, model, asked)
    name = plain(model)
    if not isinstance(name, str):
        raise ValueError(
            f"the model is {brief(model)}: it must be a recipe, a YAML file, a folder with a "
            "config.json or a RunConfig"
        )
    return PlanRequest(name, planned(name), asked)
