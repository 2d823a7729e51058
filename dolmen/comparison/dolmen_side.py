"""The side of a comparison that dolmen computes: the model of a source, under any layout, through
one step of training/step.py exactly as a run makes it, recorded by hooks. The model's code is
unchanged.

Every rank calls `record` and gets what it has recorded itself. A hook is given the rows and columns
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
from dolmen.conversion.source import ModelSource, load_weights
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
"""No auxiliary router loss: it belongs to training, not to the model."""


DEPTHS = ("weights", "forward", "backward", "update")


@dataclass(frozen=True, eq=False)
class DiffTask:
    """The batch and optimizer with which both sides run one step."""

    windows: Int64[np.ndarray, "sequences window"]
    """Token ids, one more per sequence than the model reads: the label of the last."""
    optimizer: OptimizerConfig
    until: str
    """Last stage of DEPTHS to compare."""

    def reaches(self, depth: str) -> bool:
        """Return whether `depth` ("weights", "forward", "backward" or "update") is among the stages
        to compare.
        """
        return DEPTHS.index(depth) <= DEPTHS.index(self.until)


def record(
    source: ModelSource,
    task: DiffTask,
    mesh: Mesh = SINGLE,
    layout: Layout = Layout(),
    rest: torch.dtype = torch.float32,
    compute: torch.dtype | None = None,
) -> Tensors:
    """Load the model of `source` under `layout`, run one training step on the task's batch, and
    return what this rank recorded: its shards of weights, activations, gradients and updates, as
    deep as the task specifies. `rest`: dtype of the stored parameters; `compute`: of the
    computation. Collective. Raises as `load_weights`.
    """
    rows = len(task.windows)
    schedule = layout.make_schedule(rows, 1)
    model = build.build(
        source.spec, mesh, layout, schedule, training=NO_BALANCE, dtype=rest, compute=compute
    )
    build.load(model, lambda write: load_weights(source, write, only=model.local_specs()))
    recorder = Recorder(mesh.rank)
    weights = {name: state.local_view(p) for name, p in model.named_parameters()}
    _record_local(recorder, "weights", model, weights)
    if task.reaches("forward"):
        _record_step(model, task, mesh, layout, recorder)
    return recorder.tensors


def _record_step(
    model: Decoder, task: DiffTask, mesh: Mesh, layout: Layout, recorder: Recorder
) -> None:
    """Run one training step on this rank's part of the batch, and add activations, gradients,
    moments and updates to the recorder.
    """
    rows, length = task.windows.shape[0], task.windows.shape[1] - 1
    # sequences of this dp rank
    mine = rows // mesh.dp.size
    schedule = layout.make_schedule(rows, 1)
    # of each stage of this rank, the microbatches whose forward is yet to come
    left = [
        [a.micro for a in schedule.actions[mesh.pp.rank] if a.kind == "F" and a.chunk == chunk]
        for chunk in range(schedule.chunks)
    ]
    # positions of this cp rank's tokens in a sequence (zigzag)
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

    def copy_gradients(*_: Any) -> None:
        """Copy the local gradients before the optimizer uses them: an optimizer pre-step hook."""
        local_gradients = {
            name: p.grad for name, p in model.named_parameters() if p.grad is not None
        }
        gradients.update({name: state.local_view(g).clone() for name, g in local_gradients.items()})

    adamw.register_step_pre_hook(copy_gradients)
    batch = batch_of(model.spec, task.windows[mesh.dp.rank * mine : (mesh.dp.rank + 1) * mine])
    objective = _RecordingObjective(hooks.logits, objective_of(model.spec, batch))
    # the state and step of a real run, in microbatches of one sequence
    training = TrainState(
        model, adamw, task.optimizer, 1, layout.zero, schedule, objective=objective
    )
    if model.spec.streams > 1 and model.spec.embedding.types is None:
        batch = batch.add_positions(model.spec.streams)
    with hooks:
        metrics = optimizer_step(training, batch, mesh)
    recorder.add_number("loss", metrics.loss)
    if task.reaches("backward"):
        recorder.add_number("gradient norm", metrics.grad_norm)
        clip = task.optimizer.clip  # the gradients that an update sees are clipped
        # undone below, so that gradients are compared as backward made them
        factor = min(1.0, clip / (metrics.grad_norm + 1e-6)) if clip > 0 else 1.0
        _record_local(recorder, "gradients", model, {n: g / factor for n, g in gradients.items()})
    if task.reaches("update"):
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        for kind in MOMENTS:
            moments = {n: state.local_view(adamw.state[p][kind]) for n, p in trained.items()}
            _record_local(recorder, kind, model, moments)
        moved = {n: state.local_view(p) - before[n] for n, p in trained.items()}
        _record_local(recorder, "update", model, moved)


def _record_local(
    recorder: Recorder, stage: Stage, model: Decoder, values: dict[str, Tensor]
) -> None:
    """Add this rank's shards of tensors (parameter name -> local values) to the recorder; they are
    sharded as their parameters are.
    """
    for name, p in model.named_parameters():
        if name in values:
            recorder.add(stage, name, tuple(p.shape), state.region(p), values[name])


@dataclass(frozen=True, eq=False)
class _RecordingObjective:
    """Wraps the objective: passes the logits to `see` first. A fused loss never has them, so they
    are computed once more, without gradients.
    """

    head: ClassVar[type] = spec.LMHeadSpec
    see: Callable[[Tensor], None]
    objective: Objective

    @property
    def names(self) -> tuple[str, ...]:
        """Empty: no metrics are needed."""
        return ()

    def count(self, batch: Batch) -> float:
        """Return the number of labels that the wrapped objective's loss is averaged over."""
        return self.objective.count(batch)

    def __call__(self, hidden: Float[Tensor, "_ hidden"], head: LMHead, batch: Batch) -> LossOutput:
        """Pass the logits to `see` and return the wrapped objective's loss."""
        with torch.no_grad():
            self.see(head.logits(hidden.detach()))
        return LossOutput(self.objective(hidden, head, batch).total)


WITHIN = {"attn": "attn.sums", "mlp": "mlp.act", "mlp.shared": "mlp.shared.act"}
"""Module path of a branch -> name of the tensor that enters its output projection."""


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
        """Store what to record, and register no hook yet. `tokens`: of the whole batch;
        `gradients`: record gradients of activations too.
        """
        self.model, self.mesh, self.tokens, self.rows_of = model, mesh, tokens, rows
        self.recorder, self.gradients = recorder, gradients
        self.rows: Tensor | None = None
        """Row indices of the running forward; None outside of one."""
        self.stack = ExitStack()

    def __enter__(self) -> None:
        """Register forward hooks on the model, its layers and the final norm."""
        model = self.model
        # model hooks bracket one microbatch of one stage
        self._remove_on_exit(model.register_forward_pre_hook(self._begin, with_kwargs=True))
        self._remove_on_exit(model.register_forward_hook(self._end))
        for block in model.local_blocks():
            self._hook_block(block)
        if model.final_norm is not None:
            self._hook_output(model.final_norm, partial(self._record_stream, "final_norm"))

    def __exit__(self, *_: object) -> None:
        """Remove all hooks from the model."""
        self.stack.close()

    def logits(self, logits: Float[Tensor, "sequences here rows"]) -> None:
        """Record this rank's columns (vocabulary shard) of the logits, which no module outputs."""
        vocabulary = self.model.spec.vocab_size
        first, size = vocabulary_range(vocabulary, self.mesh.tp)
        self._record("logits", logits.flatten(0, 1), vocabulary, slice(first, first + size))

    def _remove_on_exit(self, handle: Any) -> None:
        """Remove the hook of this handle when the context ends."""
        self.stack.callback(handle.remove)

    def _begin(self, _: nn.Module, args: tuple, options: dict[str, Any]) -> None:
        """Note, before the decoder's forward, which rows of the batch its pipeline stage computes:
        a forward pre-hook.
        """
        self.rows = self.rows_of(options["part"])

    def _end(self, *_: object) -> None:
        """Stop recording after the decoder's forward, until the next one: a forward hook."""
        self.rows = None

    def _hook_block(self, block: TransformerBlock) -> None:
        """Register hooks on all modules of a layer whose inputs or outputs are recorded."""
        layer = f"layers.{block.layer}"
        heads = HeadCounts.from_mixer(self.model.spec.blocks[block.layer].mixer, self.mesh)
        if block.layer == 0:
            self._hook_input(block, lambda x: self._record_stream("embed", x))
        for name, module in block.named_modules():
            path = f"{layer}.{name}"
            match module:
                case Norm():
                    self._hook_norm(module, path, heads)
                case Branch():
                    self._hook_branch(module, path, WITHIN[name], layer, heads)
                case CoreAttention():
                    self._hook_scores(module, path.removesuffix(".scores"), heads)
                case Router():
                    self._hook_router(module, path)
        for module, name in ((block.attn, f"{layer}.attn"), (block.mlp, f"{layer}.mlp")):
            self._hook_output(module, partial(self._record_stream, name))
        self._hook_output(block, partial(self._record_stream, layer))

    def _hook_norm(self, module: Norm, path: str, heads: "HeadCounts") -> None:
        """Register hooks that record a norm's output (of the residual stream, or of query or key
        heads), and for mlp_norm also its input, the residual stream between attention and MLP.
        """
        if path.endswith(("q_norm", "k_norm")):
            number = heads.queries if path.endswith("q_norm") else heads.keys
            first = heads.first if path.endswith("q_norm") else heads.first_key
            self._hook_output(
                module, lambda x: self._record_heads(path, x, number, first, x.shape[-1])
            )
            return
        if path.endswith(".mlp_norm"):
            self._hook_input(
                module, partial(self._record_stream, path.replace("mlp_norm", "middle"))
            )
        self._hook_output(module, partial(self._record_stream, path))

    def _hook_branch(
        self, module: Branch, path: str, result: str, layer: str, heads: "HeadCounts"
    ) -> None:
        """Register hooks that record the column-parallel projections of attention or MLP (`module`
        at `path`), and the input of its output projection as `result`.
        """
        # q, k, v, or gate and up: products with the same input
        columns = [
            name
            for name, child in module.named_children()
            if isinstance(child, ColumnParallelLinear)
        ]

        def products(products_: tuple[Tensor, ...]) -> None:
            """Record the outputs of the column-parallel projections, in their order."""
            for name, x in zip(columns, products_, strict=True):
                if name in ("k", "v"):
                    self._record_heads(f"{path}.{name}", x, heads.keys, heads.first_key, heads.size)
                else:
                    self._record_even_columns(f"{path}.{name}", x)

        self._hook_output(module.products, products)
        self._hook_output(module.result, partial(self._record_even_columns, f"{layer}.{result}"))

    def _hook_scores(self, module: CoreAttention, path: str, heads: "HeadCounts") -> None:
        """Register a hook that records the queries, keys and values that enter the attention
        itself, without the columns that ALiBi appends to queries and keys.
        """

        def record_inputs(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            """Record q, k and v from the arguments of CoreAttention: a forward pre-hook."""
            q, k, v = args[:3]
            size, columns = heads.size, slice(None, heads.size)
            self._record_heads(f"{path}.query", q, heads.queries, heads.first, size, columns)
            self._record_heads(f"{path}.key", k, heads.keys, heads.first_key, size, columns)
            self._record_heads(f"{path}.value", v, heads.keys, heads.first_key, v.shape[-1])

        self._remove_on_exit(module.register_forward_pre_hook(record_inputs))

    def _hook_router(self, module: Router, path: str) -> None:
        """Register a hook that records the router's logits. They are equal on all tp ranks, but
        their gradient is a sum over these.
        """

        def record_logits(_: nn.Module, args: tuple, out: tuple[Tensor, ...]) -> None:
            """Record the router's logits, its first output: a forward hook."""
            logits = out[0]
            self._record(path, logits, logits.shape[-1], slice(0, logits.shape[-1]), partial=True)

        self._remove_on_exit(module.register_forward_hook(record_logits))

    def _hook_output(self, module: nn.Module, see: Callable[[Any], None]) -> None:
        """Call see(output) after each forward of the module, until the context ends."""
        self._remove_on_exit(module.register_forward_hook(lambda module, args, out: see(out)))

    def _hook_input(self, module: nn.Module, see: Callable[[Any], None]) -> None:
        """Call see(first argument) before each forward of the module, until the context ends."""
        self._remove_on_exit(module.register_forward_pre_hook(lambda module, args: see(args[0])))

    def _record_stream(self, name: str, x: Float[Tensor, "here hidden"]) -> None:
        """Record hidden vectors of the residual stream as tensor `name`, with all columns; rows are
        all tokens or, under sequence parallelism, this tp rank's (I@tp or S(0)@tp).
        """
        self._record(name, x, x.shape[-1], slice(0, x.shape[-1]))

    def _record_even_columns(self, name: str, x: Float[Tensor, "tokens here"]) -> None:
        """Record, as tensor `name`, this rank's columns of a tensor whose columns are divided
        evenly over tp (S(1)@tp).
        """
        tp, width = self.mesh.tp, x.shape[-1]
        self._record(name, x, width * tp.size, slice(tp.rank * width, (tp.rank + 1) * width))

    def _record_heads(
        self, name: str, x: Tensor, number: int, first: int, size: int, columns: slice = slice(None)
    ) -> None:
        """Record this rank's heads, from head `first` of `number` heads on, as tensor `name`. x is
        [batch, length, heads here, size], or [..., heads here x size]; `columns` selects columns of
        each head. Where several tp ranks hold the same key or value head, their gradients are
        recorded as partial sums.
        """
        here = x.shape[-2] if x.ndim == 4 else x.shape[-1] // size
        where = slice(first * size, (first + here) * size)
        self._record(name, x, number * size, where, number % self.mesh.tp.size > 0, columns)

    def _record(
        self,
        name: str,
        x: Tensor,
        width: int,
        where: slice,
        partial: bool = False,
        selected: slice = slice(None),
    ) -> None:
        """Record x as this rank's part of tensor `name`: its rows, and the columns `where` of
        `width`; and the gradient of x when backward reaches it. x is [tokens, columns] or [...,
        heads, size]; `selected` selects columns of each head; `partial`: the gradient is a sum over
        tp. Does nothing outside the decoder's forward.
        """
        # a layer that backward recomputes
        if self.rows is None:
            return
        rows, columns = self.rows, where.stop - where.start

        def flat(x: Tensor) -> Tensor:
            """Return the selected columns of x as the matrix [rows, columns] that the recorded
            tensor has.
            """
            # heads side by side, as the logical tensor has them
            return x[..., selected].reshape(-1, columns)

        if flat(x).shape[0] != len(rows):
            # sequence parallelism: this rank's share of the tokens
            rows = tensor.local_tokens(rows, self.model.tp)
        shape, region = (self.tokens, width), (slice(0, self.tokens), where)
        self.recorder.add("forward", name, shape, region, flat(x), rows)
        if self.gradients and x.requires_grad:
            # fires when backward has summed the whole gradient of x
            x.register_hook(
                lambda g: self.recorder.add("backward", name, shape, region, flat(g), rows, partial)
            )


@dataclass(frozen=True)
class HeadCounts:
    """Head counts of an attention layer, and this tp rank's first query and key head."""

    queries: int
    keys: int
    size: int
    first: int
    first_key: int

    @classmethod
    def from_mixer(
        cls, mixer: spec.AttentionSpec | spec.LatentAttentionSpec, mesh: Mesh
    ) -> "HeadCounts":
        """Return the head counts of an attention layer, and the first query and key head of this
        rank's tp shard.
        """
        match mixer:
            case spec.AttentionSpec():
                keys = mixer.kv_heads
            case spec.LatentAttentionSpec():
                keys = mixer.heads
        # with fewer key heads than ranks, several ranks share one
        first = mesh.tp.rank * (mixer.heads // mesh.tp.size)
        return cls(mixer.heads, keys, mixer.head_size, first, first * keys // mixer.heads)
