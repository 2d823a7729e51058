"""A side that dolmen computes: the model of a source, under any layout, through one step of
training/step.py as a run makes it. Hooks see what passes; the text of the model knows nothing of
them.

Every rank calls `record` and gets what it has seen itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from dolmen.comparison.hooks import Hooks
from dolmen.comparison.recording import MOMENTS, Recorder, Stage, Tensors
from dolmen.conversion.source import Source, load_weights
from dolmen.core import state
from dolmen.core.mesh import SINGLE, Mesh
from dolmen.data.batch import Batch
from dolmen.evaluation.validate import batch_of, objective_of
from dolmen.model import build, spec
from dolmen.model.decoder import Decoder
from dolmen.model.head import LMHead
from dolmen.model.layout import Layout
from dolmen.model.training import RouterTraining, Training
from dolmen.objectives.objective import LossOutput, Objective
from dolmen.optim import optimizer
from dolmen.optim.config import OptimizerConfig
from dolmen.training.state import TrainState
from dolmen.training.step import optimizer_step

NO_BALANCE = Training(router=RouterTraining(aux_loss_coef=0.0))
"""Losses of routers are no part of what a model computes."""
DEPTHS = ("weights", "forward", "backward", "update")


@dataclass(frozen=True, eq=False)
class DiffTask:
    """The work that both sides do."""

    windows: Int64[np.ndarray, "sequences window"]
    """Tokens, and one more of each sequence, which is the label of the last."""
    optimizer: OptimizerConfig
    until: str
    """The last of DEPTHS that is compared."""

    def reaches(self, depth: str) -> bool:
        return DEPTHS.index(depth) <= DEPTHS.index(self.until)


def record(
    source: Source,
    task: DiffTask,
    mesh: Mesh = SINGLE,
    layout: Layout = Layout(),
    rest: torch.dtype = torch.float32,
    compute: torch.dtype | None = None,
) -> Tensors:
    """Record what this rank computes with the model of `source`, with parameters in `rest` and
    computation in `compute`. `layout` is resolved and has been checked. Raises as `load_weights`.
    """
    rows = len(task.windows)
    schedule = layout.make_schedule(rows, 1)
    model = build.build(
        source.tree, mesh, layout, schedule, training=NO_BALANCE, dtype=rest, compute=compute
    )
    build.load(model, lambda write: load_weights(source, write, only=model.held()))
    recorder = Recorder(mesh.rank)
    weights = {name: state.local_view(p) for name, p in model.named_parameters()}
    _add(recorder, "weights", model, weights)
    if task.reaches("forward"):
        _step(model, task, mesh, layout, recorder)
    return recorder.tensors


def _step(model: Decoder, task: DiffTask, mesh: Mesh, layout: Layout, recorder: Recorder) -> None:
    """One update, and what is seen of it."""
    rows, length = task.windows.shape[0], task.windows.shape[1] - 1
    mine = rows // mesh.dp.size
    schedule = layout.make_schedule(rows, 1)
    # of each stage of this rank, the microbatches whose forward is yet to come
    left = [
        [a.micro for a in schedule.actions[mesh.pp.rank] if a.kind == "F" and a.chunk == chunk]
        for chunk in range(schedule.chunks)
    ]
    index = model.split.cp.indices(length, torch.device("cpu"))
    hooks = Hooks(
        model,
        mesh,
        rows * length,
        lambda part: (mesh.dp.rank * mine + left[part].pop(0)) * length + index,
        recorder,
        task.reaches("backward"),
    )
    adamw = optimizer.adamw(model, task.optimizer)
    optimizer.prime(adamw)  # a step that is not finite updates nothing
    before = {n: state.local_view(p).clone() for n, p in model.named_parameters()}
    gradients: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        held = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        gradients.update({name: state.local_view(g).clone() for name, g in held.items()})

    adamw.register_step_pre_hook(keep)
    batch = batch_of(model.tree, task.windows[mesh.dp.rank * mine : (mesh.dp.rank + 1) * mine])
    objective = _RecordingObjective(hooks.logits, objective_of(model.tree, batch))
    training = TrainState(
        model, adamw, task.optimizer, 1, layout.zero, schedule, objective=objective
    )
    if model.tree.streams > 1 and model.tree.embedding.types is None:
        batch = batch.with_positions(model.tree.streams)
    with hooks:
        metrics = optimizer_step(training, batch, mesh)
    recorder.add_number("loss", metrics.loss)
    if task.reaches("backward"):
        recorder.add_number("gradient norm", metrics.grad_norm)
        clip = task.optimizer.clip  # the gradients that an update sees are clipped
        factor = min(1.0, clip / (metrics.grad_norm + 1e-6)) if clip > 0 else 1.0
        _add(recorder, "gradients", model, {n: g / factor for n, g in gradients.items()})
    if task.reaches("update"):
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        for kind in MOMENTS:
            moments = {n: state.local_view(adamw.state[p][kind]) for n, p in trained.items()}
            _add(recorder, kind, model, moments)
        moved = {n: state.local_view(p) - before[n] for n, p in trained.items()}
        _add(recorder, "update", model, moved)


def _add(recorder: Recorder, stage: Stage, model: Decoder, values: dict[str, Tensor]) -> None:
    """Record this rank's part of tensors that are sharded as the parameters of these names."""
    for name, p in model.named_parameters():
        if name in values:
            recorder.add(stage, name, tuple(p.shape), state.region(p), values[name])


@dataclass(frozen=True, eq=False)
class _RecordingObjective:
    """An objective, which never has logits whole: they are computed once more to be seen."""

    head: ClassVar[type] = spec.LMHeadSpec
    see: Callable[[Tensor], None]
    objective: Objective

    @property
    def names(self) -> tuple[str, ...]:
        return ()

    def count(self, batch: Batch) -> float:
        return self.objective.count(batch)

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: LMHead, batch: Batch) -> LossOutput:
        with torch.no_grad():
            self.see(head.logits(hidden.detach()))
        return LossOutput(self.objective(hidden, head, batch).total)
