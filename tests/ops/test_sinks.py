"""Sinks, a learned score of each head that weighs no value: on every road, their gradient too,
against the definition in float64, differences, GPT-OSS of transformers, and a model with a cache.
"""

from dataclasses import replace

import flash_kernel
import pytest
import torch
from tiny_models import Flat, build, initialize, with_mixer_fields
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import GptOssConfig
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss

from dolmen.core.autograd import recompute
from dolmen.core.mesh import SINGLE, Axis
from dolmen.model.head import cross_entropy_function
from dolmen.ops.attention import BACKENDS, blockwise, decode, dropout, visible
from dolmen.ops.attention.reference import CASES, SCORES, Case, definition
from dolmen.ops.elementwise import Dropout, Noise
from dolmen.ops.kernels import H100
from dolmen.parallel.context import ContextParallel

HERE = torch.device("cpu")
ALONE = ContextParallel(Axis("cp", 1, 0), kernel="flash")  # gives both backends what they ask
# as in test_attention.py
TYPES = pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)],
    ids=["64", "32", "16"],
)
NAMES = ("grouped", "one key head", "window in a chunk", "documents and window", "narrow values")
BLOCKS = {name: CASES[name] for name in NAMES} | {n: SCORES[n] for n in ("prefix", "all at once")}
BLOCKS["more rows than key heads"] = replace(CASES["grouped"], batch=5)
FLASH = {name: CASES[name] for name in NAMES}


def sinks(heads: int) -> torch.Tensor:
    """From one that takes nothing to one that takes almost all."""
    return torch.linspace(-20, 9, heads, dtype=torch.float64)


def gradients(road, case: Case, dtype: torch.dtype, wide: bool = False) -> list[torch.Tensor]:
    """out, dq, dk, dv, dsinks of `road`, of inputs as `dtype` rounds them."""
    *inputs, g = (t.to(dtype) for t in case.tensors(dtype, HERE))
    leaves = [*inputs, sinks(case.heads).to(dtype)]
    if wide:
        leaves, g = [t.double() for t in leaves], g.double()
    leaves = [t.detach().requires_grad_() for t in leaves]
    documents = None if case.whole is None else ALONE.documents(case.whole)
    attend = case.attend.with_documents(documents)._replace(sinks=leaves[3])
    out = road(*leaves[:3], attend)
    return [out.detach(), *torch.autograd.grad(out, leaves, g)]


def off(road, case: Case, dtype: torch.dtype) -> float:
    """The largest norm of a difference from the definition over its own; dsinks by their largest,
    as those of heads where a sink takes nothing are 0.
    """
    got, want = gradients(road, case, dtype), gradients(definition, case, dtype, wide=True)
    assert all(t.dtype == dtype for t in got)
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("name", BLOCKS)
@TYPES
def test_blocks(name, dtype, tolerance):
    assert off(blockwise.attention, BLOCKS[name], dtype) <= tolerance


@pytest.mark.parametrize("name", FLASH)
def test_flash(name):
    """By a stand-in for the kernels of a GPU."""
    with flash_kernel.on_cpu():
        assert off(BACKENDS["flash"].attention, FLASH[name], torch.float64) <= 1e-13


@pytest.mark.parametrize("name", BLOCKS)
def test_with_dropout_of_nothing(name):
    case = BLOCKS[name]
    noise = Noise(torch.tensor(7), torch.arange(case.batch))

    def road(q, k, v, attend):
        attend = attend._replace(dropout=Dropout(0.0, noise, 1))
        return dropout.attention(q, k, v, attend, torch.arange(case.length))

    assert off(road, case, torch.float64) <= 1e-13


@pytest.mark.parametrize("name", BLOCKS)
def test_recomputed_it_has_the_same_bits(name):
    def road(q, k, v, attend):
        return recompute(
            lambda q, k, v, own: blockwise.attention(q, k, v, attend._replace(sinks=own)),
            q, k, v, attend.sinks,
        )  # fmt: skip

    plain = gradients(blockwise.attention, BLOCKS[name], torch.float32)
    for a, b in zip(gradients(road, BLOCKS[name], torch.float32), plain, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dropping", [0.0, 0.4])
def test_gradients_by_differences(dropping):
    case = replace(BLOCKS["grouped"], length=9, head_dim=3)
    q, k, v = (t.requires_grad_() for t in case.tensors(torch.float64, HERE)[:3])
    own = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)

    def road(q, k, v, own):
        attend = case.attend._replace(sinks=own)
        if not dropping:
            return blockwise.attention(q, k, v, attend)
        noise = Noise(torch.tensor(7), torch.arange(2))
        attend = attend.with_documents(None, Dropout(dropping, noise, 3))
        return dropout.attention(q, k, v, attend, torch.arange(9))

    assert torch.autograd.gradcheck(road, (q, k, v, own), fast_mode=True)


@pytest.mark.parametrize("sink", [-20.0, 0.0, 200.0])
def test_a_sink_takes_its_share(sink):
    """Where all other scores are 0 and all values 1, n keys leave n / (n + exp(sink))."""
    q, v = torch.zeros(1, 130, 1, 8).double(), torch.ones(1, 130, 1, 8).double()
    own = torch.tensor([sink], dtype=torch.float64)
    out = blockwise.attention(q, q, v, Case().attend._replace(sinks=own))
    n = torch.arange(1, 131, dtype=torch.float64)
    torch.testing.assert_close(out[0, :, 0, 0], n / (n + own.exp()), rtol=1e-12, atol=0)


@pytest.mark.parametrize("sink", [-2000.0, 1.0, 2000.0])
def test_one_query(sink):
    """Of pages, one of which is of another text, and of none of its tokens."""
    case = replace(CASES["grouped"], length=11)
    q, k, v, _ = case.tensors(torch.float64, HERE)
    own = torch.tensor([sink, 0.0, -1.0, sink], dtype=torch.float64)
    attend = case.attend._replace(sinks=own)
    pools = [
        torch.nn.functional.pad(t, (0, 0, 0, 0, 0, 5), value=7.0)
        .unflatten(1, (2, 8))
        .flatten(0, 1)
        .transpose(1, 2)
        for t in (k, v)
    ]
    back = 10 - torch.arange(16).view(2, 8).repeat(2, 1)
    pages = decode.Pages(torch.tensor([0, 0, 1, 1]), back)
    got = decode.attend_pages(q[:, -1], *pools, attend, pages)
    want = definition(q, k, v, attend)[:, -1]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    for i in range(2):
        text = decode.Alone(slice(2 * i, 2 * i + 2), 11)
        alone = decode.attend_pages(q[i, -1:], *pools, attend, text)[0]
        torch.testing.assert_close(alone, want[i], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("window", [None, 40])
def test_gpt_oss_of_transformers(window):
    """A layer's attention whole, rope and projections theirs."""
    length, heads = 150, 4
    config = GptOssConfig(
        hidden_size=64, head_dim=16, num_attention_heads=heads, num_key_value_heads=2,
        num_hidden_layers=1, layer_types=["full_attention"], attention_dropout=0.0,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    theirs = gpt_oss.GptOssAttention(config, layer_idx=0).double().eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(0, 0.3)
        theirs.sinks.copy_(torch.linspace(-3, 4, heads))
    x = torch.randn(2, length, 64, dtype=torch.float64)
    turns = torch.ones(1, length, 8, dtype=torch.float64), torch.zeros(1, length, 8).double()
    mask = torch.where(visible(length, length, window, HERE), 0.0, -torch.inf).double()[None, None]

    def ours(x):
        parts = theirs.q_proj, theirs.k_proj, theirs.v_proj
        q, k, v = (part(x).view(2, length, -1, 16) for part in parts)
        attend = Case().attend._replace(window=window, sinks=theirs.sinks)
        return theirs.o_proj(blockwise.attention(q, k, v, attend).flatten(2))

    found = []
    for road in (ours, lambda x: theirs(x, turns, mask)[0]):
        leaves = [x.detach().requires_grad_(), theirs.sinks]
        out = road(leaves[0])
        weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
        found.append([out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)])
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 1e-12 * b.norm()


CONFIG = with_mixer_fields(
    Flat(
        vocab_size=71,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
    ),
    sinks=True,
)


def test_one_program_serves_the_layers_of_a_model(monkeypatch):
    """Sinks of every layer, no break in its graph; and flash takes them."""
    torch.compiler.reset()  # what other tests compiled
    model, counter = build(CONFIG, SINGLE), CompileCounterWithBackend("aot_eager")
    initialize(model, 0)
    monkeypatch.setattr(blockwise, "_compile", lambda passes: passes)
    for block in model.layers.values():
        block.compile(backend=counter, fullgraph=True)
    text = torch.randint(71, (2, 48), generator=torch.Generator().manual_seed(0))
    compiled = model(text, cross_entropy_function(text))
    compiled.backward()
    assert all(b.attn.sinks.weight.grad.abs().min() > 0 for b in model.layers.values())
    with torch.compiler.set_stance("force_eager"):
        eager = model(text, cross_entropy_function(text))
    assert abs(float(compiled.detach()) / float(eager.detach()) - 1) < 1e-6
    assert counter.frame_count == 1
    half = build(CONFIG, SINGLE, dtype=torch.bfloat16, hardware=H100)
    assert half.split.kernels.attention == "cudnn"
