"""Products of weights that are laid out, against float64; and that an engine's are of the weights
that the model has.
"""

from dataclasses import replace

import pytest
import torch
from tiny_models import Flat, build, initialize, load, tiny

from dolmen.core.mesh import SINGLE
from dolmen.core.torch_private import compute
from dolmen.model import head
from dolmen.model.build import load_inference_weights, place
from dolmen.model.layers import ParameterModule
from dolmen.model.spec.param import ParamSpec
from dolmen.ops import int8
from dolmen.parallel import inference_linear, tensor
from dolmen.parallel.tensor import Linear, TensorParallel
from dolmen.serving.engine import Engine, generate
from dolmen.serving.request import Request, SamplingParams

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
    product = inference_linear.prepack(weight, "stated")
    assert isinstance(product, inference_linear.OneDnn)
    got = product(x, bias if biased else None)
    want = x.double() @ weight.double().t() + (bias.double() if biased else 0)
    assert got.shape == want.shape
    # fp32 sums of 192 products
    assert (got - want).norm() < 1e-6 * want.norm()


@pytest.mark.skipif(not compute.has_fast_bfloat16(), reason="the CPU has no products of bf16")
@pytest.mark.parametrize("rows", [1, 4, 70])
def test_a_product_of_bfloat16_has_the_bits_of_torch(rows):
    x, weight, bias = (t.bfloat16() for t in factors(rows))
    product = inference_linear.prepack(weight, "stated")
    assert isinstance(product, inference_linear.OneDnn)
    for added in (bias, None):
        assert torch.equal(product(x, added), torch.nn.functional.linear(x, weight, added))


def test_a_cpu_without_products_of_bfloat16_packs_none(monkeypatch):
    monkeypatch.setattr(compute, "has_fast_bfloat16", lambda: False)
    weight = factors(1)[1]
    assert inference_linear.prepack(weight.bfloat16(), "stated") is None
    assert inference_linear.prepack(weight, "stated") is not None


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
    """Where integers are not multiplied: tests/parallel/test_integers.py has those."""
    x, weight, bias = (t.to(dtype) for t in factors(rows))
    got = inference_linear.Int8Rows(weight)(x, bias if biased else None)
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
    got = inference_linear.Int8Rows(weight)(x, None)
    q, scale = int8.quantise(weight)
    want = x.double() @ (q.double() * scale.double()[:, None]).t()
    assert (got - want).norm() < 2**-8 * want.norm()


def test_a_weight_that_would_win_nothing_stays_as_it_is():
    for weight in (torch.zeros(63, 4096), torch.zeros(2, 128, 128), torch.zeros(512, 512).double()):
        assert inference_linear.prepack(weight, "stated") is None


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
            text.append(int(model(torch.tensor([text]), head.compute_logits)[0, -1].argmax()))
    return text[len(prompt) :]


def multiplies(model) -> list[bool]:
    """Of each matrix but the embedding, whether a product of its own multiplies by it."""
    return [
        part.linear().prepacked is not None
        for name, part in model.named_modules()
        if isinstance(part, ParameterModule) and part.weight.ndim == 2 and name != "embed"
    ]


def test_an_engine_writes_what_the_weights_say(model):
    wanted = [by_forward(model, prompt) for prompt in PROMPTS]
    with Engine(model) as engine:
        assert all(multiplies(model)) and len(multiplies(model)) == 15
        for i, prompt in enumerate(PROMPTS):
            engine.add(Request(prompt, SamplingParams(temperature=0, max_new_tokens=8), id=i))
        found = {}
        while engine.busy:
            found |= {one.number: one.tokens for one in engine.step().finished}
    assert [found[i] for i in range(len(PROMPTS))] == wanted
    with torch.no_grad():
        assert not any(multiplies(model))


@pytest.mark.parametrize("kind", ["stated", "int8"])
def test_weights_of_one_input_are_multiplied_as_one(kind):
    """Each has the outputs, the bias and the bits of its own; a weight that is absent has none."""
    chance = torch.Generator().manual_seed(0)
    weights = [torch.randn(n, 256, generator=chance) for n in (128, 64, 72)]
    biases = [torch.randn(128, generator=chance), None, torch.randn(72, generator=chance)]
    packed = inference_linear.prepack_together(weights, kind)
    x, own = torch.randn(5, 256, generator=chance), TensorParallel(SINGLE.tp)
    linears = [
        Linear(w, b, prepacked=one) for w, b, one in zip(weights, biases, packed, strict=True)
    ]
    with torch.no_grad():
        together = tensor.columns(x, linears, own)
        for y, w, b, one in zip(together, weights, biases, packed, strict=True):
            alone = inference_linear.prepack(w, kind)(x, b)
            torch.testing.assert_close(y, alone, rtol=1e-5, atol=1e-4)
            assert torch.equal(one(x, b), y)
            assert kind == "stated" or torch.equal(y, alone)
        calls: list[int] = []
        shared = counting(packed[0].product, calls)
        tensor.columns(
            x,
            [one._replace(prepacked=replace(one.prepacked, product=shared)) for one in linears],
            own,
        )
    assert len(calls) == 1


def counting(product, calls: list):
    """The product, and a note of each call of it."""

    def multiply(x, bias):
        calls.append(len(x))
        return product(x, bias)

    return multiply


def test_an_engine_computes_with_packed_weights(model):
    def packed() -> bool:
        with torch.no_grad():
            return model.layers["0"].attn.q.linear().prepacked is not None

    assert not packed()
    with Engine(model):
        assert packed()
    assert not packed()


def test_a_weight_that_has_changed_is_packed_again_with_its_neighbours(model):
    attention = model.layers["0"].attn
    parts = [attention.q, attention.k, attention.v]

    def packed():
        with torch.no_grad():
            model.prepack("stated")
            found = [part.linear().prepacked for part in parts]
            model.disable_prepack(keep=True)
        assert len({id(one.product) for one in found}) == 1
        return found[0].product

    first = packed()
    assert packed() is first
    with torch.no_grad():
        attention.k.weight.mul_(2)
    assert packed() is not first


def test_weights_that_have_changed_are_laid_out_again(model):
    before = generate(model, PROMPTS, 8)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 0.5 * torch.rand_like(p))
    wanted = [by_forward(model, prompt) for prompt in PROMPTS]
    assert generate(model, PROMPTS, 8) == wanted != before


LEAVES = {
    "weight": ParamSpec((4, 3), "matrix"),
    "bias": ParamSpec((4,), "bias"),
    "lora_A": ParamSpec((2, 3), "adapter"),
    "lora_B": ParamSpec((4, 2), "adapter"),
    "lora_magnitude": ParamSpec((4,), "adapter"),
    "weight_scale": ParamSpec((4,), "scale"),
}


@pytest.mark.parametrize("changed", LEAVES)
def test_nothing_is_kept_of_what_has_changed(changed):
    """Where what a rank multiplies by are copies, as of a part that tp does not divide."""
    part = ParameterModule(LEAVES, local_rows=torch.clone)

    def requested() -> Linear:
        with torch.no_grad():
            part.prepack("stated")
            made = part.linear()
            part.disable_prepack(keep=True)
            return made

    first = requested()
    assert requested() is first
    with torch.no_grad():
        part.get_parameter(changed).fill_(1)
    assert requested() is not first


def test_what_was_laid_out_is_kept_of_a_model_that_is_not_trained(model):
    def kept():
        return [
            part._prepacked is not None
            for part in model.modules()
            if isinstance(part, ParameterModule)
        ]

    generate(model, PROMPTS, 1)
    assert any(kept())
    generate(model.train(), PROMPTS, 1)
    assert model.training and not any(kept())


def logits_of(model, weights) -> torch.Tensor:
    text = torch.tensor(PROMPTS[2:])
    with Engine(model, weights=weights):
        return model(text, head.compute_logits)[0]


def test_an_engine_with_int8_computes_with_rounded_weights(model):
    """Their numbers in place of the model's give the same, but for the 8 bits of the tokens; and
    other than theirs.
    """
    exact, got = logits_of(model, "stated"), logits_of(model, "int8")
    assert (got - exact).norm() > 0.01 * exact.norm()
    torch.testing.assert_close(logits_of(model, "stated"), exact, rtol=0, atol=0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2 and name != "embed.weight":
                q, scale = int8.quantise(p)
                p.copy_(q * scale[:, None])
    want = logits_of(model, "stated")
    # of two roundings of like size one is left: 1 / sqrt(2) of both
    assert (got - want).norm() < 0.85 * (got - exact).norm()


def resident(model) -> int:
    """Bytes of a model's tensors, of what multiplies in the place of some too."""
    held = [p for p in model.parameters() if not p.is_meta]
    for part in model.modules():
        if isinstance(part, ParameterModule) and part._freed is not None:
            product = part._freed[1].prepacked
            if isinstance(product, inference_linear.FusedPart):
                product = product.product if product.index == 0 else None
            if product is not None:  # the others are in the first's
                assert isinstance(product, inference_linear.IntegerLinear)
                held += [product.weight, product.scale, product.zeros]
    return sum(t.numel() * t.element_size() for t in held)


def opened_alone(model, seen=None):
    """The same numbers, held as int8 alone; `seen` is given the new model after each of them."""
    placed = place(LARGE.spec, SINGLE)

    def stream(write) -> None:
        for name, p in reversed([*model.named_parameters()]):  # in any order
            write(name, p)
            if seen is not None:
                seen(placed)

    return load_inference_weights(placed, SINGLE, "int8", stream).eval()


def test_of_a_model_that_is_int8_alone_the_weights_are_gone(model):
    """The matrices of one input are there as they were, and no others; what is computed is the
    same to the bit.
    """
    most = 0

    def seen(placed) -> None:
        nonlocal most
        whole = [p.numel() for p in placed.parameters() if p.ndim == 2 and not p.is_meta]
        most = max(most, sum(whole))

    opened = opened_alone(model, seen)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    # keys and values wait for the queries
    waiting = 2 * sizes["layers.0.attn.k.weight"]
    assert most <= sizes["embed.weight"] + waiting
    matrices = {n: p for n, p in model.named_parameters() if p.ndim == 2 and n != "embed.weight"}
    others = sum(p.numel() for n, p in model.named_parameters() if n not in matrices)
    rows = sum(p.shape[0] for p in matrices.values())
    # a byte for each number, and of each row a scale in fp32 and a zero point in int32
    assert resident(opened) == 4 * others + sum(p.numel() for p in matrices.values()) + 8 * rows
    assert torch.equal(logits_of(opened, "int8"), logits_of(model, "int8"))
    found = [generated(one, weights="int8") for one in (opened, model)]
    assert found[0] == found[1]


def generated(model, **words) -> dict[int, list[int]]:
    with Engine(model, **words) as engine:
        for i, prompt in enumerate(PROMPTS):
            engine.add(Request(prompt, SamplingParams(temperature=0, max_new_tokens=8), id=i))
        found = {}
        while engine.busy:
            found |= {one.number: one.tokens for one in engine.step().finished}
    return found


def test_what_asks_for_weights_that_are_gone_is_refused(model):
    opened = opened_alone(model)
    with pytest.raises(ValueError, match="loaded for --weights int8 only, not stated"):
        Engine(opened)
    with pytest.raises(ValueError, match="but stated ones are needed"):
        opened.prepack("stated")
    with pytest.raises(
        ValueError, match="only int8 weights: load it again, so the model cannot be train"
    ):
        opened(torch.tensor(PROMPTS[2:]), head.compute_logits)
    with pytest.raises(ValueError, match="has no storage: its weight was freed"):
        load(opened, lambda write: write("head.weight", model.head.weight))
    with pytest.raises(NotImplementedError, match="meta"):  # of torch: a copy of no numbers
        opened.head.weight.numpy(force=True)


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
        loss = model(torch.tensor(PROMPTS[2:]), head.compute_logits).square().mean()
        loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
