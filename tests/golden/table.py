"""The golden table: families x layouts, and what one run of one of them leaves to compare. A
mechanism that splits or delays anything joins LAYOUTS; a way to get it wrong joins
controls.py.

A run is `training/step.py` itself on `data/mixture.py` itself, three steps. What is compared is
taken where it is made: raw gradients when `data.gradient_norm` is called (after the sum over dp,
before clipping), norms and losses from Metrics.
"""

import math
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from spawning import Row, made_once
from tiny_models import Flat, Tiny, build, initialize

from dolmen.core import state
from dolmen.core.mesh import SINGLE, Mesh
from dolmen.data.batch import IGNORED, Batch, document_starts
from dolmen.data.mixture import Mixture, Part, TokenStream
from dolmen.model import layout as layouts
from dolmen.objectives.objective import CrossEntropy, Objective
from dolmen.ops.attention import Documents
from dolmen.optim.optimizer import OptimizerConfig, make_optimizer
from dolmen.parallel import data
from dolmen.training.state import NewRows, TrainState
from dolmen.training.step import optimizer_step

VOCABULARY, LENGTH, ROWS, STEPS, SEED = 71, 8, 16, 3, 0  # 71 is prime: no tp divides it

SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=8,
    head_dim=8,
    initializer_range=0.1,
)
HERE = Path(__file__).parent
FAMILIES = {
    "llama": Flat(**SIZES | dict(num_key_value_heads=4, head_dim=4)),
    # head_dim is not hidden / heads, one key-value head is fewer than any tp: k and v are whole on
    # every rank
    "qwen3": Flat(**SIZES, num_key_value_heads=1, qk_norm=True),
    "gpt2": Flat(
        **SIZES | dict(head_dim=4),
        num_key_value_heads=8,
        max_position_embeddings=LENGTH + 1,
        position="learned",
        norm="layernorm",
        mlp="plain",
        activation="gelu_tanh",
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    # two of eight experts a token; coefficients fifty times the usual, so that the auxiliary
    # losses' gradients are felt
    "qwen3-moe": Flat(
        **SIZES,
        num_key_value_heads=2,
        qk_norm=True,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        router_aux_loss_coef=0.05,
        router_z_loss_coef=0.05,
    ),
}
# masks follow the logical element, not the rank: seed, step, place
DROPOUT = replace(FAMILIES["gpt2"], dropout=0.2)
# Rounding differs by layout, and Adam's g / (|g| + eps) can turn any rounding into a full step of
# lr: with eps 1e-8 a gradient element of 1e-9 changes its sign with the layout, a weight moves by
# 2e-2, and raw gradients of the next step differ by up to 4e-4 though the text is right. That is
# the optimizer, not the layout: in fp64 the same runs agree to 1e-13 with eps 1e-8 (test_double).
# eps 1e-3, about the median of a clipped gradient element, bounds the amplification by lr / eps =
# 10; an initializer_range of 0.1 (0.02 suits a width of 4,096, not of 32) gives q, k and gate
# gradients of the others' size. Measured worst over all rows: gradient 6.1e-6, norm 2e-7, loss
# 2e-7.
OPTIMIZER = OptimizerConfig(lr=1e-2, schedule="constant", clip=0.25, eps=1e-3)
NEXT_TOKEN = CrossEntropy()


@dataclass(frozen=True)
class Layout(layouts.Layout):
    """How the run is split, into how many microbatches a step, and as what the table says it."""

    dp: int = 1
    zero: int = 0
    accumulation: int = 1
    words: str = "one"
    short: tuple[str, ...] = ()

    @staticmethod
    def of(words: str) -> "Layout":
        """From words: `pp2 dp2 interleaved v2 acc4 sp zero3 gather | llama gpt2`; after the bar the
        families whose row is in the short tier.
        """
        names = {"acc": "accumulation", "v": "virtual_stages", "layers": "recompute_layers"}
        words, _, short = (part.strip() for part in words.partition("|"))
        given = {"words": words, "short": tuple(short.split())}
        for word in words.split():
            if number := re.fullmatch(r"(tp|cp|pp|dp|ep|zero|acc|v|layers)(\d+)", word):
                given[names.get(number[1], number[1])] = int(number[2])
            elif word == "sp":
                given["sequence_parallel"] = True
            elif word in ("ring", "gather"):
                given["context"] = word
            elif word == "fixed":
                given["reduction"] = word
            elif word in ("selective", "full"):
                given["recompute"] = word
            else:
                given["schedule"] = str(HERE / word) if word.endswith(".txt") else word
        return Layout(**given)

    def __str__(self) -> str:
        return self.words

    @property
    def families(self) -> list[str]:
        """Experts where they are split; elsewhere also a tied GPT-2 and a Llama, and one key-value
        head where tp splits heads.
        """
        if self.ep > 1:
            return ["qwen3-moe"]
        return ["llama", "gpt2", "qwen3-moe"] + ["qwen3"] * (self.tp > 1 and self.world <= 4)


# Rows of the short tier stand after the bar. They are chosen so that each word of the table, each
# pair of axes and each axis with each family that has the row appears in one (test_golden.py holds
# them to it).
LAYOUTS = tuple(
    Layout.of(line)
    for line in """
    acc4                            | llama
    zero3 acc4                      |
    acc2 full                       | gpt2 qwen3-moe
    zero1 acc4 zero-bubble          | llama

    dp2                             | gpt2
    dp2 zero1 acc4                  | llama
    dp2 zero2 acc4                  | qwen3-moe
    dp2 zero3                       | gpt2
    tp2                             | gpt2 qwen3
    tp2 sp zero1 acc4               | llama
    tp2 sp zero1 full               | qwen3-moe
    tp2 sp acc4 zero-bubble         | llama
    cp2                             | llama gpt2
    cp2 gather zero3 acc4           | qwen3-moe
    pp2 acc4                        | llama
    pp2 acc4 gpipe                  | qwen3-moe
    pp2 acc4 interleaved v2 zero1   | llama
    pp2 acc4 zero-bubble            | gpt2
    pp2 acc4 zero-bubble-v v2 zero2 | gpt2
    pp2 acc4 searched.txt v2        | llama
    dp2 ep2 zero1                   | qwen3-moe
    cp2 ep2 zero2 acc2              | qwen3-moe

    dp4 zero3 acc4                  | llama
    tp4                             | qwen3
    tp4 sp zero1                    |
    cp4                             | llama
    cp4 gather zero1 full           | gpt2
    pp4 acc4                        |
    pp4 acc8 zero-bubble            | gpt2
    dp2 tp2 zero2 acc4              | gpt2
    dp2 tp2 sp zero3                | llama qwen3
    cp2 tp2 sp acc4                 | qwen3
    cp2 dp2 zero3 full              | llama
    cp2 pp2 acc4 zero1              | gpt2
    pp2 dp2 acc4 zero3              | llama
    pp2 dp2 acc4 zero3 zero-bubble  |
    pp2 dp2 acc4 zero1 interleaved v2 full layers1 | gpt2
    pp2 tp2 sp acc4 interleaved v2  | qwen3 qwen3-moe
    dp4 ep2 zero1                   |
    dp4 ep4 zero3 acc2              | qwen3-moe
    dp2 tp2 sp ep2 zero2            | qwen3-moe
    cp2 dp2 ep4 zero1               | qwen3-moe
    pp2 dp2 ep2 acc4 zero-bubble zero1 | qwen3-moe

    dp2 tp2 sp zero3 acc4 fixed     | llama
    cp2 tp2 zero2 fixed             | gpt2
    dp4 ep2 zero1 fixed             | qwen3-moe
    pp2 dp2 acc4 zero1 fixed        |

    dp2 tp4 sp zero3                |
    pp2 dp2 tp2 sp acc4 zero3       |
    pp2 cp2 tp2 sp acc4 zero1 full  |
    pp4 dp2 acc4 zero2              |
    dp2 cp2 tp2 sp zero2            |
    pp2 dp2 cp2 acc4 zero1 zero-bubble |
    cp4 tp2 gather sp acc2          |
    pp2 dp2 tp2 sp ep2 acc4 zero1 interleaved v2 |
    dp2 cp2 tp2 ep4 zero3           |
""".splitlines()
    if line.strip()
)


def batches(
    mesh: Mesh,
    seed: int = SEED,
    documents: bool = False,
    prefixes: bool = False,
    streams: int = 0,
) -> list[Batch]:
    """This rank's part of each step's batch. The first 3 r mod 11 labels of row r are IGNORED:
    ranks and microbatches hold unequal counts of real tokens, and row 10, a microbatch of its own
    where dp 4 accumulates 4, holds none. `documents`: one ends after each fourth token or so, and
    attention stays inside. `prefixes`: each has one, of no token to seven. `streams`: so many of
    positions, which begin anew in each document.
    """
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, 4096).astype(np.uint16)
    mixture = Mixture(
        [Part("noise", 1, TokenStream.from_ranges(tokens, np.array([0]), np.array([4096])))],
        LENGTH,
        seed,
    )
    rows = ROWS // mesh.dp.size
    out = []
    for step in range(STEPS):
        batch = Batch.from_windows(mixture.windows(step * ROWS + mesh.dp.rank * rows, rows))
        ignored = (torch.arange(rows) + mesh.dp.rank * rows) * 3 % 11
        made = Batch(
            batch.tokens,
            torch.where(torch.arange(LENGTH) < ignored[:, None], IGNORED, batch.labels),
            Documents.from_starts(document_starts(batch.tokens % 4, 0)) if documents else None,
        )
        lengths = (torch.arange(rows) + mesh.dp.rank * rows) * 5 % 8
        made = made.add_prefixes(lengths[:, None]) if prefixes else made
        out.append(made.add_positions(streams) if streams else made)
    return out


@dataclass
class Run:
    """What a run leaves: per step the gradients by name (DTensors, or whole tensors of one
    process), their norm, the loss and what else the objective tells.
    """

    gradients: list[dict[str, torch.Tensor]]
    norms: list[float]
    losses: list[float]


def start(
    config: Flat | Tiny,
    mesh: Mesh,
    layout: Layout,
    optimizer: OptimizerConfig = OPTIMIZER,
    dtype: torch.dtype = torch.float32,
    compute: torch.dtype | None = None,
    seed: int = SEED,
    objective: Objective = NEXT_TOKEN,
    new_rows: NewRows | None = None,
) -> TrainState:
    """A run before its first step."""
    schedule = layout.make_schedule(ROWS, ROWS // mesh.dp.size // layout.accumulation)
    model = build(config, mesh, layout, schedule, dtype=dtype, compute=compute)
    initialize(model, seed)
    made = make_optimizer(model, optimizer, mesh)
    return TrainState(
        model,
        made,
        optimizer,
        STEPS,
        layout.zero,
        schedule,
        seed,
        objective=objective,
        new_rows=new_rows,
    )


def run(
    config: Flat | Tiny,
    mesh: Mesh,
    layout: Layout,
    steps: int = STEPS,
    documents: bool = False,
    prefixes: bool = False,
    streams: int = 0,
    seed: int = SEED,
    **options,
) -> Run:
    """`steps` updates of the real step function; `options` as `start` takes them."""
    train = start(config, mesh, layout, seed=seed, **options)
    return updates(train, mesh, batches(mesh, seed, documents, prefixes, streams)[:steps])


def updates(train: TrainState, mesh: Mesh, given: list[Batch]) -> Run:
    """An update with each of the batches."""
    names = {p: n for n, p in train.model.named_parameters()}
    out, norm = Run([], [], []), data.gradient_norm

    def observed(parameters, mesh, twice, squares):
        parameters = list(parameters)
        gradients = {names[p]: p.grad for p in parameters if p.grad is not None}
        # not `clone()`: of a DTensor it is dispatched, which takes a tenth of a row's time
        copies = {
            n: state.tensor_like(g, state.local_view(g).clone()) for n, g in gradients.items()
        }
        out.gradients.append(copies)
        return norm(parameters, mesh, twice, squares)

    data.gradient_norm = observed
    try:
        for batch in given:
            metrics = optimizer_step(train, batch, mesh)
            out.norms.append(metrics.grad_norm)
            out.losses += [metrics.loss, *metrics.objective.values()]
    finally:
        data.gradient_norm = norm
    return out


TOLERANCE = {"gradient": 1e-5, "norms": 1e-5, "losses": 1e-6}  # measured: see OPTIMIZER
FLOOR = 1e-3  # of the step's gradient norm: see `differences`


def differences(got: Run, want: Run) -> dict[str, tuple[float, str]]:
    """Largest differences over all steps and ranks, and where: of gradients, by the largest element
    of the true tensor; of norms and losses, relative.

    A tensor's largest element is taken to be at least FLOOR times the norm of the whole gradient:
    GPT-2's key biases shift every score of a query alike, so their true gradient is zero and what
    is computed is rounding alone.
    """
    gradient = (0.0, "")
    for step, (mine, whole) in enumerate(zip(got.gradients, want.gradients, strict=True)):
        assert mine.keys() <= whole.keys()  # a stage has its own
        for name, g in mine.items():
            scale = max(float(whole[name].abs().max()), FLOOR * want.norms[step])
            part = state.local_view(g).cpu()
            off = (
                float((part - whole[name][state.region(g)]).abs().max()) / scale
                if part.numel()
                else 0.0
            )
            gradient = max(gradient, (off, f"{name}, step {step}"))
    out = {"gradient": gradient}
    for kind in ("norms", "losses"):
        out[kind] = max(
            (abs(a / b - 1), f"step {i}")
            for i, (a, b) in enumerate(zip(getattr(got, kind), getattr(want, kind), strict=True))
        )
    everyone = [(out, set(got.gradients[0]))]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (out, set(got.gradients[0])))
    got_by_any = set.union(*(names for _, names in everyone))
    missing = [
        (math.inf, f"{name}, which has none on any rank")
        for name in want.gradients[0].keys() - got_by_any
    ]
    return {kind: max([o[kind] for o, _ in everyone] + missing) for kind in out}


ALONE: dict[str, Run] = {}


def alone(config: Flat | Tiny, **options) -> Run:
    """One process: made once for all rows that are compared with it. All ranks call it."""
    key = repr((config, sorted(options.items())))
    if key not in ALONE:
        ALONE[key] = made_once(lambda: run(config, SINGLE, Layout(), **options))
    return ALONE[key]


def compare(config: Flat | Tiny, layout: Layout, **options) -> dict[str, tuple[float, str]]:
    """One model on one layout of the joined world, against one process."""
    want = alone(config, **options)
    return differences(run(config, layout.mesh(torch.device("cpu")), layout, **options), want)


def make_row(family: str, layout: Layout, config: Flat | Tiny | None = None, full=False, **options):
    """The comparison of a family (or `config`, a variation of it) on `layout`."""
    call = partial(compare, config or FAMILIES[family], layout, **options)
    return Row(f"{layout}-{family}", layout.world, call, full)


def hold(found: dict, what: str) -> None:
    """Raises AssertionError for a difference above TOLERANCE."""
    for kind, (difference, where) in found.items():
        assert difference <= TOLERANCE[kind], (
            f"{kind} of {what} differ by {difference:.1e} at {where}"
        )
