"""How often `dolmen diff` names the right tensor: faults, each put into side A of a small random
model, one at a time, and compared with a side B that is right.

    python benchmarks/diff_faults.py              all: a table, exit code 1 under 28 in 30
    python benchmarks/diff_faults.py NAME ...     those whose name contains one of these
    python benchmarks/diff_faults.py --markdown   the rows of docs/how-to/diff.md too

Faults are in stored weights, in config.json, in the code of forward, of backward and of the update,
and in that of layouts: these run on two processes, all in one spawn. Side B is transformers, and of
layouts dolmen in one process.
"""

import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dolmen.comparison import dolmen_side, recording, transformers_side
from dolmen.comparison.compare import Side
from dolmen.comparison.diff import DiffReport, compare_sides
from dolmen.comparison.dolmen_side import DiffTask
from dolmen.comparison.recording import Recording, Tensors
from dolmen.core import state, transfers
from dolmen.core.mesh import SINGLE
from dolmen.core.topology import Topology
from dolmen.evaluation.reference_model import random_tokens
from dolmen.families import ModelConfig
from dolmen.families.model import model_from_fields, replace_fields
from dolmen.files.safetensors import Spec
from dolmen.model import attention, block, build, decoder, layers, mlp
from dolmen.model.layout import Layout
from dolmen.objectives import objective
from dolmen.optim.config import OptimizerConfig
from dolmen.parallel import context, data, pipeline, tensor

NEEDED, LENGTH, SEQUENCES = 28 / 30, 16, 4
SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=64,
)
LLAMA_LIKE = SIZES | dict(intermediate_size=48, num_key_value_heads=2)
MODELS: dict[str, Callable[[], ModelConfig]] = {
    "llama": lambda: model_from_fields("llama", LLAMA_LIKE),
    "mistral": lambda: model_from_fields(
        "mistral", LLAMA_LIKE | dict(head_dim=8, sliding_window=6)
    ),
    "gemma2": lambda: model_from_fields(
        "gemma2", LLAMA_LIKE | dict(head_dim=8, query_pre_attn_scalar=8, sliding_window=6)
    ),
    "qwen3": lambda: model_from_fields(
        "qwen3", LLAMA_LIKE | dict(head_dim=8, num_key_value_heads=1)
    ),
    "gpt2": lambda: model_from_fields(
        "gpt2",
        dict(vocab_size=61, n_embd=32, n_layer=3, n_head=4, n_positions=64),
    ),
}
Weights = dict[str, Tensor]
Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Held:
    """A source whose weights are in memory."""

    model: ModelConfig
    weights: Mapping[str, Tensor]
    where: Path = Path("memory")
    title: str = "memory"
    tokenizer: None = None
    iteration: None = None
    transformers: None = None
    generation_config: dict[str, Any] = field(default_factory=dict)

    @property
    def spec(self):
        return self.model.spec

    @property
    def specs(self):
        return {name: Spec(tuple(t.shape), t.dtype) for name, t in self.weights.items()}

    def stream(self, only: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self.weights.items():
            if only is None or name in only:
                yield name, weight

    def read(self, name: str) -> Tensor:
        return self.weights[name]


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with side A, and what `diff` is to say of it."""

    name: str
    where: str
    """As stage/tensor; several, of which any is right, by |."""
    kinds: str
    """The same of what it looks like."""
    model: str = "llama"
    weights: Callable[[Weights], None] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    code: Callable[[Patch], None] | None = None
    asked: Callable[[DiffTask], DiffTask] = lambda asked: asked
    layout: Layout | None = None
    """None: one process, beside transformers."""


def exchange(a: str, b: str) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        weights[a], weights[b] = weights[b], weights[a]

    return change


def to(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Weights], None]:
    def damage(weights: Weights) -> None:
        weights[name] = change(weights[name]).contiguous()

    return damage


def heads(x: Tensor) -> Tensor:
    return x.view(4, 8, -1)[[1, 0, 3, 2]].reshape(x.shape)


def neighbours(x: Tensor) -> Tensor:
    """Pairs (i, i + half) of each head become neighbours."""
    return x.view(4, 2, 4, -1).transpose(1, 2).reshape(x.shape)


def an_own_head(weights: Weights) -> None:
    weights["head.weight"] = weights["embed.weight"] * 1.5


def positions_off(patch: Patch) -> None:
    right = decoder.Decoder._positions
    patch.setattr(decoder.Decoder, "_positions", lambda *args: right(*args) + 1)


def without_residual(patch: Patch) -> None:
    def stream(layer, x, given, cache=None):
        x = x + layer.attn(layer.attn_norm(x), given, cache)
        added = layer.mlp(layer.mlp_norm(x), given)
        return added if layer.layer == 1 else x + added

    patch.setattr(block.SequentialBlock, "compute", stream)


def centred(patch: Patch) -> None:
    right = layers.rms_norm
    patch.setattr(layers, "rms_norm", lambda x, *rest: right(x - x.mean(-1, keepdim=True), *rest))


def not_causal(patch: Patch) -> None:
    def sums(self, q, k, v, given, sinks):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    patch.setattr(attention.CoreAttention, "_sums", sums)


def half_the_scale(patch: Patch) -> None:
    right = attention.CoreAttention.__init__

    def init(self, attend, *rest):
        right(self, attend, *rest)
        self.attend = self.attend._replace(scale=0.5 * 8**-0.5)

    patch.setattr(attention.CoreAttention, "__init__", init)


def unshifted(patch: Patch) -> None:
    right = objective.CrossEntropy.__call__
    patch.setattr(
        objective.CrossEntropy,
        "__call__",
        lambda self, hidden, head, batch: right(
            self, hidden, head, replace(batch, labels=batch.tokens)
        ),
    )


def unbiased(patch: Patch) -> None:
    right = mlp.MLP.columns.fget
    assert right is not None
    patch.setattr(
        mlp.MLP, "columns", property(lambda self: [one._replace(bias=None) for one in right(self)])
    )


class WrongSlope(torch.autograd.Function):
    """SiLU, whose gradient is taken for its sigmoid."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        return g * ctx.saved_tensors[0].sigmoid()


def wrong_slope(patch: Patch) -> None:
    patch.setitem(mlp.ACTIVATIONS, "silu", WrongSlope.apply)


def weight_gradients_twice(patch: Patch) -> None:
    right = layers.RowParallelLinear.linear

    def linear(self, *args):
        found = right(self, *args)
        weight = found.weight
        return found._replace(weight=2 * weight - weight.detach())

    patch.setattr(layers.RowParallelLinear, "linear", linear)


def knobs(**wrong: Any) -> Callable[[DiffTask], DiffTask]:
    return lambda asked: replace(asked, optimizer=replace(asked.optimizer, **wrong))


def another_shard(patch: Patch) -> None:
    right = state.write_region

    def write(p, value):
        odd = value.shape == (32, 32) and dist.get_rank() == 1 and not patched
        right(p, value.roll(16, 0) if odd else value)
        patched.extend([1] * odd)

    patched: list[int] = []
    patch.setattr(build.state, "write_region", write)


def without(module: Any, name: str, instead: Callable) -> Callable[[Patch], None]:
    """`module` calls `instead` where it would call the transfer; all others are left alone."""
    return lambda patch: patch.setattr(
        module, "transfers", SimpleNamespace(**vars(transfers) | {name: instead})
    )


def row_left_out(patch: Patch) -> None:
    patch.setattr(
        layers.RowParallelLinear,
        "forward",
        lambda self, x: tensor.part_of_rows(x, self.linear(), self.tp),
    )


def row_twice(patch: Patch) -> None:
    right = layers.RowParallelLinear.forward
    patch.setattr(layers.RowParallelLinear, "forward", lambda self, x: right(self, x) * 2)


def half_a_block(patch: Patch) -> None:
    right = dolmen_side.build.build

    def built(*args, **options):
        model = right(*args, **options)
        data.units(model)[1].set_gradient_divide_factor(2.0)
        return model

    patch.setattr(dolmen_side.build, "build", built)


def unrotated(patch: Patch) -> None:
    patch.setattr(
        context.transfers,
        "start_rotate",
        lambda tensors, axis, shift=1: SimpleNamespace(wait=lambda: list(tensors)),
    )


def another_message(patch: Patch) -> None:
    right = pipeline.messages_sent

    def swapped(schedule, sender, to):
        messages = right(schedule, sender, to)
        messages[:2] = messages[1::-1]
        return messages

    patch.setattr(pipeline, "messages_sent", swapped)


TP, SP, CP, PP, DP = (
    Layout(tp=2, dp=1),
    Layout(tp=2, dp=1, sequence_parallel=True),
    Layout(cp=2, dp=1),
    Layout(pp=2, dp=1),
    Layout(dp=2),
)
ROPE = "rope_parameters.rope_theta"
L1 = "layers.1."
FAULTS = [
    # weights
    Fault(
        "gate and up swapped",
        f"weights/{L1}mlp.gate.weight",
        "swapped",
        weights=exchange(L1 + "mlp.gate.weight", L1 + "mlp.up.weight"),
    ),
    Fault(
        "k and v swapped",
        f"weights/{L1}attn.k.weight",
        "swapped",
        weights=exchange(L1 + "attn.k.weight", L1 + "attn.v.weight"),
    ),
    Fault(
        "heads of q permuted",
        f"weights/{L1}attn.q.weight",
        "permuted heads",
        weights=to(L1 + "attn.q.weight", heads),
    ),
    Fault(
        "pairs of rope in the other order",
        f"weights/{L1}attn.q.weight",
        "permuted pairs",
        weights=to(L1 + "attn.q.weight", neighbours),
    ),
    Fault(
        "o transposed",
        f"weights/{L1}attn.o.weight",
        "transposed",
        weights=to(L1 + "attn.o.weight", Tensor.t),
    ),
    Fault(
        "a stored bias dropped",
        f"weights/{L1}attn.q.bias",
        "missing",
        "gpt2",
        weights=to(L1 + "attn.q.bias", torch.zeros_like),
    ),
    Fault(
        "a norm stored as w - 1",
        f"weights/{L1}mlp_norm.weight",
        "an offset",
        weights=to(L1 + "mlp_norm.weight", lambda w: w - 1),
    ),
    Fault(
        "down went through bf16",
        f"weights/{L1}mlp.down.weight",
        "rounding",
        weights=to(L1 + "mlp.down.weight", lambda w: w.bfloat16().float()),
    ),
    Fault(
        "a tied head that is not tied",
        "weights/head.weight",
        "only on one side",
        "gpt2",
        weights=an_own_head,
        config=dict(tie_word_embeddings=False),
    ),
    # config.json
    Fault("rope base", "forward/layers.0.attn.query", "other angles", config={ROPE: 9000.0}),
    Fault("eps", "forward/layers.0.attn_norm", "a scale by row", config=dict(rms_norm_eps=1e-5)),
    Fault(
        "window",
        "forward/layers.0.attn.scores",
        "another mask",
        "mistral",
        config=dict(sliding_window=7),
    ),
    Fault(
        "scale of scores",
        "forward/layers.0.attn.scores",
        "a scale",
        "gemma2",
        config=dict(query_pre_attn_scalar=16, attn_logit_softcapping=None),
    ),
    Fault("activation", "forward/layers.0.mlp.act", "other values", config=dict(hidden_act="gelu")),
    # code: forward
    # by rope alone all positions off by one are the same function
    Fault(
        "positions off by one",
        "forward/embed",
        "an offset by position",
        "gpt2",
        code=positions_off,
    ),
    Fault("a residual left out", "forward/layers.1", "missing term", code=without_residual),
    Fault("LayerNorm for RMSNorm", "forward/layers.0.attn_norm", "other values", code=centred),
    Fault(
        "no causal mask",
        "forward/layers.0.attn.sums",
        "other values|some positions",
        code=not_causal,
    ),
    Fault(
        "scale in the kernel",
        "forward/layers.0.attn.sums",
        "other values|from a position on",
        code=half_the_scale,
    ),
    Fault("a bias left out", "forward/layers.0.mlp.up", "an offset", "gpt2", code=unbiased),
    # code: loss, backward, update
    Fault("labels unshifted", "numbers/loss", "other values", code=unshifted),
    Fault(
        "slope of the activation", "backward/layers.2.mlp.gate", "other values", code=wrong_slope
    ),
    Fault(
        "weight gradients twice",
        "gradients/layers.2.mlp.down.weight",
        "a scale",
        code=weight_gradients_twice,
    ),
    Fault("beta1", "exp_avg/embed.weight", "a scale", asked=knobs(beta1=0.8)),
    Fault("eps of AdamW", "update/embed.weight", "other values", asked=knobs(eps=1e-3)),
    Fault(
        "no weight decay",
        "update/embed.weight",
        "other values|missing term",
        asked=knobs(weight_decay=0.0),
    ),
    # layouts
    Fault(
        "another rank's shard",
        "weights/layers.0.attn.q.weight",
        "another rank's part",
        code=another_shard,
        layout=TP,
    ),
    Fault(
        "sum forward left out",
        "forward/layers.0.attn",
        "a missing sum",
        code=row_left_out,
        layout=TP,
    ),
    Fault(
        "sum forward twice",
        "forward/layers.0.attn",
        "a doubled sum|a scale",
        code=row_twice,
        layout=TP,
    ),
    Fault(
        "sum backward left out",
        "backward/final_norm",
        "a missing sum",
        code=without(tensor, "start_all_reduce_", lambda x, axis: x),
        layout=TP,
    ),
    Fault(
        "Partial of norms left out",
        "gradients/final_norm.weight",
        "a missing sum",
        code=lambda patch: patch.setattr(
            tensor.TensorParallel, "residual_partial", property(lambda tp: None)
        ),
        layout=SP,
    ),
    Fault(
        "one block averaged over dp",
        "gradients/layers.0.mlp.down.weight",
        "a missing sum|a scale",
        code=half_a_block,
        layout=DP,
    ),
    Fault(
        "keys not passed around the ring",
        "forward/layers.0.attn.sums",
        "other values|some positions|from a position on|a part",
        code=unrotated,
        layout=CP,
    ),
    Fault(
        "a message of another microbatch",
        "forward/layers.1.attn_norm|forward/layers.2.attn_norm",
        "a part|other values",
        code=another_message,
        layout=PP,
    ),
    Fault(
        "a tied embedding not summed over pp",
        "gradients/embed.weight",
        "other values|a part|a missing sum",
        "gpt2",
        code=lambda patch: patch.setattr(data, "sum_over", lambda p, axis: None),
        layout=PP,
    ),
]


def random_weights(model: ModelConfig) -> Weights:
    """Norms around their own value, biases around 0, and matrices that keep sizes about 1."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, leaf in model.spec.params.items():
        drawn = torch.randn(leaf.shape, generator=generator)
        scale = 0.3 if len(leaf.shape) == 1 else 0.2
        found[name] = drawn * scale + (leaf.initial == "ones")
    return found


@cache
def right_source(name: str) -> Held:
    model = MODELS[name]()
    return Held(model, random_weights(model))


def wrong_source(fault: Fault) -> Held:
    source = right_source(fault.model)
    weights = dict(source.weights)
    if fault.weights is not None:
        fault.weights(weights)
    model = replace_fields(source.model, fault.config) if fault.config else source.model
    return Held(model, weights)


@cache
def right_asked(name: str) -> DiffTask:
    windows = random_tokens(61, (SEQUENCES, LENGTH + 1), None, 0).numpy()
    return DiffTask(windows, OptimizerConfig(schedule="constant"), "update")


@cache
def beside(name: str, layouts: bool) -> Side:
    """Side B: transformers, or of layouts dolmen in one process."""
    source, asked = right_source(name), right_asked(name)
    record = dolmen_side.record if layouts else transformers_side.record
    where = SINGLE if layouts else SINGLE.device
    return side(record(source, asked, where), source, Topology())  # pyright: ignore[reportArgumentType]


def side(tensors: Tensors, source: Held, topology: Topology) -> Side:
    return Side(Recording("", topology, torch.float32, torch.float32, tensors), source.spec, LENGTH)


def recorded(fault: Fault, mesh=SINGLE) -> Tensors:
    """What this rank sees of side A."""
    with pytest.MonkeyPatch.context() as patch:
        if fault.code is not None:
            fault.code(patch)
        asked, layout = fault.asked(right_asked(fault.model)), fault.layout or Layout(dp=1)
        return dolmen_side.record(wrong_source(fault), asked, mesh, layout)


def report(fault: Fault, tensors: Tensors) -> DiffReport:
    layout = fault.layout or Layout(dp=1)
    topology = Topology(dp=layout.dp or 1, tp=layout.tp, pp=layout.pp, cp=layout.cp)
    a = side(tensors, wrong_source(fault), topology)
    return compare_sides(a, beside(fault.model, fault.layout is not None), fault.name)


def right(fault: Fault, found: DiffReport) -> tuple[bool, bool]:
    """Whether the tensor that is named is the right one, and what it is said to look like."""
    if found.first is None:
        return False, False
    row = found.first.row
    named = f"{row.stage}/{row.name}" in fault.where.split("|")
    return named, named and found.first.fault.kind in fault.kinds.split("|")


def two(rank: int, folder: str, names: list[str]) -> None:
    """One of two processes: all faults in layouts."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for fault in FAULTS:
        if fault.name in names:
            assert fault.layout is not None
            mesh = fault.layout.mesh(torch.device("cpu"))
            place = Path(folder) / fault.name
            place.mkdir(exist_ok=True)
            recording.save(place, recorded(fault, mesh), rank)
    dist.barrier()
    dist.destroy_process_group()


def run(faults: list[Fault]) -> dict[str, DiffReport]:
    """Of each fault what `diff` says."""
    found = {f.name: report(f, recorded(f)) for f in faults if f.layout is None}
    layouts = [f for f in faults if f.layout is not None]
    if layouts:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(two, (folder, [f.name for f in layouts]), 2)  # pyright: ignore[reportPrivateImportUsage]
            for fault in layouts:
                found[fault.name] = report(fault, recording.load(Path(folder) / fault.name, 2))
    return found


def main(words: list[str]) -> int:
    torch.set_num_threads(1)
    wanted = [word for word in words if not word.startswith("--")]
    faults = [f for f in FAULTS if not wanted or any(word in f.name for word in wanted)]
    found, table = run(faults), Table()
    for column in ("fault", "first named", "", "looks like", ""):
        table.add_column(column, overflow="fold")
    tensors = kinds = 0
    for fault in faults:
        told = found[fault.name].first
        named, kind = right(fault, found[fault.name])
        tensors, kinds = tensors + named, kinds + kind
        first = "nothing" if told is None else f"{told.row.stage}/{told.row.name}"
        looks = "" if told is None else f"{told.fault.kind}: {told.fault.text}"
        wrong = "" if named else f"not {fault.where}"
        table.add_row(fault.name, first, wrong, looks, "" if kind else f"not {fault.kinds}")
    Console(width=160).print(table)
    if "--markdown" in words:
        for fault in faults:
            told = found[fault.name].first
            assert told is not None
            print(f"| {fault.name} | {told.row.stage}: {told.row.name} | {told.fault.kind} |")
    print(f"the tensor is right in {tensors} of {len(faults)}, what it looks like in {kinds}")
    return 0 if tensors >= NEEDED * len(faults) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
