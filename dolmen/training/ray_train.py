"""A run as a job of Ray Train: `dolmen train ... --launch ray`.

    this process    TorchTrainer.fit: places the workers, restarts all of them after a failure
    worker          the process group is Ray's; trains as under any launcher, and reports each row
                    of metrics, and each checkpoint, to Ray

What Ray stores as a checkpoint is a file that names the run's folder and the step: the checkpoint
itself is in the run's folder, which all nodes share, and is not copied. A restart is known by the
job's id, which the folder remembers (launch/process.py).
"""

import json
import secrets
import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dolmen.checkpoint import folders
from dolmen.core.config import from_dict, to_dict
from dolmen.core.messages import BadInput, Failed
from dolmen.launch import process
from dolmen.training.metrics import MetricsCallback
from dolmen.training.request import TrainRequest

Work = Callable[[TrainRequest, MetricsCallback], None]
"""Trains in one process of Ray's; reports rows of metrics."""
POINTER = "dolmen.json"
EVERY = 20
"""Steps between reports: Ray 2.60 takes one from each worker per two seconds, and lets it wait."""


def run(request: TrainRequest, processes: int | None, work: Work) -> int:
    """Train by Ray Train on the cluster of RAY_ADDRESS, else on this machine, with `processes`
    workers (None: its GPUs rounded down to a multiple of tp x cp x pp, at least one such multiple).
    Returns exit code 0. Raises BadInput without Ray, Failed after more failures than
    --max-restarts.
    """
    if find_spec("ray") is None:
        raise BadInput("--launch ray needs Ray: pip install 'dolmen[ray]'")
    ray, train = import_module("ray"), import_module("ray.train")
    trainers = import_module("ray.train.torch")
    if not ray.is_initialized():
        ray.init()
    gpus = int(ray.cluster_resources().get("GPU", 0))
    inner = request.config.layout.inner
    use_gpu = request.config.train.device != "cpu" and gpus > 0
    out = request.out.absolute()
    job = f"{out.name}.ray-{secrets.token_hex(4)}"
    settings = {"request": to_dict(request), "job": job, "out": str(out), "work": work}
    trainer = trainers.TorchTrainer(
        _train,
        train_loop_config=settings,
        scaling_config=train.ScalingConfig(
            num_workers=processes or max(1, gpus // inner) * inner, use_gpu=use_gpu
        ),
        run_config=train.RunConfig(
            name=job,
            storage_path=str(out.parent),
            failure_config=train.FailureConfig(max_failures=request.handling.max_restarts),
        ),
    )
    try:
        trainer.fit()
    except train.TrainingFailedError as error:
        raise Failed(f"the job of Ray Train failed: {error}") from None
    return 0


def _train(settings: Mapping[str, Any]) -> None:
    """Train in this process, a worker of Ray Train: call settings["work"] with the request, and
    report each row of metrics and the newest checkpoint to Ray. `settings`: as `run` made them.
    """
    train = import_module("ray.train")
    reporter = _Reporter(Path(settings["out"]), train.get_context().get_world_rank() == 0)
    with process.environment({process.RECOVERED_JOBS["Ray Train"]: settings["job"]}):
        settings["work"](from_dict(TrainRequest, settings["request"]), reporter.report)
    reporter.send({})  # the last checkpoint, which is complete now


class _Reporter:
    """Reports to Ray; every worker reports as often, and the first adds checkpoints."""

    def __init__(self, out: Path, first: bool):
        """Prepare reports on the run in the folder `out`. `first`: this worker has rank 0, and also
        reports checkpoints.
        """
        self.out, self.first, self.step = out, first, -1

    def report(self, row: Mapping[str, float]) -> None:
        """Report a row of metrics to Ray if it is of a validation or its step is a multiple of 20;
        ignore other rows.
        """
        if row["step"] % EVERY == 0 or "val_loss" in row:
            self.send(row)

    def send(self, row: Mapping[str, float]) -> None:
        """Report a row of metrics to Ray; on the first worker with a file that names the run's
        newest checkpoint, if that is newer than at the last report.
        """
        train = import_module("ray.train")
        newest = max(folders.list_checkpoints(self.out / "checkpoints"), default=-1)
        if not self.first or newest <= self.step:
            train.report(dict(row))
            return
        self.step = newest
        with tempfile.TemporaryDirectory() as folder:
            pointer = {"run": str(self.out), "step": newest}
            Path(folder, POINTER).write_text(json.dumps(pointer))
            checkpoint = train.Checkpoint.from_directory(folder)
            train.report(dict(row), checkpoint=checkpoint)
