"""Training a run, in processes of its own or in one of an engine's, the page of several runs, and
predictions of a run: `train`, `worker`, `show`, `dryrun`, `plan`, `plan_inference`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path, PosixPath
from typing import Any

import torch.distributed as dist

from dolmen.api.options import build_config, rewrite_options, value_errors
from dolmen.core.environment import Launch
from dolmen.core.messages import BadInput, Failed, brief
from dolmen.launch import process
from dolmen.planning import dryrun as dry
from dolmen.planning import inference as serving_plan
from dolmen.planning import report, search
from dolmen.planning.config import DryrunConfig, DryrunRequest, PlanConfig, PlanRequest
from dolmen.planning.dry_report import DryRunReport as Dry
from dolmen.planning.plan import Plan
from dolmen.planning.question import Question
from dolmen.recipes.overrides import build_request, load_run_to_inspect, load_run_to_plan, plain
from dolmen.training import worker as processes
from dolmen.training.config import RunConfig
from dolmen.training.metrics import MetricsCallback, read_metrics
from dolmen.training.run import Outcome
from dolmen.watching import page
from dolmen.watching.page import ShowConfig


class RunFolder(PosixPath):
    """The folder of a run, a Path, with the numbers that the run has recorded so far."""

    @property
    def history(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl: `step`, `loss`, `grad_norm`, `lr` and so on of each logged
        step, `val_loss` of each validation. A number that is not finite is None.
        """
        return read_metrics(self / "metrics.jsonl")

    @property
    def losses(self) -> list[float]:
        """The training loss of each logged step (`log.every`), those before a resume included; NaN
        where it was not finite.
        """
        losses = [row["loss"] for row in self.history if "loss" in row]
        # JSON has no NaN: it is stored as null
        return [math.nan if loss is None else loss for loss in losses]


def train(recipe: str | PathLike | RunConfig, **changes: Any) -> RunFolder:
    """Train a recipe, the run of a YAML file or a RunConfig, with `changes`: options of `dolmen
    train` as keywords, those of a section in a mapping. Returns the run's folder, a Path with
    `losses`, the training loss of each logged step, and `history`, all rows of metrics.jsonl.

        run = dolmen.train("quickstart", train={"steps": 50}, layout={"dp": 1}, overwrite=True)
        print(run.losses[0], run.losses[-1])

    Starts as many processes as the layout needs; a run of one process is this process. Raises
    ValueError on bad input, KeyboardInterrupt after Ctrl-C and SystemExit after SIGTERM (saved
    first), RuntimeError if another process fails, and what is raised in this one.
    """
    with value_errors():
        # checks all options, so errors name the keyword
        request = build_request(recipe, changes)
    try:
        code = processes.run(request)
    except BadInput as error:
        raise ValueError(rewrite_options(str(error), {})) from None
    # 128 + SIGINT
    if code == 130:
        raise KeyboardInterrupt
    # 128 + SIGTERM
    if code == 143:
        raise SystemExit(code)
    if code:
        raise RuntimeError(f"the run ended with exit code {code}")
    return RunFolder(request.out)


def worker(
    run: str | PathLike | RunConfig,
    *,
    on_metrics: MetricsCallback | None = None,
    handle_signals: bool = False,
    **changes: Any,
) -> Outcome:
    """Train in this process, one of several that torchrun, SLURM, Ray or another engine has
    started: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set (SLURM's own variables do too),
    or a process group is initialised. Every process calls it with the same `run` and `changes`, as
    in `train`. It starts no process and prints on rank 0.

        outcome = dolmen.worker("pretrain", init="model/", data={"path": "text/"}, out="runs/a",
                                resume=True, on_metrics=lambda row: print(row["step"], row))
        print(outcome.steps, outcome.val_loss)

    on_metrics:     called on every rank with each row of metrics.jsonl, a mapping
    handle_signals: on SIGINT and SIGTERM save after the step and return; else handlers stay as they
                    are

    Returns the content of summary.json, with `signal` 0 unless a signal ended the run. Raises
    ValueError on bad input, the same on every rank; Failed, a RuntimeError, for what ends a run
    without being a bug (a full disk, a loss that is not finite), whose `final` is true where a
    restart would fail again; and what is raised in this process. With train.hang_seconds a process
    that hangs is ended, as it can raise nothing.
    """
    with value_errors():
        request = build_request(run, changes)
        if request.handling.nproc is not None or request.handling.max_restarts:
            raise BadInput("--nproc and --max-restarts are for `train`, which starts processes")
        started = read_process()
    try:
        outcome = processes.join(request, started, on_metrics, handle_signals)
        if not outcome.signal and processes.finish_run(request, started, outcome):
            raise Failed("the exported model differs from that in transformers", final=True)
    except BadInput as error:
        raise ValueError(rewrite_options(str(error), {})) from None
    return outcome


def read_process() -> Launch:
    """Return this process's rank, world size, local rank and local world size, from the environment
    variables of its launcher; else rank and world size of torch's initialised process group, with
    local rank 0 of 1. Raises BadInput without either.
    """
    started = process.read_launch()
    if started is not None:
        return started
    if not dist.is_initialized():
        raise BadInput(
            "neither RANK and WORLD_SIZE are set nor is a process group initialised: start this "
            "program with torchrun or srun, or use dolmen.train, which starts processes"
        )
    return Launch(dist.get_rank(), dist.get_world_size(), local_rank=0, local_world_size=1)


def show(*runs: str | PathLike, out: str | PathLike = "show.html") -> Path:
    """Write one HTML page of these runs (folders or URLs), with their losses, speed, samples and
    options, to the new file `out`, as `dolmen show RUN ...` does, and return its path. Raises
    ValueError for a folder that is not a run, and if the file exists.

        dolmen.show("runs/one", "runs/two", out="both.html")
    """
    with value_errors({"out": "out"}):
        config = build_config(ShowConfig, runs=[str(run) for run in runs], out=out)
        return page.write_page([page.run_folder(name) for name in config.runs], Path(config.out))


COMMAND_ONLY = ("explain", "json", "report", "measure", "inference", "batch", "length")
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
    """Run a training step as each of some `ranks` of a layout would, on tensors without values and
    without GPUs or other processes, with the kernels of `device`, as `dolmen dryrun RECIPE` does,
    and report memory, FLOPs and messages. The run is a recipe, a YAML file, a folder with a
    config.json or a RunConfig, with `changes` as in `train`. `report.ledgers` has every operation
    of each rank, `report.as_dict()` what --json writes, `report.table()` a table. Raises ValueError
    on bad input, and for a step that would fail.

        report = dolmen.dryrun("gpt3-175b", layout={"tp": 8, "pp": 16, "dp": 8}, ranks=[0, 1023])
        report.ledgers[0].peak
    """
    with value_errors():
        # as --ranks has it
        rank_list = (
            ranks if isinstance(ranks, str) else ",".join(str(plain(rank)) for rank in ranks)
        )
        options = {"device": device, "exact": exact, "max_load": max_load}
        config = build_config(DryrunConfig, ranks=rank_list, **options)
        name = plain(recipe)
        # a RunConfig is taken as it is
        run = load_run_to_inspect(name) if isinstance(name, str) else recipe
        return dry.report(DryrunRequest(build_request(run, changes).config, config), progress)


def plan(
    model: str | PathLike | RunConfig,
    cluster: str | PathLike,
    *,
    progress: bool = True,
    **options: Any,
) -> Plan:
    """Predict step time and memory of the possible layouts of a model (a recipe, a YAML file, a
    folder with a config.json, or a RunConfig) on a cluster (NAME, NAME:NODES or a YAML file), and
    return the fastest, as `dolmen plan MODEL --cluster CLUSTER` does; nothing is run on GPUs.
    `options` are those of the command: `layout` gives parts of the layout, `train` the batch, the
    length, the microbatch and the dtype, in mappings.

    Returns a frozen value: `ranked` has the layouts, each with `estimate` (seconds, low,
    high, parts), `memory` of each stage, `mfu`, `bound` and `changes`; `dry` compares a dry
    run of the first one with the closed forms, unless `dryrun` is False. With `as_recipe` the
    first one is also written to that YAML file, as a run. Raises ValueError on bad input, and where
    nothing fits.

        plan = dolmen.plan("gpt-1t", "dgx-a100:384", layout={"tp": 8})
        plan.ranked[0].layout, plan.ranked[0].estimate.seconds
    """
    with value_errors():
        config = replace(
            build_config(PlanConfig, COMMAND_ONLY, cluster=cluster, **options), explain=True
        )
        # before the search
        report.check(config)
        question = Question.from_request(_plan_request(model, config))
        plan = search.make_plan(question, config, progress)
        if config.as_recipe is not None:
            # the command that it returns is for people
            report.write_recipe(question, plan, Path(config.as_recipe))
        return plan


def plan_inference(
    model: str | PathLike | RunConfig,
    cluster: str | PathLike,
    *,
    batch: int = 1,
    length: int | None = None,
    tp: int | None = None,
    dtype: str | None = None,
) -> serving_plan.Inference:
    """Predict the memory of weights and KV cache, and the time per generated token, of `batch`
    sequences of `length` tokens of a model on a cluster, for `tp` or else for each tp within a
    node, as `dolmen plan MODEL --cluster CLUSTER --inference` does. Raises ValueError on bad input.

        dolmen.plan_inference("llama-70b", "hgx-h100:1", batch=32, length=8192).rows[-1].seconds
    """
    with value_errors({"layout.tp": "tp"}):
        config = build_config(
            PlanConfig,
            cluster=cluster,
            inference=True,
            batch=batch,
            length=length,
            # None: every tp within a node
            layout={} if tp is None else {"tp": tp},
            train={} if dtype is None else {"dtype": dtype},
        )
        question = Question.from_request(_plan_request(model, config))
        return serving_plan.inference(question, config.batch, config.length)


def _plan_request(model: str | PathLike | RunConfig, config: PlanConfig) -> PlanRequest:
    """Return the planner's request: the name of the run, its configuration, and the plan's options
    `config`. `model`: a RunConfig, or a recipe, YAML file or model folder, which is loaded. Raises
    ValueError for anything else.
    """
    if isinstance(model, RunConfig):
        return PlanRequest(model.name, model, config)
    name = plain(model)
    if not isinstance(name, str):
        raise ValueError(
            f"the model is {brief(model)}: it must be a recipe, a YAML file, a folder with a "
            "config.json or a RunConfig"
        )
    return PlanRequest(name, load_run_to_plan(name), config)
