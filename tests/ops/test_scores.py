"""What becomes of products of queries and keys before the softmax: a scale, a soft cap, ALiBi's
slopes; and values that are longer or shorter than keys. On every road of our own blocks, in
decoding, with dropout and recomputed: against the definition in float64, closed forms, and the
functions of transformers.
"""

from dataclasses import replace

import pytest
import torch
from tiny_models import Flat, build, initialize
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BloomConfig, Gemma2Config
from transformers.models.bloom import modeling_bloom as bloom
from transformers.models.falcon import modeling_falcon as falcon
from transformers.models.gemma2 import modeling_gemma2 as gemma2

from dolmen.core.autograd import recompute
from dolmen.core.mesh import SINGLE
from dolmen.model.head import cross_entropy_function
from dolmen.ops.attention import Attend, blocks, blockwise, dropout, reference, visible
from dolmen.ops.attention.reference import CASES, KNOWN, ROADS, SCORES, definition
from dolmen.ops.attention.score_bias import alibi_key_bias, alibi_slopes, append_key_bias
from dolmen.ops.elementwise import Dropout, Noise

HERE = torch.device("cpu")
SIZES = {name: CASES[name] for name in ("another scale", "narrow values", "wide values")}
NEW = SCORES | SIZES
# as in test_attention.py
TYPES = pytest.mark.parametrize(
    "dtype, tolerance",
    [
        (torch.float64, 1e-13),
        pytest.param(torch.float32, 1e-6, marks=pytest.mark.full),
        (torch.bfloat16, 1e-2),
    ],
    ids=["64", "32", "16"],
)


@pytest.mark.slow
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", KNOWN["blocks"])
@TYPES
def test_definition(name, road, dtype, tolerance):
    found = reference.errors("blocks", KNOWN["blocks"][name], dtype, HERE, road)
    assert all(error <= tolerance for error in found.values()), found


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("soft cap", dict(soft_cap=None)),
        ("slopes", dict(slopes=None)),
        ("slopes", dict(slopes=tuple(-s for s in alibi_slopes(4)))),
        ("slopes of the last heads", dict(first_head=0)),
        ("slopes of grouped heads", dict(slopes=alibi_slopes(6)[::-1])),
        ("slopes in documents", dict(slopes=None)),
        ("another scale", dict(scale=None)),
        ("prefix", dict(mask="causal")),
        ("prefix and window", dict(mask="causal")),
        ("all at once", dict(soft_cap=20.0)),
        ("all at once", dict(scale=1.0)),
    ],
    ids=str,
)
def test_what_each_changes_is_seen(name, wrong):
    """The same errors where one thing is left out or wrong: 10^5 times the tolerance of fp32."""
    right = NEW[name]
    other = replace(right, attend=right.attend._replace(**wrong))
    got = reference.run_whole("blocks", other, torch.float64, HERE)
    for a, b in zip(got, reference.reference_gradients(right, torch.float64, HERE), strict=True):
        assert (a - b).norm() > 0.05 * b.norm()


@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_scores_of_half_precision_are_computed_in_fp32(soft_cap):
    """To the rounding of fp32 by the definition in float64, of the same rounded products."""
    qk = torch.linspace(-40, 40, 96).view(2, 3, 16).bfloat16()
    found = blocks.exponentials(qk, blocks.ScoreRule(0.25, soft_cap, None, None))
    scores = qk.double() * 0.25
    if soft_cap is not None:
        scores = soft_cap * (scores / soft_cap).tanh()
    assert found[0].dtype == torch.bfloat16
    near(found[2:], [scores.logsumexp(-1, keepdim=True)], 1e-6)


def gradients(function, *inputs):
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = function(*leaves)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


def near(got, want, tolerance):
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b.double()).norm() <= tolerance * b.double().norm()


@pytest.mark.parametrize("name", ["soft cap", "slopes of grouped heads", "all at once"])
def test_gradients_by_differences(name):
    case = replace(NEW[name], length=20, batch=1, documents=None, head_dim=3, value_dim=2)
    inputs = [t.requires_grad_() for t in case.tensors(torch.float64, HERE)[:3]]
    assert torch.autograd.gradcheck(
        lambda *t: blockwise.attention(*t, case.attend), inputs, fast_mode=True
    )


@pytest.mark.parametrize("name", NEW)
@TYPES
def test_one_query(name, dtype, tolerance):
    """The last of a text alone."""
    case = NEW[name]
    q, k, v, _ = case.tensors(dtype, HERE)
    attend = case.attend
    if case.starts is not None:
        attend = attend.with_documents(reference.spec.Documents.from_starts(case.starts[:, -1:]))
    near(
        [blockwise.attention(q[:, -1:], k, v, attend)],
        [definition(q[:, -1:].double(), k.double(), v.double(), attend)],
        tolerance,
    )


@pytest.mark.parametrize("name", NEW)
def test_in_pieces(name):
    """A prompt, more of it, then token after token, each with all keys so far: as the whole."""
    case = replace(NEW[name], documents=None)
    q, k, v, _ = case.tensors(torch.float64, HERE)
    out, first = [], 0
    for end in (100, 150, *range(151, case.length + 1)):
        new = slice(first, end)
        out.append(blockwise.attention(q[:, new], k[:, :end], v[:, :end], case.attend))
        first = end
    near([torch.cat(out, 1)], [definition(q, k, v, case.attend)], 1e-13)


@pytest.mark.parametrize("name", [n for n in SCORES if SCORES[n].heads % 2 == 0])
def test_heads_of_two_ranks_are_those_of_one(name):
    case = replace(SCORES[name], documents=None)
    q, k, v, _ = case.tensors(torch.float64, HERE)
    k, v = (t.repeat_interleave(case.heads // case.kv_heads, 2) for t in (k, v))
    n, first = case.heads // 2, case.attend.first_head
    parts = [
        blockwise.attention(
            *(t[:, :, i : i + n] for t in (q, k, v)), case.attend._replace(first_head=first + i)
        )
        for i in (0, n)
    ]
    near([torch.cat(parts, 2)], [definition(q, k, v, case.attend)], 1e-13)


@pytest.mark.parametrize("name", NEW)
@TYPES
def test_the_road_of_dropout(name, dtype, tolerance):
    """Where nothing falls out, it is the definition."""
    case = NEW[name]
    *qkv, g = case.tensors(dtype, HERE)
    leaves = [t.requires_grad_() for t in qkv]
    noise = Noise(torch.tensor(7), torch.arange(case.batch))
    attend = case.attend.with_documents(case.whole, Dropout(0.0, noise, 1))
    out = dropout.attention(*leaves, attend, torch.arange(case.length))
    assert out.dtype == dtype
    got = [out.detach(), *torch.autograd.grad(out, leaves, g)]
    near(got, reference.reference_gradients(case, dtype, HERE), tolerance)


def test_gradient_with_dropped_probabilities():
    case = replace(NEW["all at once"], length=9, documents=None, head_dim=3, value_dim=2)
    inputs = [t.requires_grad_() for t in case.tensors(torch.float64, HERE)[:3]]
    noise = Noise(torch.tensor(7), torch.arange(2))
    attend = case.attend.with_documents(None, Dropout(0.4, noise, 3))
    rows = torch.arange(9)
    assert torch.autograd.gradcheck(
        lambda *t: dropout.attention(*t, attend, rows), inputs, fast_mode=True
    )


@pytest.mark.parametrize("name", NEW)
def test_recomputed_it_has_the_same_bits(name):
    case = replace(NEW[name], documents=None)
    *qkv, g = case.tensors(torch.float32, HERE)

    def grads(call):
        leaves = [t.detach().requires_grad_() for t in qkv]
        out = call(lambda *t: blockwise.attention(*t, case.attend), *leaves)
        return [out, *torch.autograd.grad(out, leaves, g)]

    for a, b in zip(grads(recompute), grads(lambda f, *t: f(*t)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.spawn
@pytest.mark.full  # torch.compile starts a C++ compiler per kernel
@pytest.mark.parametrize("name", ["slopes of grouped heads", "soft cap", "all at once"])
def test_compiled_equals_eager(name):
    case = replace(NEW[name], length=70, documents=None)
    inputs = case.tensors(torch.float32, HERE)[:3]
    compiled = torch.compile(lambda *t: blockwise.attention(*t, case.attend), fullgraph=True)
    eager = gradients(lambda *t: blockwise.attention(*t, case.attend), *inputs)
    for a, b in zip(gradients(compiled, *inputs), eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # fp32, sums in another order


def test_slopes_alone_weigh_by_distance():
    """Where all products are 0, the key d tokens back weighs exp(-slope d)."""
    n, heads = 130, 4
    zero, v = torch.zeros(1, n, heads, 8), torch.randn(1, n, heads, 8, dtype=torch.float64)
    out = blockwise.attention(zero.double(), zero.double(), v, Attend(slopes=alibi_slopes(heads)))
    for head, i in ((0, 0), (0, 70), (3, 129)):
        back = torch.arange(i, -1, -1, dtype=torch.float64)
        weights = (-(2.0 ** (-2 * (head + 1))) * back).exp()
        expected = weights @ v[0, : i + 1, head] / weights.sum()
        torch.testing.assert_close(out[0, i, head], expected, rtol=1e-12, atol=1e-13)


def test_a_soft_cap_is_the_most_that_a_score_can_be():
    """Two keys, whose products with the second query are 1e4 and -1e4."""
    q = torch.tensor([[0.0], [1e4]], dtype=torch.float64).view(1, 2, 1, 1)
    k = torch.tensor([[1.0], [-1.0]], dtype=torch.float64).view(1, 2, 1, 1)
    out = blockwise.attention(q, k, k, Attend(soft_cap=1.5))
    assert abs(float(out[0, 1]) - torch.tensor(1.5, dtype=torch.float64).tanh()) < 1e-14
    # and one far above all scores changes nothing
    case = CASES["grouped"]
    for a, b in zip(
        reference.run_whole(
            "blocks", replace(case, attend=Attend(soft_cap=1e6)), torch.float64, HERE
        ),
        reference.run_whole("blocks", case, torch.float64, HERE),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor made."""

    elements = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        made = out if isinstance(out, (tuple, list)) else [out]
        sizes = [t.numel() for t in made if isinstance(t, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return out


@pytest.mark.parametrize("attend", [Attend(slopes=alibi_slopes(2)), Attend(soft_cap=2.0)], ids=str)
def test_nothing_is_larger_than_the_scores_of_a_block(attend, monkeypatch):
    monkeypatch.setattr(blocks, "SCORES", 2**14)

    def largest(attend):
        q, k, v = (torch.randn(1, 2048, h, 8).requires_grad_() for h in (2, 1, 1))
        with Largest() as seen:
            blockwise.attention(q, k, v, attend).sum().backward()
        return seen.elements

    assert largest(attend) == largest(Attend()) == 2 * 64 * 2048


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 12, 16, 20, 32, 71, 96, 112, 128])
def test_slopes_are_those_of_bloom_and_falcon(heads):
    """Theirs are powers in fp32 of a rounded base."""
    theirs = bloom._get_alibi_slopes(heads, HERE).double().tolist()
    assert alibi_slopes(heads) == pytest.approx(theirs, rel=1e-5)
    read = falcon.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    # Falcon's go through bf16
    assert alibi_slopes(heads) == pytest.approx(read.double().tolist(), rel=2**-8)
    assert len(alibi_slopes(heads)) == heads == len(set(alibi_slopes(heads)))


@pytest.mark.parametrize("heads", [4, 6])
def test_bloom_of_transformers(heads):
    """BLOOM's attention whole, its output projection an identity."""
    length, hidden = 150, 8 * heads
    config = BloomConfig(hidden_size=hidden, n_head=heads, n_layer=1)
    torch.manual_seed(0)
    theirs = bloom.BloomAttention(config, layer_idx=0).double().eval()
    with torch.no_grad():
        theirs.query_key_value.weight.normal_()
        theirs.dense.weight.copy_(torch.eye(hidden))
        theirs.dense.bias.zero_()
    x = torch.randn(2, length, hidden, dtype=torch.float64) / hidden**0.5
    alibi = bloom.build_alibi_tensor(torch.ones(2, length), heads, torch.float64)
    mask = torch.where(visible(length, length, None, HERE), 0.0, -torch.inf).double()[None, None]

    def ours(x):
        fused = theirs.query_key_value(x).view(2, length, heads, 3, 8)
        out = blockwise.attention(*fused.unbind(3), Attend(slopes=alibi_slopes(heads)))
        return out.flatten(2)

    # their slopes are rounded to fp32, and grow by 149 tokens
    near(
        gradients(ours, x),
        gradients(lambda x: theirs(x, torch.zeros_like(x), alibi, mask)[0], x),
        1e-6,
    )


@pytest.mark.parametrize("window", [None, 40])
def test_gemma_2_of_transformers(window):
    """Its eager attention, whose softmax is fp32."""
    config = Gemma2Config(query_pre_attn_scalar=256, attn_logit_softcapping=2.0, head_dim=16)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    length = 150
    g = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, length, h, 16, generator=g, dtype=torch.float64) * 4 for h in (4, 2, 2)
    )
    scale = config.query_pre_attn_scalar**-0.5
    mask = torch.where(visible(length, length, window, HERE), 0.0, -torch.inf)[None, None]

    def theirs(q, k, v):
        turned = (t.transpose(1, 2) for t in (q, k, v))
        return gemma2.eager_attention_forward(
            module.eval(), *turned, mask, scaling=scale, softcap=config.attn_logit_softcapping
        )[0]

    attend = Attend(window, scale, config.attn_logit_softcapping)
    near(
        gradients(lambda *t: blockwise.attention(*t, attend), q, k, v),
        gradients(theirs, q, k, v),
        1e-6,
    )


@pytest.mark.parametrize("heads", (1, 6, 32, 71))
def test_steps_are_falcons(heads):
    """To the bit, and no multiples of a slope: from 256 on an index is rounded too."""
    wanted = falcon.build_alibi_tensor(torch.ones(1, 3000, dtype=torch.int64), heads, torch.float32)
    found = alibi_key_bias(heads, torch.arange(3000)[None])
    assert found.dtype == torch.bfloat16
    assert torch.equal(found[0].float(), wanted[:, 0].t())
    straight = torch.tensor(alibi_slopes(heads)) * torch.arange(3000)[:, None]
    assert (found[0] - straight).abs().max() > 0.01


def test_what_keys_carry_is_added_to_their_products():
    q, k = torch.randn(2, 2, 5, 3, 8, dtype=torch.float64)
    more = alibi_key_bias(3, torch.arange(4, 9)[None])
    wide_q, wide_k = append_key_bias(q, k, more, 4)
    assert wide_q.shape == wide_k.shape == (2, 5, 3, 12)
    products = torch.einsum("bqhd,bkhd->bhqk", q, k)
    wanted = products + more.double()[0].t()[:, None]
    torch.testing.assert_close(torch.einsum("bqhd,bkhd->bhqk", wide_q, wide_k), wanted)


@pytest.mark.slow
def test_one_program_serves_the_layers_of_a_model(monkeypatch):
    """Slopes and caps are no reason to compile a block again, nor a break in its graph."""
    torch.compiler.reset()  # what other tests compiled
    config = Flat(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    model, counter = build(config, SINGLE), CompileCounterWithBackend("aot_eager")
    initialize(model, 0)
    monkeypatch.setattr(blockwise, "_compile", lambda passes: passes)
    for block in model.layers.values():
        block.attn.scores.attend = Attend(20, 0.5, 3.0, alibi_slopes(4))
        block.compile(backend=counter, fullgraph=True)
    tokens = torch.randint(32, (2, 48), generator=torch.Generator().manual_seed(0))
    compiled = model(tokens, cross_entropy_function(tokens))
    compiled.backward()
    with torch.compiler.set_stance("force_eager"):
        eager = model(tokens, cross_entropy_function(tokens))
    assert abs(float(compiled.detach()) / float(eager.detach()) - 1) < 1e-6  # fused no further
    assert counter.frame_count == 1
