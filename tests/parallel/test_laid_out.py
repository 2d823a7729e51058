"""Products of weights that are laid out, against float64; and that an engine's are of the weights
that the model has.
"""

import pytest
import torch
from models import Flat, build, initialize, tiny

from dolmen.core.mesh import SINGLE
from dolmen.model import head
from dolmen.model.layers import Parameters
from dolmen.ops import int8
from dolmen.parallel import laid_out
from dolmen.serving.engine import Engine, generate
from dolmen.serving.options import Options
from dolmen.serving.request import Request

LARGE = Flat(
    vocab_size=300,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.2,
)
PROMPTS = [[5, 17, 9, 250, 3], [7], list(range(30, 50))]


def factors(rows: int):
    chance = torch.Generator().manual_seed(0)
    sizes = (rows, 192), (136, 192), (136,)
    return [torch.randn(size, generator=chance) for size in sizes]


@pytest.mark.parametrize("rows", [1, 3, 4, 70, 200])
@pytest.mark.parametrize("biased", [True, False])
def test_a_product_is_that_of_the_weight(rows, biased):
    x, weight, bias = factors(rows)
    product = laid_out.product_of(weight, "stated")
    assert isinstance(product, laid_out.OneDnn)
    got = product(x, bias if biased else None)
    want = x.double() @ weight.double().t() + (bias.double() if biased else 0)
    assert got.shape == want.shape
    # fp32 sums of 192 products
    assert (got - want).norm() < 1e-6 * want.norm()


def test_int8_is_the_nearest_of_each_row():
    weight = factors(1)[1]
    weight[3], weight[4] = 0.0, 1e-30
    q, scale = int8.quantise(weight)
    wide = weight.double()
    torch.testing.assert_close(scale.double()[5:], wide.abs().amax(1)[5:] / 127, rtol=1e-7, atol=0)
    off = (wide - q.double() * scale.double()[:, None]).abs()
    assert (off <= 0.5001 * scale.double()[:, None]).all()
    assert (q.int().abs().amax(1)[[i for i in range(136) if i != 3]] == 127).all()
    assert scale[3] == 1 and not q[3].any()


@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_of_int8_is_that_of_what_it_rounds_to(rows, biased, dtype):
    x, weight, bias = (t.to(dtype) for t in factors(rows))
    product = laid_out.product_of(weight, "int8")
    assert isinstance(product, laid_out.Int8Rows)
    got = product(x, bias if biased else None)
    q, scale = int8.quantise(weight)
    want = x.double() @ (q.double() * scale.double()[:, None]).t()
    want = want + bias.double() if biased else want
    assert got.dtype == dtype and got.shape == want.shape
    # x and the sums are rounded to bf16, whose numbers are 2^-8 apart
    assert (got - want).norm() < 2**-8 * want.norm()


@pytest.mark.parametrize("rows", (1, 20))
@pytest.mark.parametrize("inputs", (72, 200, 208))
def test_a_product_of_int8_is_of_rows_of_any_length(rows, inputs):
    """Of torch's own some read behind a row."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, inputs, generator=generator) for n in (rows, 96))
    got = laid_out.Int8Rows(weight)(x, None)
    q, scale = int8.quantise(weight)
    want = x.double() @ (q.double() * scale.double()[:, None]).t()
    assert (got - want).norm() < 2**-8 * want.norm()


def test_a_weight_that_would_win_nothing_stays_as_it_is():
    for weight in (torch.zeros(63, 4096), torch.zeros(2, 128, 128), torch.zeros(512, 512).double()):
        assert laid_out.product_of(weight, "stated") is None


@pytest.fixture
def model():
    model = build(LARGE, SINGLE)
    initialize(model, seed=1)
    return model.eval()


def by_forward(model, prompt: list[int], new: int = 8) -> list[int]:
    """Greedy, the whole text at every step, of weights as they are."""
    text = list(prompt)
    with torch.no_grad():
        for _ in range(new):
            text.append(int(model(torch.tensor([text]), head.logits)[0, -1].argmax()))
    return text[len(prompt) :]


def multiplies(model) -> list[bool]:
    """Of each matrix but the embedding, whether a product of its own multiplies by it."""
    return [
        part.linear().laid_out is not None
        for name, part in model.named_modules()
        if isinstance(part, Parameters) and part.weight.ndim == 2 and name != "embed"
    ]


def test_an_engine_writes_what_the_weights_say(model):
    wanted = [by_forward(model, prompt) for prompt in PROMPTS]
    with Engine(model) as engine:
        assert all(multiplies(model)) and len(multiplies(model)) == 15
        for i, prompt in enumerate(PROMPTS):
            engine.add(Request(prompt, Options(temperature=0, max_new_tokens=8), id=i))
        found = {}
        while engine.busy:
            found |= {one.number: one.tokens for one in engine.step().ended}
    assert [found[i] for i in range(len(PROMPTS))] == wanted
    with torch.no_grad():
        assert not any(multiplies(model))


def test_weights_that_have_changed_are_laid_out_again(model):
    before = generate(model, PROMPTS, 8)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 0.5 * torch.rand_like(p))
    wanted = [by_forward(model, prompt) for prompt in PROMPTS]
    assert generate(model, PROMPTS, 8) == wanted != before


def test_what_was_laid_out_is_kept_of_a_model_that_is_not_trained(model):
    def kept():
        return [part._kept is not None for part in model.modules() if isinstance(part, Parameters)]

    generate(model, PROMPTS, 1)
    assert any(kept())
    generate(model.train(), PROMPTS, 1)
    assert model.training and not any(kept())


def logits_of(model, weights) -> torch.Tensor:
    text = torch.tensor(PROMPTS[2:])
    with Engine(model, weights=weights):
        return model(text, head.logits)[0]


def test_an_engine_with_int8_computes_with_rounded_weights(model):
    """Their numbers in place of the model's give the same, but for bf16; and other than theirs."""
    exact, got = logits_of(model, "stated"), logits_of(model, "int8")
    assert (got - exact).norm() > 0.01 * exact.norm()
    torch.testing.assert_close(logits_of(model, "stated"), exact, rtol=0, atol=0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2 and name != "embed.weight":
                q, scale = int8.quantise(p)
                p.copy_(q * scale[:, None])
    want = logits_of(model, "stated")
    assert (got - want).norm() < 0.6 * (got - exact).norm()


SMALL = dict(
    vocab_size=71,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=32,
)
LATENT = dict(SMALL, kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=7)


@pytest.mark.parametrize(
    "described, why",
    [
        (tiny("mixtral", **SMALL, num_local_experts=2, num_experts_per_tok=1), "experts"),
        (
            tiny("deepseek_v2", **LATENT, q_lora_rank=None, first_k_dense_replace=2),
            "latent attention",
        ),
    ],
    ids=["experts", "latent"],
)
def test_int8_is_refused(described, why):
    with pytest.raises(ValueError, match=f"{why}.*leave out --weights int8"):
        Engine(build(described, SINGLE), weights="int8")


def test_gradients_are_those_of_the_weights(model):
    """With gradients, within an engine too, nothing multiplies by a copy."""
    with Engine(model), torch.enable_grad():
        loss = model(torch.tensor(PROMPTS[2:]), head.logits).square().mean()
        loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
