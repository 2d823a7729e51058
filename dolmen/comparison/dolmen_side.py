"""The side of a comparison that dolmen computes: the model of a source, under any layout, through
one step of training/step.py exactly as a run makes it, recorded by hooks. The model's code is
unchanged.

Every rank calls `record` and gets what it has recorded itself. A hook knows which rows and columns
of the logical tensor it sees: rows follow from the microbatch, and from cp and sequence
parallelism; columns of heads and of the feed-forward width from tp. Calls outside of the decoder's
forward (a layer that backward recomputes) are not recorded twice.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from dolmen.comparison.recording import MOMENTS, Recorder, Stage, Tensors
from dolmen.conversion.source import Source, load_weights
from dolmen.core import state
from dolmen.core.mesh import SINGLE, Mesh
from dolmen.data.batch import Batch
from dolmen.evaluation.validate import batch_of, objective_of
from dolmen.model import build, spec
from dolmen.model.attention import CoreAttention
from dolmen.model.block import TransformerBlock
from dolmen.model.component import Branch
from dolmen.model.decoder import Decoder
from dolmen.model.head import LMHead
from dolmen.model.layers import ColumnParallelLinear, Norm
from dolmen.model.layout import Layout
from dolmen.model.mlp import Router
from dolmen.model.training import RouterTraining, Training
from dolmen.objectives.objective import LossOutput, Objective
from dolmen.optim import optimizer
from dolmen.optim.config import OptimizerConfig
from dolmen.parallel import tensor
from dolmen.parallel.vocabulary import vocabulary_range
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


WITHIN = {"attn": "attn.sums", "mlp": "mlp.act", "mlp.shared": "mlp.shared.act"}
"""Branch -> the name of what its inside makes."""


class Hooks:
    """Context manager that records from all modules of `model`. `rows(part)` returns the index in
    the whole batch, of so many `tokens`, of each token that this rank of cp has in the next forward
    of stage `part`.
    """

    def __init__(
        self,
        model: Decoder,
        mesh: Mesh,
        tokens: int,
        rows: Callable[[int], Int64[Tensor, " here"]],
        recorder: Recorder,
        gradients: bool,
    ):
        self.model, self.mesh, self.tokens, self.rows_of = model, mesh, tokens, rows
        self.recorder, self.gradients = recorder, gradients
        self.rows: Tensor | None = None
        """Of the forward that runs; None outside."""
        self.stack = ExitStack()

    def __enter__(self) -> None:
        model = self.model
        self._keep(model.register_forward_pre_hook(self._begin, with_kwargs=True))
        self._keep(model.register_forward_hook(self._end))
        for block in model.local_blocks():
            self._block(block)
        if model.final_norm is not None:
            self._on_output(model.final_norm, partial(self._stream, "final_norm"))

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def logits(self, logits: Float[Tensor, "sequences here rows"]) -> None:
        """Record this rank's columns of the logits, which no module computes."""
        vocabulary = self.model.tree.vocab_size
        first, size = vocabulary_range(vocabulary, self.mesh.tp)
        self._see("logits", logits.flatten(0, 1), vocabulary, slice(first, first + size))

    def _keep(self, handle: Any) -> None:
        self.stack.callback(handle.remove)

    def _begin(self, _: nn.Module, args: tuple, options: dict[str, Any]) -> None:
        self.rows = self.rows_of(options.get("part", 0))

    def _end(self, *_: object) -> None:
        self.rows = None

    def _block(self, block: TransformerBlock) -> None:
        layer = f"layers.{block.layer}"
        heads = HeadCounts.from_mixer(self.model.tree.blocks[block.layer].mixer, self.mesh)
        if block.layer == 0:
            self._on_input(block, lambda x: self._stream("embed", x))
        for name, module in block.named_modules():
            path = f"{layer}.{name}"
            match module:
                case Norm():
                    self._norm(module, path, heads)
                case Branch():
                    self._branch(module, path, WITHIN[name], layer, heads)
                case CoreAttention():
                    self._scores(module, path.removesuffix(".scores"), heads)
                case Router():
                    self._router(module, path)
        for module, name in ((block.attn, f"{layer}.attn"), (block.mlp, f"{layer}.mlp")):
            self._on_output(module, partial(self._stream, name))
        self._on_output(block, partial(self._stream, layer))

    def _norm(self, module: Norm, path: str, heads: "HeadCounts") -> None:
        """Record the norm of the residual stream, or of the heads of queries or keys."""
        if path.endswith(("q_norm", "k_norm")):
            number = heads.queries if path.endswith("q_norm") else heads.keys
            first = heads.first if path.endswith("q_norm") else heads.first_key
            self._on_output(
                module, lambda x: self._record_heads(path, x, number, first, x.shape[-1])
            )
            return
        if path.endswith(".mlp_norm"):
            self._on_input(module, partial(self._stream, path.replace("mlp_norm", "middle")))
        self._on_output(module, partial(self._stream, path))

    def _branch(
        self, module: Branch, path: str, result: str, layer: str, heads: "HeadCounts"
    ) -> None:
        columns = [
            name for name, one in module.named_children() if isinstance(one, ColumnParallelLinear)
        ]

        def products(made: tuple[Tensor, ...]) -> None:
            for name, x in zip(columns, made, strict=True):
                if name in ("k", "v"):
                    self._record_heads(f"{path}.{name}", x, heads.keys, heads.first_key, heads.size)
                else:
                    self._equal_part(f"{path}.{name}", x)

        self._on_output(module.products, products)
        self._on_output(module.result, partial(self._equal_part, f"{layer}.{result}"))

    def _scores(self, module: CoreAttention, path: str, heads: "HeadCounts") -> None:
        """Queries and keys without what ALiBi has made them longer by."""

        def record_inputs(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            q, k, v = args[:3]
            size, kept = heads.size, slice(None, heads.size)
            self._record_heads(f"{path}.query", q, heads.queries, heads.first, size, kept)
            self._record_heads(f"{path}.key", k, heads.keys, heads.first_key, size, kept)
            self._record_heads(f"{path}.value", v, heads.keys, heads.first_key, v.shape[-1])

        self._keep(module.register_forward_pre_hook(record_inputs))

    def _router(self, module: Router, path: str) -> None:
        """Its logits are the same on all ranks of tp, each of which sends back a part of their
        gradient.
        """

        def record_logits(_: nn.Module, args: tuple, out: tuple[Tensor, ...]) -> None:
            logits = out[0]
            self._see(path, logits, logits.shape[-1], slice(0, logits.shape[-1]), partial=True)

        self._keep(module.register_forward_hook(record_logits))

    def _on_output(self, module: nn.Module, see: Callable[[Any], None]) -> None:
        self._keep(module.register_forward_hook(lambda module, args, out: see(out)))

    def _on_input(self, module: nn.Module, see: Callable[[Any], None]) -> None:
        self._keep(module.register_forward_pre_hook(lambda module, args: see(args[0])))

    def _stream(self, name: str, x: Float[Tensor, "here hidden"]) -> None:
        """I@tp, or S(0)@tp."""
        self._see(name, x, x.shape[-1], slice(0, x.shape[-1]))

    def _equal_part(self, name: str, x: Float[Tensor, "tokens here"]) -> None:
        """S(1)@tp."""
        tp, width = self.mesh.tp, x.shape[-1]
        self._see(name, x, width * tp.size, slice(tp.rank * width, (tp.rank + 1) * width))

    def _record_heads(
        self,
        name: str,
        x: Tensor,
        number: int,
        first: int,
        size: int,
        kept: slice = slice(None),
    ) -> None:
        """Heads `first` on, of `number`: x [..., heads here, size], of which `kept` is `size`, or
        [tokens, heads here x size]. Where several ranks have a head, each sends back a part of its
        gradient.
        """
        here = x.shape[-2] if x.ndim == 4 else x.shape[-1] // size
        where = slice(first * size, (first + here) * size)
        self._see(name, x, number * size, where, number % self.mesh.tp.size > 0, kept)

    def _see(
        self,
        name: str,
        x: Tensor,
        width: int,
        where: slice,
        partial: bool = False,
        kept: slice = slice(None),
    ) -> None:
        """x [tokens, columns] or [..., heads, size], which are the columns `where` of `width`."""
        if self.rows is None:
            return
        rows, columns = self.rows, where.stop - where.start

        def flat(x: Tensor) -> Tensor:
            return x[..., kept].reshape(-1, columns)

        if flat(x).shape[0] != len(rows):
            rows = tensor.local_tokens(rows, self.model.tp)
        shape, region = (self.tokens, width), (slice(0, self.tokens), where)
        self.recorder.add("forward", name, shape, region, flat(x), rows)
        if self.gradients and x.requires_grad:
            x.register_hook(
                lambda g: self.recorder.add("backward", name, shape, region, flat(g), rows, partial)
            )


@dataclass(frozen=True)
class HeadCounts:
    """Numbers of heads of a mixer, and this rank's first ones under tensor parallelism."""

    queries: int
    keys: int
    size: int
    first: int
    first_key: int

    @classmethod
    def from_mixer(
        cls, mixer: spec.AttentionSpec | spec.LatentAttentionSpec, mesh: Mesh
    ) -> "HeadCounts":
        match mixer:
            case spec.AttentionSpec():
                keys = mixer.kv_heads
            case spec.LatentAttentionSpec():
                keys = mixer.heads
        first = mesh.tp.rank * (mixer.heads // mesh.tp.size)
        return cls(mixer.heads, keys, mixer.head_size, first, first * keys // mixer.heads)
