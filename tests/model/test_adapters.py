"""Adapters in one process: what their leaves say, how they begin, that a model with them is the
merged one, and that what they leave frozen costs no gradient. Layouts: tests/golden/mechanisms.py;
training: tests/oracle/test_low_rank.py.
"""

import math
from dataclasses import replace

import pytest
import torch
from tiny_models import Flat, Tiny, build, initialize, load, tiny
from torch.utils.flop_counter import FlopCounterMode

from dolmen.core.mesh import SINGLE, Axis
from dolmen.families import ModelConfig
from dolmen.families.adapters import ADAPTED, AdapterConfig, targets
from dolmen.model import head
from dolmen.model.count import (
    attention_flops_per_token,
    parameters,
    trainable_parameters,
    training_flops_per_token,
)
from dolmen.model.decoder import Decoder
from dolmen.model.layers import is_partial, placements
from dolmen.model.spec import LoraSpec, ScalarHeadSpec
from dolmen.model.training import Training
from dolmen.parallel.tensor import TensorParallel
from dolmen.serving import engine

SIZES = dict(
    vocab_size=71,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    initializer_range=0.1,
)
FALCON = dict(
    vocab_size=71, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_hidden_size=48
)
DEEPSEEK = dict(
    **{n: SIZES[n] for n in ("vocab_size", "hidden_size", "intermediate_size")},
    num_hidden_layers=2,
    num_attention_heads=4,
    moe_intermediate_size=24,
    kv_lora_rank=12,
    q_lora_rank=20,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=7,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
)
MODELS = {
    "llama": tiny("llama", **SIZES),
    "gpt2": tiny("gpt2", vocab_size=71, n_embd=32, n_layer=2, n_head=4, n_positions=16),
    "falcon": tiny("falcon", **FALCON),
    "qwen3_moe": tiny(
        "qwen3_moe", **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    "deepseek_v3": tiny("deepseek_v3", **DEEPSEEK),
}
RANK, ALPHA, TOKENS = 4, 6.0, 9


def adapted(model: Tiny, rank: int = RANK) -> Tiny:
    weights = (name for name, param in model.spec.params.items() if param.role in ADAPTED)
    return replace(model, training=Training(adapter=LoraSpec(rank, ALPHA, frozenset(weights))))


def made(model: Tiny, dtype: torch.dtype = torch.float64) -> Decoder:
    """With a B that has moved."""
    decoder = build(model, SINGLE, dtype=dtype)
    initialize(decoder, 0)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            if name.endswith("lora_B"):
                p.normal_(0.0, 0.3)
    return decoder


def tokens(batch: int = 1) -> torch.Tensor:
    return torch.randint(71, (batch, TOKENS), generator=torch.Generator().manual_seed(2))


def merged(model: Decoder, name: str, dtype: torch.dtype = torch.float64) -> Decoder:
    """The model without adapters that computes the same."""
    plain, parts = build(MODELS[name], SINGLE, dtype=dtype), dict(model.named_parameters())

    def stream(write):
        for weight in MODELS[name].spec.params:
            value = parts[weight]
            if weight in model.spec.adapter.targets:
                down, up = (parts[one] for one in LoraSpec.pair(weight))
                value = value + ALPHA / RANK * up @ down
            write(weight, value)

    load(plain, stream)
    return plain


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype, rounding", [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_merged_is_unmerged(name, dtype, rounding):
    """Logits, in units of the largest: sums of a few hundred products over two layers."""
    model = made(adapted(MODELS[name]), dtype)
    plain = merged(model, name, dtype)
    with torch.no_grad():
        got, want = (m(tokens(), head.compute_logits) for m in (model, plain))
        without = build(MODELS[name], SINGLE, dtype=dtype)
        initialize(without, 0)
        base = without(tokens(), head.compute_logits)
    assert (got - want).abs().max() <= rounding * want.abs().max()
    assert (base - want).abs().max() >= 1e-2 * want.abs().max()  # and adapters are felt


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_a_cache_sees_adapters(name):
    """Of latents too, where one query is multiplied by what made keys and values."""
    model = made(adapted(MODELS[name]))
    prompts = [[5, 9, 2, 40], [7, 7]]
    texts = [engine.generate(m.eval(), prompts, 8) for m in (model, merged(model, name))]
    assert texts[0] == texts[1]
    base = build(MODELS[name], SINGLE, dtype=torch.float64)
    initialize(base, 0)
    assert engine.generate(base.eval(), prompts, 8) != texts[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_begins_as_it_was(name):
    """To the bit: B is 0, and no other value depends on there being adapters."""
    ours, plain = (build(m, SINGLE) for m in (adapted(MODELS[name]), MODELS[name]))
    initialize(ours, 0)
    initialize(plain, 0)
    with torch.no_grad():
        assert torch.equal(
            ours(tokens(), head.compute_logits), plain(tokens(), head.compute_logits)
        )
    before, now = ({n: p.detach() for n, p in m.named_parameters()} for m in (plain, ours))
    assert all(torch.equal(now[n], p) for n, p in before.items())
    for name, p in now.items():
        if name.endswith("lora_A"):
            bound = 1 / math.sqrt(p.shape[-1])
            assert p.abs().max() <= bound
            # standard deviation of a uniform, to five of its standard errors, sqrt(1 / 5 n)
            assert float(p.std() / bound * math.sqrt(3)) == pytest.approx(
                1, abs=5 * math.sqrt(0.2 / p.numel())
            )
        elif name.endswith("lora_B"):
            assert not p.any()


@pytest.mark.parametrize("name", MODELS)
def test_what_is_frozen_has_no_gradient(name):
    model = made(adapted(MODELS[name]))
    model(tokens(2), head.cross_entropy_function(tokens(2))).backward()
    for parameter, p in model.named_parameters():
        assert (p.grad is not None) == ("lora_" in parameter) == p.requires_grad, parameter
    spec = model.spec
    params = spec.params
    assert {n for n, param in params.items() if param.trained} == {
        n for n in params if "lora_" in n
    }
    assert parameters(spec) == sum(p.numel() for p in model.parameters())
    assert trainable_parameters(spec) == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )


def test_a_scalar_head_is_trained_too():
    """It is new: frozen, its random values would be the reward."""
    model = adapted(MODELS["llama"])
    params = replace(model.training.apply_to(model.spec), head=ScalarHeadSpec()).params
    trained = {n for n, param in params.items() if param.trained}
    assert trained == {n for n in params if "lora_" in n} | {"score.weight"}


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3"])
def test_frozen_weights_compute_nothing(name):
    """Multiplications of a step, forward and backward, are those in closed form, less what no one
    asks for: gradients of what enters the first layer, which is frozen.
    """
    form = adapted(MODELS[name])
    model, batch = made(form), tokens(2)
    with FlopCounterMode(display=False) as counter:
        model(batch, head.cross_entropy_function(batch)).backward()
    products = {
        op: flops
        for op, flops in counter.get_flop_counts()["Global"].items()
        if op in (torch.ops.aten.mm, torch.ops.aten.addmm)
    }
    spec = model.spec
    matrices = training_flops_per_token(spec, TOKENS) - attention_flops_per_token(spec, TOKENS)
    entering = ("attn.q", "attn.k", "attn.v", "attn.q_a", "attn.kv_a")
    unasked = sum(
        2 * param.products
        for n, param in spec.params.items()
        if n.startswith("layers.0.") and n.rpartition(".")[0].endswith(entering)
        if not n.endswith("lora_B")  # of what A has made there is a gradient
    )
    assert sum(products.values()) == batch.numel() * (matrices - unasked)


PARTIAL = {  # of tp 2 with one key-value head: A and B of each kind of linear
    "attn.q": (True, False),
    "attn.k": (True, True),
    "attn.o": (False, True),
    "mlp.up": (True, False),
    "mlp.down": (False, True),
}


def test_params_follow_from_their_weights():
    """Which of the two a cut goes to, and whose gradient is a partial sum over tp."""
    model = adapted(Tiny(Flat(**SIZES | dict(num_key_value_heads=1)).spec))
    params = model.training.apply_to(model.spec).params
    tp = TensorParallel(Axis("tp", 2))
    for part, partial in PARTIAL.items():
        weight, down, up = (params[f"layers.0.{part}.{n}"] for n in ("weight", "lora_A", "lora_B"))
        assert down.shape == (RANK, weight.shape[1]) and up.shape == (weight.shape[0], RANK)
        assert (is_partial(down, tp), is_partial(up, tp)) == partial
        assert {cut.dim for cut in down.shards} <= {1} and {cut.dim for cut in up.shards} <= {0}
        assert len(down.shards) + len(up.shards) == len(weight.shards) == 1
        assert (weight.trained, down.trained, up.trained) == (False, True, True)
        assert (down.products, up.products) == (down.elements, up.elements)
        assert up.scale == ALPHA / RANK
    experts = adapted(MODELS["qwen3_moe"])
    params = experts.training.apply_to(experts.spec).params
    for part, (down_cuts, up_cuts) in {
        "gate": (["ep"], ["ep", "tp"]),
        "down": (["ep", "tp"], ["ep"]),
    }.items():
        down, up = (params[f"layers.0.mlp.experts.{part}.lora_{n}"] for n in "AB")
        assert [cut.axis for cut in down.shards] == down_cuts
        assert [cut.axis for cut in up.shards] == up_cuts
        assert isinstance(placements(down, {"tp": 2, "ep": 2}), tuple)
        assert down.products == down.elements // 2  # two of four experts


TARGETS = {
    "llama": (["q_proj", "down_proj"], ["attn.q", "mlp.down"]),
    "gpt2": (["c_attn", "c_proj"], ["attn.q", "attn.k", "attn.v", "attn.o", "mlp.down"]),
    "falcon": (["query_key_value"], ["attn.q", "attn.k", "attn.v"]),
    "qwen3_moe": (["gate_proj"], ["mlp.experts.gate"]),
    "deepseek_v3": (
        ["kv_a_proj_with_mqa", "up_proj"],
        ["attn.kv_a", "mlp.up", "mlp.experts.up", "mlp.shared.up"],
    ),
}
CONFIGS = {
    "llama": ModelConfig({"model_type": "llama", **SIZES}),
    "gpt2": ModelConfig({"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "falcon": ModelConfig({"model_type": "falcon", **FALCON}),
    "qwen3_moe": ModelConfig(
        {"model_type": "qwen3_moe", **SIZES, "num_experts": 4, "num_experts_per_tok": 2}
    ),
    "deepseek_v3": ModelConfig({"model_type": "deepseek_v3", **DEEPSEEK}),
}


@pytest.mark.parametrize("name", TARGETS)
def test_targets_are_named_as_in_transformers(name):
    model, (requested, ours) = CONFIGS[name], TARGETS[name]
    of = {f"layers.{i}.{part}.weight" for part in ours for i in range(2)}
    assert targets(model, requested) == of & model.spec.params.keys()
    roles = {n: param.role for n, param in model.spec.params.items()}
    assert targets(model, ["all-linear"]) == {n for n, role in roles.items() if role in ADAPTED}


@pytest.mark.parametrize(
    "options, said",
    [
        (
            "q",
            "adapter.targets has q, which is not a layer of llama that can have an adapter: ",
        ),
        ("lm_head", "adapters of the LM head are not supported"),
        (
            "embed_tokens",
            "choose from q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj",
        ),
    ],
)
def test_other_targets_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        AdapterConfig(8, targets=("q_proj", options)).resolve(CONFIGS["llama"])


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(rank=0), r"adapter.rank is 0: it must be at least 1"),
        (dict(rank=8, alpha=0.0), r"adapter.alpha is 0.0: it must be over 0"),
        (dict(rank=8, alpha=math.nan), r"adapter.alpha is nan"),
        (dict(rank=8, targets=()), r"adapter.targets is \(\): it must be a layer, such as q_proj"),
        (dict(alpha=8.0), r"adapter.alpha is 8.0, but there are no adapters: set --adapter.rank"),
        (dict(targets=("q_proj",)), r"adapter.targets is .* set --adapter.rank, such as 8"),
    ],
)
def test_wrong_options_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        AdapterConfig(**options)


def test_without_a_rank_there_are_none():
    assert AdapterConfig().resolve(CONFIGS["llama"]) is None
    assert AdapterConfig(2, 1.0, ("q_proj",)).resolve(CONFIGS["llama"]) == LoraSpec(
        2, 1.0, frozenset(f"layers.{i}.attn.q.weight" for i in range(2))
    )


@pytest.mark.parametrize("name", MODELS)
def test_dora_is_the_weight_whose_rows_it_turns(name):
    """Logits in float64, and gradients of lengths, against the one weight m (W + s B A) / |.| with
    its norm a constant; a model begins as it was.
    """
    whole = adapted(MODELS[name])
    form = replace(whole.training.adapter, kind="dora")
    felt = replace(whole, training=Training(adapter=form))
    began = build(felt, SINGLE, dtype=torch.float64)
    initialize(began, 0)
    plain = build(MODELS[name], SINGLE, dtype=torch.float64)
    initialize(plain, 0)
    with torch.no_grad():
        before, now = (m(tokens(), head.compute_logits) for m in (plain, began))
    assert (before - now).abs().max() <= 1e-13 * before.abs().max()
    model = made(felt)
    parts = dict(model.named_parameters())
    lengths = {n: p for n, p in parts.items() if n.endswith("lora_magnitude")}
    assert len(lengths) == len(form.targets)
    with torch.no_grad():
        for p in lengths.values():
            p.mul_(torch.rand(p.shape, dtype=p.dtype) + 0.5)
        for n, p in parts.items():
            if n.endswith(".bias"):  # they begin at 0, and the gain is not theirs
                p.normal_(0.0, 0.3)
                plain.get_parameter(n).copy_(p)
    turned = {}
    for n, m in lengths.items():
        weight = n.removesuffix("lora_magnitude") + "weight"
        down, up = (parts[one] for one in LoraSpec.pair(weight))
        row = (parts[weight] + ALPHA / RANK * up @ down).detach()
        turned[weight] = row / row.norm(dim=-1, keepdim=True), m.detach()[..., None]
    with torch.no_grad():
        for weight, (direction, length) in turned.items():
            plain.get_parameter(weight).copy_(direction * length)
    for one in (model, plain):
        one(tokens(2), head.cross_entropy_function(tokens(2))).backward()
    with torch.no_grad():
        got, want = (m(tokens(), head.compute_logits) for m in (model, plain))
    assert (got - want).abs().max() <= 1e-12 * want.abs().max()
    for weight, (direction, _) in turned.items():
        mine = parts[weight.removesuffix("weight") + "lora_magnitude"].grad
        theirs = (plain.get_parameter(weight).grad * direction).sum(-1)
        assert (mine - theirs).abs().max() <= 1e-11 * theirs.abs().max(), weight


@pytest.mark.parametrize("name", MODELS)
def test_a_frozen_weight_in_eight_bits_is_its_restored_one(name):
    """Logits and gradients in float64, against the model whose weights are what the payloads and
    scales stand for, in closed form: round(127 w / amax) amax / 127 of each output.
    """
    whole = adapted(MODELS[name])
    frozen = replace(whole.training.adapter, frozen="int8")
    model = made(replace(whole, training=Training(adapter=frozen)))
    held = {n: p.detach() for n, p in model.named_parameters()}
    plain = made(whole)
    with torch.no_grad():
        for weight, param in MODELS[name].spec.params.items():
            if param.role in ADAPTED:
                w = plain.get_parameter(weight)
                assert held[weight].dtype == torch.int8 != held[weight + "_scale"].dtype
                scale = (w.abs().amax(-1, keepdim=True).float() / 127).double()
                w.copy_((w / scale).round() * scale)
    batch = tokens(2)
    results = []
    for one in (model, plain):
        loss = one(batch, head.cross_entropy_function(batch))
        loss.backward()
        grads = {n: p.grad for n, p in one.named_parameters() if p.requires_grad}
        results.append((loss, one.eval()(batch, head.compute_logits), grads))
    (loss, logits, got), (want_loss, want_logits, want) = results
    # scales were divided in fp32 where the closed form divides in fp64
    torch.testing.assert_close(loss, want_loss, rtol=1e-6, atol=0)
    assert (logits - want_logits).abs().max() <= 1e-6 * want_logits.abs().max()
    assert got.keys() == want.keys() and any(g.any() for g in got.values())
    for n, grad in got.items():
        assert (grad - want[n]).abs().max() <= 1e-5 * want[n].abs().max(), n
