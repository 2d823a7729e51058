"""Exact numerics: every layout and microbatch size leaves the same bits as one process. Raw
gradients, their norm and losses of three steps, and at the end weights and both moments, of odd
sizes: sequences of 24 tokens, a feed-forward width of 200, 711 rows of vocabulary in blocks of 178.
"""

import hashlib
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from spawning import Row, made_once
from table import FLOOR, OPTIMIZER, ROWS, SEED, Layout, start
from tiny_models import Flat, Tiny, build, initialize

from dolmen.core import collectives, reduction, state, transfers
from dolmen.core import mesh as meshes
from dolmen.core.consensus import gather_objects
from dolmen.core.mesh import SINGLE, Mesh
from dolmen.core.reduction import Tree
from dolmen.core.torch_private import sharding
from dolmen.data.batch import IGNORED, Batch, document_starts
from dolmen.model import layers
from dolmen.model.spec import (
    AlibiSpec,
    ClampedSwiGLU,
    LatentAttentionSpec,
    LayerRun,
    MLPSpec,
    MoESpec,
    NormSpec,
    ParallelResidual,
    PositionTable,
    RopeSpec,
    RouterSpec,
    SequentialResidual,
)
from dolmen.model.training import RouterTraining
from dolmen.ops import invariant, moe
from dolmen.ops.attention import Documents
from dolmen.ops.elementwise import ACTIVATIONS
from dolmen.ops.numerics import Exact
from dolmen.optim import optimizer
from dolmen.parallel import exact, qk_norm, tensor
from dolmen.training.step import optimizer_step

VOCABULARY, LENGTH, STEPS, LIMIT = 711, 24, 3, 4
LLAMA = Flat(
    vocab_size=VOCABULARY,
    hidden_size=68,  # dp 4 has shards of 17 and 12,036 elements, no multiples of 8
    intermediate_size=200,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=12,
    initializer_range=0.1,
)
EXACT = Tiny(LLAMA.spec, replace(LLAMA.training, exact=Exact(LIMIT, LENGTH)))
# what a Llama lacks, of all that is covered: biases, zero-centred norms on both sides of branches,
# another activation, and scales
_spec = LLAMA.spec
_norm = NormSpec(zero_centred=True)
_block = replace(
    LLAMA.block(0),
    norm=_norm,
    arrangement=SequentialResidual("sandwich", branch_scale=0.9),
    mixer=replace(LLAMA.block(0).mixer, q_bias=True, k_bias=True, v_bias=True, scale=0.2),
    mlp=replace(LLAMA.block(0).mlp, activation="gelu_tanh"),
)
GEMMA = Tiny(
    replace(
        _spec,
        embedding=replace(_spec.embedding, scale=7.3),
        runs=(replace(_spec.runs[0], blocks=(_block,)),),
        final_norm=_norm,
        head=replace(_spec.head, scale=0.7),
    ),
    EXACT.training,
)
# windows, soft caps, sinks, a head that is tied, dropout, documents of four tokens or so; by Muon
_capped = replace(
    LLAMA.block(0),
    mixer=replace(LLAMA.block(0).mixer, window=7, soft_cap=3.0, clip=2.0, sinks=True),
)
MASKED = Tiny(
    replace(
        _spec,
        runs=(replace(_spec.runs[0], blocks=(_capped, LLAMA.block(0))),),
        head=replace(_spec.head, tied=True, soft_cap=20.0),
    ),
    EXACT.training,
)
# GPT-2's learned positions, LayerNorm and biases; Qwen3's norms of queries and keys, and those by
# LayerNorm
_layer_norm = NormSpec("layernorm", bias=True)
_gpt2 = replace(
    LLAMA.block(0),
    norm=_layer_norm,
    mixer=replace(
        LLAMA.block(0).mixer,
        q_bias=True,
        k_bias=True,
        v_bias=True,
        o_bias=True,
        positions=None,
        qk_norm=NormSpec(),
    ),
    mlp=replace(LLAMA.block(0).mlp, gated=False, activation="gelu", bias=True),
)
GPT2 = Tiny(
    replace(
        _spec,
        embedding=replace(_spec.embedding, positions=PositionTable(LENGTH, 2), norm=_layer_norm),
        runs=(
            LayerRun((_gpt2, replace(_gpt2, mixer=replace(_gpt2.mixer, qk_norm=_layer_norm))), 2),
        ),
        final_norm=_layer_norm,
        head=replace(_spec.head, bias=True),
    ),
    EXACT.training,
)
# parallel blocks of one norm and of two; norms of each head (Cohere) and of all (OLMo 2); ALiBi
_cohere = replace(
    LLAMA.block(0),
    norm=NormSpec("layernorm"),
    arrangement=ParallelResidual(1),
    mixer=replace(
        LLAMA.block(0).mixer, o_bias=True, qk_norm=NormSpec("layernorm"), qk_norm_of="each head"
    ),
    mlp=replace(LLAMA.block(0).mlp, bias=True),
)
_olmo2 = replace(
    LLAMA.block(0),
    norm=NormSpec("layernorm", affine=False),
    arrangement=ParallelResidual(2),
    mixer=replace(
        LLAMA.block(0).mixer, positions=AlibiSpec(), qk_norm=NormSpec(), qk_norm_of="width"
    ),
)
PARALLEL = Tiny(replace(_spec, runs=(LayerRun((_cohere, _olmo2), 2),)), EXACT.training)
# experts and sinks: softmax, a shared expert with a gate, auxiliary losses (Qwen2-MoE); and latent
# attention, sigmoids, groups, a balance bias and a shared expert behind a dense layer
# (DeepSeek-V3), with biases and a clamped activation (GPT-OSS)
_softmax = MoESpec(
    8,
    2,
    40,
    router=RouterSpec(aux_loss_coef=0.05),
    shared=MLPSpec(24),
    shared_gate=True,
)
_sparse = replace(LLAMA.block(0), mixer=replace(LLAMA.block(0).mixer, sinks=True), mlp=_softmax)
MIXTURE = Tiny(
    replace(_spec, runs=(LayerRun((_sparse,), 3),)),
    replace(EXACT.training, router=RouterTraining(z_loss_coef=0.05)),
)
_sigmoid = MoESpec(
    12,
    4,
    24,
    ClampedSwiGLU(1.702, 0.5),
    RouterSpec("sigmoid", True, 2.5, 4, 2, "top2", logit_bias=True),
    shared=MLPSpec(40),
    bias=True,
)
_latent = LatentAttentionSpec(12, None, 24, 8, 12, NormSpec(), RopeSpec(4))
_latents = replace(_latent, q_rank=20, down_bias=True, o_bias=True)
DEEPSEEK = Tiny(
    replace(
        _spec,
        runs=(
            LayerRun((replace(LLAMA.block(0), mixer=_latent),), 1),
            LayerRun((replace(LLAMA.block(0), mixer=_latents, mlp=_sigmoid),), 2),
        ),
    ),
    replace(EXACT.training, router=RouterTraining(balance="bias", bias_rate=0.1)),
)
DROPPED = Tiny(MASKED.spec, replace(EXACT.training, dropout=0.2))


def cut(config: Tiny) -> Tiny:
    """The same with sequences cut for context parallelism over up to four ranks."""
    return Tiny(config.spec, replace(config.training, exact=Exact(LIMIT, LENGTH, 4)))


# AdamW's own eps: where g is about eps, a gradient's last bit is a step of lr
UPDATE = replace(OPTIMIZER, eps=1e-8)
MUONS = (MASKED, cut(MASKED), DEEPSEEK, cut(DEEPSEEK))
OPTIMIZERS = dict.fromkeys(MUONS, replace(UPDATE, name="muon"))
DOCUMENTS = (MASKED, DROPPED, cut(MASKED), cut(DROPPED))


def batches(mesh: Mesh, steps: int, documents: bool = False) -> list[Batch]:
    """This rank's rows of each step's batch; the first 3 r mod 11 labels of row r are IGNORED, so
    that counts are no powers of two and ranks have unequal ones. `documents`: two of three rows
    have some, cut in other places.
    """
    rows, out = ROWS // mesh.dp.size, []
    for step in range(steps):
        seeded = torch.Generator().manual_seed(SEED + step)
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=seeded)
        ignored = torch.arange(ROWS)[:, None] * 3 % 11
        labels = torch.where(torch.arange(LENGTH) < ignored, IGNORED, tokens[:, 1:])
        mine = slice(mesh.dp.rank * rows, (mesh.dp.rank + 1) * rows)
        ends = torch.where(torch.arange(ROWS)[:, None] % 3 > 0, tokens[:, :-1] % 7, 1)
        starts = document_starts(ends, 0)[mine]
        cut = Documents.from_starts(starts) if documents and starts.any() else None
        out.append(Batch(tokens[mine, :-1].contiguous(), labels[mine], cut))
    return out


@contextmanager
def observed_gradients(train):
    """A list to which each step adds a copy of its gradients, by name, before they are clipped."""
    names = {p: n for n, p in train.model.named_parameters()}
    found, norm = [], exact.gradient_norm

    def observe(parameters, mesh, leaves):
        grads = {names[p]: p.grad for p in parameters}
        found.append(
            {n: state.tensor_like(g, state.local_view(g).clone()) for n, g in grads.items()}
        )
        return norm(parameters, mesh, leaves)

    exact.gradient_norm = observe
    try:
        yield found
    finally:
        exact.gradient_norm = norm


def run(mesh: Mesh, layout: Layout, config: Tiny = EXACT, steps: int = STEPS, **options) -> dict:
    """What a run leaves, by name: numbers of each step, and tensors, this rank's part of each."""
    train = start(config, mesh, layout, **{"optimizer": OPTIMIZERS.get(config, UPDATE)} | options)
    found = {}
    with observed_gradients(train) as gradients:
        documents = config in DOCUMENTS
        for step, batch in enumerate(batches(mesh, steps, documents)):
            metrics = optimizer_step(train, batch, mesh)
            found |= {f"loss {step}": metrics.loss, f"norm {step}": metrics.grad_norm}
            found |= {f"{name} {step}": value for name, value in metrics.router.items()}
    for step, each in enumerate(gradients):
        found |= {f"gradient {step}/{name}": g for name, g in each.items()}
    return found | train.tensors()


def differences(got: dict, want: dict) -> list[str]:
    """The names of what differs in a bit, on any rank; and of tensors that no rank has."""
    found = []
    for name, value in got.items():
        if isinstance(value, float):
            same = value == want[name]
        else:
            same = torch.equal(state.local_view(value), want[name][state.region(value)])
        found += [] if same else [name]
    mine = found, list(got)
    everyone = gather_objects(mine) if dist.is_initialized() else [mine]
    missing = set(want).difference(*(names for _, names in everyone))
    return sorted(missing.union(*(names for names, _ in everyone)))


ALONE = {}


def alone(config: Tiny, steps: int) -> dict:
    """One process, of one microbatch; made once."""
    if (config, steps) not in ALONE:
        whole = made_once(lambda: run(SINGLE, Layout(), config, steps))
        found = {n: v if isinstance(v, float) else v.detach() for n, v in whole.items()}
        ALONE[config, steps] = found
    return ALONE[config, steps]


def compare(layout: Layout, config: Tiny = EXACT, steps: int = STEPS) -> list[str]:
    want = alone(config, steps)
    return differences(run(layout.mesh(torch.device("cpu")), layout, config, steps), want)


SHORT = """
zero1 acc4
zero1 acc8 full
zero3 acc2 selective
dp2 zero2 acc4 fixed
dp4 zero1 fixed
tp2 zero1 acc2 fixed
tp4 zero1 fixed
tp4 sp zero1 acc2 fixed
tp2 sp zero3 acc2 full fixed
pp2 acc4 zero1 fixed
pp2 acc4 zero-bubble zero1 fixed
dp2 tp2 zero3 acc2 fixed
"""
FULL = """
dp4 zero3 acc4 fixed
dp2 zero3 fixed
tp4 sp zero1 fixed
tp2 acc4 zero-bubble zero1 fixed
pp2 acc4 gpipe zero3 fixed
pp2 acc4 interleaved v2 zero1 fixed
pp2 acc4 zero-bubble-v v2 zero2 fixed
pp4 acc8 zero-bubble zero1 fixed
pp2 dp2 acc4 zero3 fixed
pp2 tp2 sp acc4 zero1 fixed
dp2 tp2 sp zero3 acc4 fixed
pp2 dp2 tp2 sp acc4 zero3 full fixed
dp2 tp4 sp zero2 acc2 fixed
"""


GEMMAS = """
tp4 sp zero1 acc2 fixed
pp2 dp2 zero3 acc4 zero-bubble full fixed
"""
MASKS = """
zero1 acc8 selective
tp2 sp zero1 acc2 fixed
dp2 zero3 acc2 fixed
pp2 acc4 zero-bubble zero1 fixed
"""
DROPS = """
dp2 tp2 zero2 acc2 full fixed
pp2 acc8 zero1 fixed
"""
# each under tp, with and without sequence parallelism, dp and pp
WHOLE_NORMS = """
zero1 acc8
tp4 zero1 acc2 fixed
"""
CUT_NORMS = """
tp2 sp zero3 acc2 full fixed
pp2 acc4 zero-bubble zero1 fixed
"""
NORMS = WHOLE_NORMS + CUT_NORMS
NORMS_FULL = """
dp4 zero3 acc2 fixed
tp4 sp zero1 acc2 selective fixed
pp2 dp2 tp2 sp acc4 zero3 full fixed
"""
EP = """
dp2 ep2 zero2 acc4 fixed
dp4 ep2 zero3 acc2 full fixed
dp4 ep4 zero1 fixed
pp2 dp2 ep2 acc4 zero-bubble zero1 fixed
dp2 tp2 sp ep2 zero3 acc4 fixed
dp4 tp2 ep2 zero1 acc2 selective fixed
"""
EXPERTS_SHORT = """
dp2 ep2 zero3 acc2 full fixed
tp4 sp zero1 acc2 fixed
"""
EXPERTS = """
zero1 acc8
dp2 zero3 acc2 fixed
pp2 acc4 zero-bubble zero1 fixed
"""
EXPERTS_FULL = """
tp4 sp zero1 acc2 selective fixed
zero1 acc8 selective
dp4 zero2 fixed
tp2 zero1 acc4 full fixed
dp2 tp2 sp zero3 acc4 fixed
pp2 dp2 tp2 sp acc4 zero3 full fixed
"""
LONG = """
dp2 tp2 sp zero3 acc4 fixed
"""
# a microbatch of one sequence for each of 16 rows, where cp splits them
CONTEXT = """
cp2 gather acc16 zero1 fixed
"""
CONTEXT_DP = """
cp2 dp2 gather acc8 zero3 full fixed
"""
CONTEXT_FULL = """
acc4 zero1
dp2 zero2 acc2 fixed
tp2 sp zero3 acc2 fixed
cp4 gather acc16 zero2 fixed
cp2 tp2 gather acc16 zero1 fixed
cp2 tp2 sp gather acc16 zero3 selective fixed
pp2 cp2 gather acc16 zero-bubble zero1 fixed
pp2 cp2 dp2 gather acc8 zero2 fixed
"""
CONTEXT_TP = """
cp2 tp2 sp gather acc16 zero3 fixed
"""
CONTEXT_OTHERS = """
cp4 gather acc16 zero1 fixed
pp2 cp2 gather acc16 zero-bubble zero1 fixed
"""


def rows(lines: str, name: str = "llama", full: bool = False, **options) -> list[Row]:
    layouts = [Layout.of(line) for line in lines.split("\n") if line]
    return [
        Row(f"{one}-{name}", one.world, partial(compare, one, **options), full) for one in layouts
    ]


LAYOUTS = [
    *rows(SHORT),
    *rows(FULL, full=True),
    *rows(GEMMAS, "variation", config=GEMMA),
    *rows(MASKS, "masks, tied, Muon", config=MASKED),
    *rows(DROPS, "dropout", config=DROPPED),
    *rows(NORMS, "norms, biases, positions", config=GPT2),
    *rows(NORMS_FULL, "norms, biases, positions", full=True, config=GPT2),
    *rows(CUT_NORMS, "parallel blocks", config=PARALLEL),
    *rows(WHOLE_NORMS, "parallel blocks", full=True, config=PARALLEL),
    *rows(NORMS_FULL, "parallel blocks", full=True, config=PARALLEL),
    *rows(EXPERTS_SHORT, "experts", config=MIXTURE),
    *rows(EXPERTS, "experts", full=True, config=MIXTURE),
    *rows(EXPERTS_SHORT + EXPERTS, "latents, experts in groups", full=True, config=DEEPSEEK),
    *rows(EXPERTS_FULL + EP, "experts", full=True, config=MIXTURE),
    *rows(EXPERTS_FULL + EP, "latents, experts in groups", full=True, config=DEEPSEEK),
    *rows(LONG, "llama, 50 steps", full=True, steps=50),
    *rows(CONTEXT, "llama, chunks", config=cut(EXACT)),
    *rows(CONTEXT_DP + CONTEXT_FULL, "llama, chunks", full=True, config=cut(EXACT)),
    *rows("dp2 ep2 zero2 acc2 fixed", "experts, chunks", full=True, config=cut(MIXTURE)),
    *(
        row
        for name, config in {
            "variation": GEMMA,
            "masks, tied, Muon": MASKED,
            "dropout": DROPPED,
            "norms, biases, positions": GPT2,
            "parallel blocks": PARALLEL,
            "experts": MIXTURE,
            "latents, experts in groups": DEEPSEEK,
        }.items()
        for row in rows(
            CONTEXT_OTHERS + CONTEXT_TP, f"{name}, chunks", full=True, config=cut(config)
        )
    ),
]


@pytest.mark.parametrize("row", [row.parameter for row in LAYOUTS])
def test_every_layout_has_the_bits_of_one_process(row, result):
    assert result(row) == []


@pytest.mark.parametrize(
    "config",
    [GPT2, PARALLEL, MIXTURE, DEEPSEEK, cut(PARALLEL), cut(MIXTURE)],
    ids=[
        *("norms, biases, positions", "parallel", "experts", "latents, experts in groups"),
        *("parallel, chunks", "experts, chunks"),
    ],
)
def test_exact_numerics_differ_from_fast_by_rounding(config):
    """Losses, norms and first moments, a tenth of the first gradients."""
    got = run(SINGLE, Layout(), config, steps=1, optimizer=UPDATE)
    want = run(SINGLE, Layout(), Tiny(config.spec, replace(config.training, exact=None)), steps=1)
    for name, value in want.items():
        if isinstance(value, float):
            assert got[name] == pytest.approx(value, rel=1e-6)
        elif name.startswith("exp_avg/"):
            # true gradients of biases of keys are 0: see table.py
            scale = max(float(value.abs().max()), FLOOR * 0.1 * want["norm 0"])
            assert float((got[name] - value).abs().max()) < 1e-5 * scale, name


@pytest.mark.parametrize("exact_attention", [True, False])
def test_documents_of_other_sequences_change_nothing(exact_attention):
    """Rows of 200 tokens together and by themselves; a batch's attention alone does change."""
    model, length = build(MASKED, SINGLE), 200
    initialize(model, SEED)
    for block in model.layers.values():
        block.attn.scores.exact = Exact(1, length) if exact_attention else None
    seeded = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(VOCABULARY, (3, length), generator=seeded)
    ends = torch.where(torch.arange(3)[:, None] == 1, 1, tokens % 90)
    starts = document_starts(ends, 0)
    with torch.no_grad():
        together = model(tokens, documents=Documents.from_starts(starts)).view(3, length, -1)
        same = [
            torch.equal(
                model(one, documents=Documents.from_starts(cut) if cut.any() else None), row
            )
            for one, cut, row in zip(tokens.split(1), starts.split(1), together, strict=True)
        ]
    assert all(same) == exact_attention


def swapped(tree_add):
    """A tree that takes leaf 1 for leaf 2."""

    def add(tree, index, leaf):
        return tree_add(tree, {1: 2, 2: 1}.get(index, index) if tree.leaves == 4 else index, leaf)

    return add


def last_first(parts):
    """The sum over ranks by a tree that begins at the last."""
    return reduction.tree_sum(parts.roll(1, 0))


ADAMW, ADD = optimizer._adamw, Tree.add
END_BACKWARD = exact.ExactReduction.end_backward


def add_to_embedding(reduction, micro, last):
    """End a backward after the gradient of a tied head has joined that of the embedding."""
    for _, weight in reduction.copies:
        if weight.grad is not None:
            holders = reduction._gradient_holders()
            embedding = next(p for name, p in holders if name == "embed.weight")
            embedding.grad.add_(weight.grad)
            weight.grad = None
    END_BACKWARD(reduction, micro, last)


def add_before_leaving(xs, linears, tp):
    """Sums of products, those of a rank added first."""
    parts = [tensor.part_of_rows(x, one, tp) for x, one in zip(xs, linears, strict=True)]
    y = tp.leave(sum(parts))
    for one in linears:
        y = y if one.bias is None else tensor.add_bias(y, one.bias, tp.exact.token_leaf)
    return y


def reversed_within_experts(experts, number):
    """The order of pairs by expert, of an expert's the last token first."""
    pairs, places, counts = SORT(experts, number)
    pairs = torch.cat([part.flip(0) for part in pairs.split(counts.tolist())])
    return moe.ExpertOrder(pairs, moe.inverse(pairs), counts)


def one_leaf(g, x, leaves):
    """The sum over the rows of an expert in one product."""
    return SUM_LEAVES(g, x, [len(g)])


def neighbours_swapped(g, x, leaves):
    """The tree over an expert's leaves, its second and third exchanged."""
    order = [0, 2, 1, *range(3, len(leaves))]
    gs, xs = (None if t is None else torch.cat([t.split(leaves)[i] for i in order]) for t in (g, x))
    return SUM_LEAVES(gs, xs, [leaves[i] for i in order])


class ChunksLast(exact.ExactReduction):
    """Ranks of cp added by FSDP, when each has added its parts of all sequences."""

    def _sum_over_cp(self, gradient):
        return gradient

    def _widen_part(self, part, shape):
        return part


MEANS, SORT, SUM_LEAVES = qk_norm._means, moe.sort, invariant.sum_leaves
BOTH = ("a factor rounded before sums",)  # one process, too, and in it as often
# a row, and what is damaged there: the row is to differ in a bit
DAMAGES = {
    "sequences swapped": ("zero1 acc4", Tree, "add", swapped(Tree.add)),
    "ranks swapped": ("tp4 zero1 fixed", transfers, "tree_sum", last_first),
    "ranks of dp swapped": ("dp4 zero1 fixed", transfers, "tree_sum", last_first),
    "torch's SiLU": ("tp4 zero1 fixed", invariant, "ACTIVATIONS", ACTIVATIONS),
    "torch's sum over tokens": (
        "zero1 acc4",
        invariant,
        "sum_tokens",
        lambda rows, leaf: rows.sum(0),
    ),
    "heads and width in one sum": (
        "tp2 zero1 acc2 fixed",
        exact.LeafProduct,
        "from_cut",
        lambda *_: exact.LeafProduct(LENGTH),
    ),
    "tokens in one sum": (
        "zero1 acc4",
        invariant,
        "weight_gradient",
        lambda g, x, leaf: invariant.product(g.t(), x),
    ),
    "exponentials in one sum": (
        "tp2 zero1 acc2 fixed",
        invariant,
        "sum_blocks",
        lambda x, block: x.sum(-1),
    ),
    "a factor rounded before sums": (
        "zero1 acc4",
        Tree,
        "add",
        lambda tree, index, leaf: ADD(tree, index, leaf * 0.3),
    ),
    "the fused AdamW": (
        "dp4 zero1 fixed",
        optimizer,
        "_adamw",
        lambda trained, leaves, config, fused: ADAMW(trained, leaves, config),
    ),
    "a tied head in the embedding's tree": (
        "zero1 acc4",
        exact.ExactReduction,
        "end_backward",
        add_to_embedding,
        MASKED,
    ),
    "torch's LayerNorm": (
        "zero1 acc8",
        layers,
        "layer_norm",
        lambda x, weight, bias, eps, sum_rows: F.layer_norm(x, weight.shape, weight, bias, eps),
        GPT2,
    ),
    "heads after sequences": (
        "zero1 acc8",
        exact,
        "sum_heads",
        lambda x, **of: invariant.add_pairs(exact.sum_sequences(x, of["exact"]), 0),
        GPT2,
    ),
    "torch's sum of an output bias": (
        "zero1 acc8",
        tensor,
        "add_bias",
        lambda y, bias, leaf: y + bias,
        GPT2,
    ),
    "torch's sum of positions": (
        "zero1 acc2",
        layers.PositionEmbedding,
        "forward",
        lambda table, positions: F.embedding(positions + table.offset, table.weight),
        GPT2,
    ),
    "branches added before ranks": (
        "tp2 sp zero3 acc2 full fixed",
        tensor,
        "rows",
        add_before_leaving,
        PARALLEL,
    ),
    "the width of a rank's heads in one sum": (
        "tp2 sp zero3 acc2 full fixed",
        qk_norm,
        "_means",
        lambda parts, tp: MEANS(parts, replace(tp, exact=None)),
        PARALLEL,
    ),
    "rows of an expert in another order": (
        "zero1 acc8",
        moe,
        "sort",
        reversed_within_experts,
        MIXTURE,
    ),
    "rows of an expert in one product": (
        "zero1 acc8",
        invariant,
        "sum_leaves",
        one_leaf,
        MIXTURE,
    ),
    "sequences of an expert swapped": (
        "zero1 acc4",
        invariant,
        "sum_leaves",
        neighbours_swapped,
        MIXTURE,
    ),
    "few rows of an expert, not padded": ("zero1 acc8", invariant, "LEAST", 1, MIXTURE),
    "ranks of cp swapped": (
        "cp4 gather acc16 zero1 fixed",
        transfers,
        "tree_sum",
        last_first,
        cut(EXACT),
    ),
    "chunks after sequences": (
        "cp2 gather acc16 zero1 fixed",
        exact,
        "ExactReduction",
        ChunksLast,
        cut(EXACT),
    ),
    "chunks of a sequence in one sum": ("zero1 acc4", Exact, "leaf", LENGTH, cut(EXACT)),
    "squares off the grid": (
        "dp4 zero1 fixed",
        exact,
        "exact_sum",
        lambda x, mesh: collectives.reduce_scalar(x.float().sum(), mesh.world).double(),
    ),
}
HALF = """
zero1 acc8 full
dp2 zero2 acc4 fixed
tp2 zero1 acc2 fixed
tp4 sp zero3 acc2 fixed
pp2 acc4 zero-bubble zero1 fixed
"""
HALF_FULL = """
dp4 zero3 acc2 fixed
pp2 tp2 sp acc4 zero1 fixed
dp2 tp2 sp zero3 acc4 selective fixed
pp2 dp2 acc4 zero-bubble-v v2 zero2 fixed
"""


def digests(layout: Layout, config: Tiny = EXACT, steps: int = STEPS) -> dict[str, float | str]:
    """What `run` leaves in bf16, of all ranks: numbers, and digests of whole tensors."""
    mesh = layout.mesh(torch.device("cpu"))
    found = {
        name: value
        if isinstance(value, float)
        else hashlib.sha256(state.gather_full(value).detach().numpy().tobytes()).hexdigest()
        for name, value in run(mesh, layout, config, steps, compute=torch.bfloat16).items()
    }
    return {name: value for each in gather_objects(found) for name, value in each.items()}


@cache
def alone_in_half(config: Tiny, steps: int) -> dict[str, float | str]:
    """One process, in a group of its own: without one there is no FSDP, and so no bf16."""
    with meshes.process_group_context(None, torch.device("cpu")):
        return digests(Layout.of("zero1"), config, steps)


def half_rows(lines: str, name: str, full: bool = False, **options) -> list[Row]:
    layouts = [Layout.of(line) for line in lines.split("\n") if line]
    return [
        Row(f"{one}-{name}", one.world, partial(digests, one, **options), full) for one in layouts
    ]


HALVES = [
    *half_rows(HALF, "llama"),
    *half_rows(HALF_FULL, "llama", full=True),
    *half_rows(GEMMAS, "variation", config=GEMMA),
    *half_rows(MASKS, "masks, tied, Muon", full=True, config=MASKED),
    *half_rows(NORMS, "norms, biases, positions", full=True, config=GPT2),
    *half_rows(WHOLE_NORMS, "parallel blocks", config=PARALLEL),
    *half_rows(CUT_NORMS, "parallel blocks", full=True, config=PARALLEL),
    *half_rows(EXPERTS + EXPERTS_FULL + EP, "experts", full=True, config=MIXTURE),
    *half_rows(
        EXPERTS + EXPERTS_FULL + EP, "latents, experts in groups", full=True, config=DEEPSEEK
    ),
    *half_rows(LONG, "llama, 50 steps", full=True, steps=50),
    *half_rows(CONTEXT + CONTEXT_DP, "llama, chunks", full=True, config=cut(EXACT)),
    # not over tp 2: a product of a bf16 chunk of 3 tokens and two heads is another than of many;
    # runs refuse chunks of under 16 tokens
    *half_rows(CONTEXT_OTHERS, "masks, tied, Muon, chunks", full=True, config=cut(MASKED)),
    *half_rows(
        CONTEXT + CONTEXT_DP, "norms, biases, positions, chunks", full=True, config=cut(GPT2)
    ),
]


@pytest.mark.parametrize("row", [row.parameter for row in HALVES])
def test_every_layout_has_the_bits_of_one_process_in_bf16(row, result):
    options = row.call.keywords
    want = alone_in_half(options.get("config", EXACT), options.get("steps", STEPS))
    got = result(row)
    assert got.keys() == want.keys()
    assert [name for name in want if got[name] != want[name]] == []


# what is damaged in bf16 alone: the row is to differ from one process, damaged too
HALF_DAMAGES = {
    "nodes rounded": (
        "tp2 zero1 acc2 fixed",
        invariant,
        "sum_of_products",
        lambda pairs, leaves: SUM_OF_PRODUCTS(pairs, leaves).bfloat16(),
    ),
    "gradients rounded": ("zero1 acc4", sharding, "widen_gradient", lambda record: None),
    "sums over tokens rounded": (
        "tp2 sp zero3 acc2 full fixed",
        invariant,
        "sum_tokens",
        lambda rows, leaf: SUM_TOKENS(rows, leaf).bfloat16(),
    ),
}
SUM_OF_PRODUCTS, SUM_TOKENS = invariant.sum_of_products, invariant.sum_tokens


def digests_damaged(name: str, layout: Layout) -> dict[str, float | str]:
    """The first step in bf16 with one damage."""
    _, owner, attribute, value = HALF_DAMAGES[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, attribute, value)
        return digests(layout, GEMMA, steps=1)


HALF_CONTROLS = [
    Row(name, (layout := Layout.of(words)).world, partial(digests_damaged, name, layout))
    for name, (words, *_) in HALF_DAMAGES.items()
]


@pytest.mark.parametrize("row", [row.parameter for row in HALF_CONTROLS])
def test_a_broken_sum_in_bf16_is_seen(row, result):
    with meshes.process_group_context(None, torch.device("cpu")):
        want = digests_damaged(row.name, Layout.of("zero1"))
    assert result(row) != want


SHORT_DAMAGES = ("sequences swapped", "ranks swapped", "torch's SiLU", "torch's LayerNorm")


def compare_damaged(name: str) -> list[str]:
    """The first step with one damage, against one process without, or with it (BOTH)."""
    words, owner, attribute, value, *other = DAMAGES[name]
    config = other[0] if other else EXACT
    layout, want = Layout.of(words), alone(config, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, attribute, value)
        want = run(SINGLE, Layout(), steps=1) if name in BOTH else want
        mesh = layout.mesh(torch.device("cpu"))
        return differences(run(mesh, layout, config, steps=1), want)


def compare_fixed() -> list[str]:
    """Sums over ranks in a fixed order alone, without exact numerics, against one process."""
    layout = Layout.of("tp2 zero1 fixed")
    fast = Tiny(LLAMA.spec, LLAMA.training)
    want = made_once(lambda: run(SINGLE, Layout(), fast, steps=1))
    return differences(run(layout.mesh(torch.device("cpu")), layout, fast, steps=1), want)


CONTROLS = [Row("reduction fixed alone", 2, compare_fixed)] + [
    Row(name, Layout.of(words).world, partial(compare_damaged, name), name not in SHORT_DAMAGES)
    for name, (words, *_) in DAMAGES.items()
]


@pytest.mark.parametrize("row", [row.parameter for row in CONTROLS])
def test_a_broken_sum_is_seen(row, result):
    assert result(row) != []
