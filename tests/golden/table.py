"""The golden table: families x layouts, and what one run of one of them leaves to compare. A mechanism that splits or
delays anything joins LAYOUTS; a way to get it wrong joins test_controls.py.

A run is `train/step.py` itself on `data/mixture.py` itself, six steps. What is compared is taken where it is made: raw
gradients when `data.gradient_norm` is called (after the sum over dp, before clipping), norms and losses from Metrics.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from dolmen.core import mesh as meshes
from dolmen.core import state
from dolmen.core.mesh import SINGLE, Mesh
from dolmen.data.batch import IGNORED, Batch
from dolmen.data.mixture import Mixture, Part
from dolmen.data.stream import TokenStream
from dolmen.model.config import ModelConfig
from dolmen.optim.optimizer import OptimizerConfig, adamw
from dolmen.parallel import data
from dolmen.train.build import build, initialize
from dolmen.train.step import TrainState, optimizer_step

VOCABULARY, LENGTH, ROWS, STEPS, SEED = 71, 8, 16, 6, 0    # 71 is prime: no tp divides it

SIZES = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8, head_dim=8,
             initializer_range=0.1)
FAMILIES = {
    "llama": ModelConfig(**SIZES | dict(num_key_value_heads=4, head_dim=4)),
    # head_dim is not hidden / heads, one key-value head is fewer than any tp: k and v are whole on every rank
    "qwen3": ModelConfig(**SIZES, num_key_value_heads=1, qk_norm=True),
    "gpt2": ModelConfig(**SIZES | dict(head_dim=4), num_key_value_heads=8, max_position_embeddings=LENGTH + 1, position="learned",
                        norm="layernorm", mlp="plain", activation="gelu_tanh", attention_bias=True, output_bias=True,
                        mlp_bias=True, tie_word_embeddings=True),
}
DROPOUT = replace(FAMILIES["gpt2"], dropout=0.2)           # masks follow the logical element, not the rank: seed, step, place
# Rounding differs by layout, and Adam's g / (|g| + eps) can turn any rounding into a full step of lr: with eps 1e-8 a
# gradient element of 1e-9 changes its sign with the layout, a weight moves by 2e-2, and raw gradients of the next step differ
# by up to 4e-4 though the text is right. That is the optimizer, not the layout: in fp64 the same runs agree to 1e-13 with
# eps 1e-8 (test_double). eps 1e-3, about the median of a clipped gradient element, bounds the amplification by lr / eps = 10;
# an initializer_range of 0.1 (0.02 suits a width of 4,096, not of 32) gives q, k and gate gradients of the others' size.
# Measured worst over all rows: gradient 5e-6, norm 2e-7, loss 2e-7.
OPTIMIZER = OptimizerConfig(lr=1e-2, schedule="constant", clip=0.25, eps=1e-3)


@dataclass(frozen=True)
class Layout:
    """How the run is split: dp x tp processes, sequence parallelism, ZeRO stage, microbatches a step."""

    dp: int = 1
    tp: int = 1
    sequence: bool = False
    zero: int = 0
    accumulation: int = 1

    @property
    def world(self) -> int: return self.dp * self.tp

    def __str__(self) -> str:
        return f"dp{self.dp}-tp{self.tp}{'-sp' if self.sequence else ''}-zero{self.zero}-acc{self.accumulation}"


LAYOUTS = (
    Layout(accumulation=4), Layout(zero=2), Layout(zero=3, accumulation=4),
    Layout(dp=2), Layout(dp=2, zero=1, accumulation=4), Layout(dp=2, zero=2, accumulation=4), Layout(dp=2, zero=3),
    Layout(tp=2), Layout(tp=2, sequence=True, zero=1, accumulation=4),
    Layout(dp=4, accumulation=4), Layout(dp=4, zero=3, accumulation=4), Layout(tp=4), Layout(tp=4, sequence=True, zero=1),
    Layout(dp=2, tp=2, zero=2, accumulation=4), Layout(dp=2, tp=2, sequence=True, zero=3), Layout(dp=2, tp=2, sequence=True, accumulation=4),
    Layout(dp=4, tp=2, sequence=True, zero=1, accumulation=4), Layout(dp=2, tp=4, sequence=True, zero=3),
)


def batches(mesh: Mesh, seed: int = SEED) -> list[Batch]:
    """This rank's part of each step's batch. The first 3 r mod 11 labels of row r are IGNORED: ranks and microbatches hold
    unequal counts of real tokens, and row 10, a microbatch of its own where dp 4 accumulates 4, holds none."""
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, 4096).astype(np.uint16)
    mixture = Mixture([Part("noise", 1, TokenStream.of(tokens, np.array([0]), np.array([4096])))], LENGTH, seed)
    rows = ROWS // mesh.dp.size
    out = []
    for step in range(STEPS):
        batch = Batch.of_windows(mixture.windows(step * ROWS + mesh.dp.rank * rows, rows))
        ignored = (torch.arange(rows) + mesh.dp.rank * rows) * 3 % 11
        out.append(Batch(batch.tokens, torch.where(torch.arange(LENGTH) < ignored[:, None], IGNORED, batch.labels)))
    return out


@dataclass
class Run:
    """What a run leaves: per step the gradients by name (DTensors, or whole tensors of one process), their norm and the loss."""

    gradients: list[dict[str, torch.Tensor]]
    norms: list[float]
    losses: list[float]


def run(config: ModelConfig, mesh: Mesh, layout: Layout, steps: int = STEPS, optimizer: OptimizerConfig = OPTIMIZER,
        dtype: torch.dtype = torch.float32) -> Run:
    """`steps` updates of the real step function."""
    model = build(config, mesh, sequence=layout.sequence, zero=layout.zero if mesh.grid else None, dtype=dtype)
    initialize(model, SEED)
    train = TrainState(model, adamw(model, optimizer), optimizer, STEPS, layout.zero)
    names = {p: n for n, p in model.named_parameters()}
    out, norm = Run([], [], []), data.gradient_norm

    def observed(parameters, mesh):
        parameters = list(parameters)
        out.gradients.append({names[p]: p.grad.clone() for p in parameters if p.grad is not None})
        return norm(parameters, mesh)

    data.gradient_norm = observed
    try:
        for batch in batches(mesh)[:steps]:
            metrics = optimizer_step(train, batch, mesh, ROWS // mesh.dp.size // layout.accumulation)
            out.norms.append(metrics.grad_norm)
            out.losses.append(metrics.loss)
    finally: data.gradient_norm = norm
    return out


FLOOR = 1e-3                                               # of the step's gradient norm: see `differences`


def differences(got: Run, want: Run) -> dict[str, tuple[float, str]]:
    """Largest differences over all steps and ranks, and where: of gradients, by the largest element of the true tensor; of
    norms and losses, relative.

    A tensor's largest element is taken to be at least FLOOR times the norm of the whole gradient: GPT-2's key biases shift
    every score of a query alike, so their true gradient is zero and what is computed is rounding alone.
    """
    gradient = (0.0, "")
    for step, (mine, whole) in enumerate(zip(got.gradients, want.gradients, strict=True)):
        assert mine.keys() == whole.keys()
        for name, g in mine.items():
            scale = max(float(whole[name].abs().max()), FLOOR * want.norms[step])
            part = state.shard(g)
            off = float((part - whole[name][state.region(g)]).abs().max()) / scale if part.numel() else 0.0
            gradient = max(gradient, (off, f"{name}, step {step}"))
    out = {"gradient": gradient}
    for kind in ("norms", "losses"):
        out[kind] = max((abs(a / b - 1), f"step {i}") for i, (a, b) in enumerate(zip(getattr(got, kind), getattr(want, kind), strict=True)))
    if not dist.is_initialized(): return out
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, out)
    return {kind: max(o[kind] for o in everyone) for kind in out}


def compare(config: ModelConfig, layout: Layout, **options) -> dict[str, tuple[float, str]]:
    """One model on one layout of the joined world, against one process."""
    mesh = meshes.grid(layout.dp, layout.tp, torch.device("cpu"))
    return differences(run(config, mesh, layout, **options), run(config, SINGLE, Layout(), **options))


def compare_all(layouts: tuple[Layout, ...]) -> dict[str, dict[str, tuple[float, str]]]:
    """Every family on each of `layouts` (all of the joined world's size), against one process: {"family layout": differences}."""
    out = {}
    for family, config in FAMILIES.items():
        want = run(config, SINGLE, Layout())
        for layout in layouts:
            mesh = meshes.grid(layout.dp, layout.tp, torch.device("cpu"))
            out[f"{family} {layout}"] = differences(run(config, mesh, layout), want)
    return out
