"""What a layer keeps between forward and backward, to the byte: closed forms (2205.05198 eq. 1-6)
equal what is alive.

The model runs on rank 0 of a fake process group of 8, on meta tensors, which have storages but no
memory. What counts is every storage made in forward that is alive after it, whoever holds it:
autograd, a context's attribute, a module. Per layer means (3 layers) - (2 layers), so that
embedding, head and what all layers share fall out.
"""

import math
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fakes import join_fake
from tiny_models import Flat, Tiny, decoder, initialize, tiny, with_num_layers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from dolmen.core import mesh as meshes
from dolmen.core import state
from dolmen.core.mesh import SINGLE
from dolmen.model.count import activation_bytes_per_layer
from dolmen.model.decoder import Decoder
from dolmen.model.head import cross_entropy_function
from dolmen.model.layout import Layout
from dolmen.model.mlp import MLP
from dolmen.model.split import split_model
from dolmen.model.training import Training
from dolmen.ops.elementwise import Noise
from dolmen.ops.kernels import Kernels
from dolmen.parallel.tensor import Deferred

WORLD, BATCH, LENGTH, HIDDEN, HEADS, FFN = 8, 2, 32, 64, 8, 160
TOKENS = BATCH * LENGTH
SIZES = dict(
    vocab_size=128,
    hidden_size=HIDDEN,
    num_attention_heads=HEADS,
    head_dim=HIDDEN // HEADS,
    max_position_embeddings=LENGTH,
)
GPT = Flat(
    **SIZES,
    num_key_value_heads=HEADS,
    intermediate_size=4 * HIDDEN,
    position="learned",
    norm="layernorm",
    mlp="plain",
    activation="gelu",
    attention_bias=True,
    output_bias=True,
    mlp_bias=True,
    tie_word_embeddings=True,
)
DROPPED = replace(GPT, dropout=0.1)
LLAMA = Flat(**SIZES, num_key_value_heads=4, intermediate_size=FFN)
# one key-value head: whole on every rank
QWEN = replace(LLAMA, num_key_value_heads=1, qk_norm=True)
KINDS = ("none", "selective", "full")
SHORT = {(1, False), (4, True)}  # tp, and whether sequences are split: the others with --full
SPLITS = [
    pytest.param(tp, sequence, marks=[pytest.mark.full] * ((tp, sequence) not in SHORT))
    for tp, sequence in ((1, False), *((tp, sp) for tp in (4, 2, 8) for sp in (False, True)))
]


@pytest.fixture(scope="module", autouse=True)
def world():
    join_fake(WORLD, 0)
    yield
    dist.destroy_process_group()


class Alive(TorchDispatchMode):
    """Storages made in it, as long as they live."""

    def __init__(self):
        super().__init__()
        self.storages = weakref.WeakSet()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, lambda t: self.storages.add(t.untyped_storage()), out)
        return out


def make(config: Flat | Tiny, layout: Layout, device: str, dtype: torch.dtype) -> Decoder:
    mesh = meshes.build_mesh(
        WORLD // layout.tp // layout.cp, layout.tp, torch.device("cpu"), cp=layout.cp
    )
    kernels = Kernels("flash" if device == "meta" else "blocks")
    with torch.device("meta"):
        parts = split_model(mesh, config.spec.layers, layout, kernels=kernels)
        model = decoder(config, parts).to(dtype)
    state.distribute(model, model.plan(), mesh)
    if device == "cpu":
        initialize(model.to_empty(device="cpu"), 0)
    for owner in model.modules():  # plain tensors, as FSDP gathers them
        for name, p in list(owner.named_parameters(recurse=False)):
            setattr(owner, name, torch.nn.Parameter(state.local_view(p)))
    return model


def kept(
    config: Flat | Tiny,
    layout: Layout,
    length: int = LENGTH,
    batch: int = BATCH,
    device: str = "meta",
    dtype=torch.bfloat16,
) -> int:
    """Bytes alive after forward that are not parameters. On meta, attention without dropout is
    flash; on a CPU it is our own.
    """
    model = make(config, layout, device, dtype)
    parameters = {state.local_view(p).untyped_storage() for p in model.parameters()}
    with torch.device(device):
        tokens = torch.zeros(batch, length, dtype=torch.int64)
        noise = Noise(torch.tensor(1), torch.arange(batch)) if config.training.dropout else None
    with Alive() as alive:
        loss = model(tokens, cross_entropy_function(tokens), noise=noise)
        assert loss.requires_grad
        return sum(s.nbytes() for s in alive.storages if s not in parameters)


NUMBER = 8  # bytes of a layer's number, which its dropout takes as an int64 tensor


def per_layer(config: Flat | Tiny, layout: Layout, **options) -> int:
    """Bytes of one layer more, but for its number, where that is kept to be computed again."""
    two, one = (kept(with_num_layers(config, n), layout, **options) for n in (2, 1))
    numbered = config.training.dropout and layout.recompute != "none"
    return two - one - (NUMBER if numbered else 0)


def closed(
    config: Flat | Tiny,
    layout: Layout,
    length: int = LENGTH,
    batch: int = BATCH,
    dtype=torch.bfloat16,
) -> float:
    return activation_bytes_per_layer(
        config.spec,
        batch,
        length,
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        recompute=layout.recompute,
        cp=layout.cp,
        element_bytes=dtype.itemsize,
        dropout=config.training.dropout,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("t", "sequence"), SPLITS)
def test_paper(t, sequence, kind):
    """A GPT block with dropout, bf16: equations 1, 2, 4 and 6 and table 2 of 2205.05198, and the
    statistics they leave out.
    """
    s, b, h, a = LENGTH, BATCH, HIDDEN, HEADS
    quadratic = 5 * a * s / h if kind == "none" else 0
    paper = s * b * h * ((34 + quadratic) / t if sequence else 10 + 24 / t + quadratic / t)
    # two norms, mean and 1 / deviation a token, fp32
    statistics = 2 * (4 + 4) * s * b / (t if sequence else 1)
    if kind == "full":
        paper, statistics = 2 * s * b * h / (t if sequence else 1), 0
    layout = Layout(tp=t, sequence_parallel=sequence, recompute=kind)
    assert per_layer(DROPPED, layout) == paper + statistics == closed(DROPPED, layout)


RANDOM_STATE = 16  # bytes that the flash operator keeps for a dropout it does not do


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("t", "sequence"), SPLITS)
def test_fused(t, sequence, kind):
    """The attention of a GPU, without dropout: q, k, v, out, and a log-sum-exp; GPT, Llama, and
    Qwen3's norms of q and k.
    """
    layout = Layout(tp=t, sequence_parallel=sequence, recompute=kind)
    unused = RANDOM_STATE if kind == "none" else 0
    for config in (GPT, LLAMA, QWEN):
        if config.num_key_value_heads % t and config.num_key_value_heads != 1:
            continue  # whole: test_shared_heads
        assert per_layer(config, layout) == closed(config, layout) + unused
    # written out once more, for Llama
    r, h, q, kv = (t if sequence else 1, HIDDEN, HIDDEN, HIDDEN // 2)
    if kind != "full" and t <= 4:
        log_sum = 4 * HEADS / t if kind == "none" else 0
        assert closed(LLAMA, layout) == TOKENS * (
            (8 * h + 8) / r + (4 * q + 4 * kv + 8 * FFN) / t + log_sum
        )
    if kind != "full":
        # against dropout's selective form: no masks, and the log-sum-exp
        assert closed(GPT, layout) == closed(
            DROPPED, replace(layout, recompute="selective")
        ) - TOKENS * 2 * h / r + (TOKENS * 4 * HEADS / t if kind == "none" else 0)


FALCON = dict(vocab_size=128, hidden_size=HIDDEN, num_attention_heads=HEADS, num_hidden_layers=2)
SIDE_BY_SIDE = {
    "one norm": tiny("falcon", **FALCON),
    "two norms": tiny("falcon", **FALCON, new_decoder_architecture=True),
    "dropout": tiny("falcon", dropout=0.1, **FALCON, new_decoder_architecture=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("t", "sequence"), SPLITS)
def test_side_by_side(t, sequence, kind):
    """Attention and feed-forward layer with one input, or with two of one x: 2 s b h of norm and
    columns each, and one mask.
    """
    layout = Layout(tp=t, sequence_parallel=sequence, recompute=kind)
    for config in SIDE_BY_SIDE.values():
        fused = kind == "none" and not config.training.dropout
        assert per_layer(config, layout) == closed(config, layout) + RANDOM_STATE * fused
    r = t if sequence else 1
    if kind != "full":
        one, two = (closed(config, layout) for config in list(SIDE_BY_SIDE.values())[:2])
        kv = 2 * (HEADS // t - 1) * 2 * HIDDEN // HEADS  # of as many heads as queries
        assert two - one == TOKENS * (2 * HIDDEN + 8) / r + TOKENS * kv


SANDWICH = dict(
    vocab_size=128,
    hidden_size=HIDDEN,
    intermediate_size=FFN,
    num_attention_heads=HEADS,
    num_key_value_heads=HEADS,
    head_dim=HIDDEN // HEADS,
    num_hidden_layers=2,
    layer_types=["full_attention"] * 2,
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("t", "sequence"), SPLITS)
def test_norms_after_layers(t, sequence, kind):
    """Each keeps what it is given, 2 s b h, and its statistics."""
    layout = Layout(tp=t, sequence_parallel=sequence, recompute=kind)
    sandwich = tiny("gemma2", **SANDWICH, attn_logit_softcapping=None)
    for config in (sandwich, replace(sandwich, training=Training(0.1))):
        fused = kind == "none" and not config.training.dropout
        assert per_layer(config, layout) == closed(config, layout) + RANDOM_STATE * fused
    if kind != "full":
        pre = Tiny(tiny("gemma", **{n: v for n, v in SANDWICH.items() if n != "layer_types"}).spec)
        more = TOKENS * 2 * (2 * HIDDEN + 4) / (t if sequence else 1)
        assert closed(sandwich, layout) - closed(pre, layout) == more


POST = dict(
    vocab_size=128,
    hidden_size=HIDDEN,
    ffn_dim=4 * HIDDEN,
    num_attention_heads=HEADS,
    max_position_embeddings=LENGTH,
    do_layer_norm_before=False,
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("t", "sequence"), SPLITS[:3])
def test_norms_of_the_stream_after_layers(t, sequence, kind):
    """What they are given is kept, and what they make, which the next layer is given."""
    layout = Layout(tp=t, sequence_parallel=sequence, recompute=kind)
    post = tiny("opt", **POST)
    for config in (post, replace(post, training=Training(0.1))):
        fused = kind == "none" and not config.training.dropout
        assert per_layer(config, layout) == closed(config, layout) + RANDOM_STATE * fused


LIKE_LLAMA = {name: value for name, value in SANDWICH.items() if name != "layer_types"}
NORMS = {
    "after layers, and over the width": tiny("olmo2", **LIKE_LLAMA),
    "of each head": tiny("cohere", **LIKE_LLAMA, use_qk_norm=True),
    "layernorms": tiny(
        "phi",
        **{name: value for name, value in LIKE_LLAMA.items() if name != "head_dim"},
        qk_layernorm=True,
    ),
    "without parameters, clipped": tiny("olmo", **LIKE_LLAMA, clip_qkv=1.0),
    "scaled": tiny("granite", **LIKE_LLAMA, residual_multiplier=0.5, embedding_multiplier=2.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("t", "sequence"), SPLITS[1:3])
def test_norms_of_queries_and_keys(t, sequence, kind, norms):
    """Two numbers per token of queries and keys over their width, two per head of layernorm."""
    layout, config = Layout(tp=t, sequence_parallel=sequence, recompute=kind), NORMS[norms]
    unused = RANDOM_STATE if kind == "none" else 0
    assert per_layer(config, layout) == closed(config, layout) + unused


def test_shared_heads():
    """4 key-value heads over 8 ranks: k and v are whole at rest, and a rank multiplies one head of
    each.
    """
    for kind in KINDS:
        layout = Layout(tp=8, recompute=kind)
        assert per_layer(LLAMA, layout) == closed(LLAMA, layout) + (
            RANDOM_STATE if kind == "none" else 0
        )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_cpu(kind, dtype):
    """Real tensors. A CPU differs twice: its layer norm has statistics in the weights' dtype, and
    blockwise attention keeps its output in the order of its blocks too, which with one key-value
    head is the same order.
    """
    for config in (GPT, DROPPED, LLAMA, QWEN):
        layout = Layout(recompute=kind)
        blockwise = kind == "none" and not config.dropout and config.num_key_value_heads > 1
        want = closed(config, layout, dtype=dtype) + (
            TOKENS * HIDDEN * dtype.itemsize if blockwise else 0
        )
        if config.norm == "layernorm" and kind != "full":
            want -= TOKENS * 4 * (4 - dtype.itemsize)
        assert per_layer(config, layout, device="cpu", dtype=dtype) == want


def test_context_parallel():
    """Over cp: a ring keeps what is of the rank's own tokens; attention with dropout keeps k and v,
    and probabilities, of all keys.
    """
    for kind in KINDS:
        layout = Layout(cp=2, recompute=kind)
        assert per_layer(LLAMA, layout, device="cpu") == closed(LLAMA, layout)
        assert per_layer(DROPPED, layout) == closed(DROPPED, layout)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("selective", "full"))
def test_some_layers(kind):
    """`recompute_layers` k of 4: each one more layer saves what a layer saves; the first keeps, for
    all, the indices of dropout's rows.
    """
    four, rows = replace(DROPPED, num_hidden_layers=4), TOKENS * 8
    saved = per_layer(DROPPED, Layout(tp=2)) - per_layer(DROPPED, Layout(tp=2, recompute=kind))
    none = kept(four, Layout(tp=2))
    bytes_of = [kept(four, Layout(tp=2, recompute=kind, recompute_layers=k)) for k in range(5)]
    assert bytes_of == [none] + [none + rows - k * (saved - NUMBER) for k in range(1, 5)]


def _saved_by_autograd(self, x, *more):
    return FORWARD(self, x.float().sigmoid().to(x.dtype), *more)


def _held_by_an_attribute(self, x, *more):
    self.secret = x + 1
    return FORWARD(self, x, *more)


# and the bytes an element they keep
FORWARD, SECRETS = (MLP.forward, {_saved_by_autograd: 4, _held_by_an_attribute: 2})


@pytest.mark.slow
@pytest.mark.parametrize("secret", SECRETS, ids=lambda f: f.__name__)
def test_a_tensor_more_is_seen(monkeypatch, secret):
    """Negative control: one tensor more, whoever keeps it, is in the count; recomputing the layer
    drops autograd's alone.
    """
    honest = {kind: per_layer(DROPPED, Layout(recompute=kind)) for kind in KINDS}
    monkeypatch.setattr(MLP, "forward", secret)
    more = {kind: per_layer(DROPPED, Layout(recompute=kind)) - honest[kind] for kind in KINDS}
    one = SECRETS[secret] * TOKENS * HIDDEN
    assert more == dict(none=one, selective=one, full=0 if secret is _saved_by_autograd else one)


def gradients(config: Flat, kind: str, deferred: bool) -> dict[str, torch.Tensor]:
    """Of one batch, fp32, one process; `deferred`: weight gradients are computed after backward, as
    zero-bubble schedules do.
    """
    parts = split_model(
        SINGLE,
        config.num_hidden_layers,
        Layout(recompute=kind, recompute_layers=None if kind == "none" else 2),
    )
    if deferred:
        parts = replace(parts, tp=replace(parts.tp, later=Deferred()))
    model = decoder(config, parts)
    initialize(model, 0)
    tokens = torch.randint(
        config.vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1)
    )
    model(
        tokens,
        cross_entropy_function(tokens.roll(-1, 1)),
        noise=Noise(torch.tensor(3), torch.arange(BATCH)),
    ).backward()
    if deferred:
        products = parts.tp.later.take()
        assert products
        for product in products:
            product()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("deferred", (False, True))
@pytest.mark.parametrize("config", (DROPPED, GPT, LLAMA), ids=("gpt-dropout", "gpt", "llama"))
def test_gradients_are_the_same_bits(config, deferred):
    config = replace(config, num_hidden_layers=3, initializer_range=0.1)
    want = gradients(config, "none", deferred)
    assert all(g.abs().max() > 0 for g in want.values())
    for kind in ("selective", "full"):
        got = gradients(config, kind, deferred)
        assert all(torch.equal(got[name], g) for name, g in want.items())


LARGE = dict(
    vocab_size=128,
    hidden_size=4096,
    num_attention_heads=32,
    head_dim=128,
    max_position_embeddings=4096,
)
PAGE = Path(__file__).parents[2] / "docs/concepts/recompute.md"


@pytest.mark.slow
@pytest.mark.parametrize("name", ("GPT, dropout", "GPT", "Llama"))
def test_the_page(name):
    """The numbers of docs/concepts/recompute.md are measured: h 4096, s 4096, b 1, in MiB."""
    config = {
        "GPT, dropout": replace(DROPPED, **LARGE, num_key_value_heads=32, intermediate_size=16384),
        "GPT": replace(GPT, **LARGE, num_key_value_heads=32, intermediate_size=16384),
        "Llama": replace(LLAMA, **LARGE, num_key_value_heads=8, intermediate_size=14336),
    }[name]
    for t, sequence in ((1, False), (8, False), (8, True)):
        layouts = [Layout(tp=t, sequence_parallel=sequence, recompute=kind) for kind in KINDS]
        mib = [
            math.floor(per_layer(config, layout, length=4096, batch=1) / 2**20 + 0.5)
            for layout in layouts
        ]
        row = (
            f"| {name} | {t}{' + sp' if sequence else ''} | "
            + " | ".join(f"{m:,}" for m in mib)
            + " |"
        )
        assert row in PAGE.read_text(), row
