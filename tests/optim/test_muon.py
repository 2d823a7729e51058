"""Muon in one process, in float64, against a plain one written from the papers; whose parameters
it takes; what a checkpoint keeps of it; and Newton-Schulz.
"""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from tiny_models import Flat, Tiny, build, initialize, tiny
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dolmen.core.mesh import SINGLE
from dolmen.model.spec.param import Role
from dolmen.optim import muon as newton_schulz
from dolmen.optim.config import MuonConfig, OptimizerConfig
from dolmen.optim.muon import flops, orthogonalize
from dolmen.optim.optimizer import KINDS, RULES, make_optimizer, names, prime, set_step, tensors

SIZES = dict(
    vocab_size=71,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    head_dim=8,
)
EXPERTS = Flat(
    **SIZES,
    num_key_value_heads=1,
    qk_norm=True,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
)
BIASED = Flat(
    **SIZES,
    num_key_value_heads=2,
    max_position_embeddings=12,
    position="learned",
    norm="layernorm",
    mlp="plain",
    activation="gelu_tanh",
    attention_bias=True,
    output_bias=True,
    mlp_bias=True,
    tie_word_embeddings=True,
)
LATENT = tiny(
    "deepseek_v3",
    vocab_size=71,
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=2,
    num_hidden_layers=2,
    q_lora_rank=10,
    kv_lora_rank=6,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=7,
    first_k_dense_replace=1,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    n_group=1,
    topk_group=1,
    n_shared_experts=1,
)
MODELS = {"experts": EXPERTS, "biased": BIASED, "latent": LATENT}
MUON = OptimizerConfig(name="muon", lr=0.02, weight_decay=0.1, beta1=0.8, beta2=0.9, eps=1e-3)


def model(config: Flat | Tiny = EXPERTS, dtype: torch.dtype = torch.float64) -> nn.Module:
    made = build(config, SINGLE, dtype=dtype)
    initialize(made, 0)
    return made


def random_gradients(made: nn.Module, seed: int = 0) -> None:
    chance = torch.Generator().manual_seed(seed)
    for p in made.parameters():
        p.grad = torch.randn(p.shape, generator=chance, dtype=p.dtype) if p.requires_grad else None


def is_hidden(name: str) -> bool:
    """Whether the papers mean it by a hidden matrix, of a model of this file."""
    last = name.split(".")[-2:]
    outside = ("embed", "positions", "head", "router")
    return last[1] == "weight" and "norm" not in last[0] and last[0] not in outside


def five_steps(g: Tensor) -> Tensor:
    """Jordan (2024): Newton-Schulz of the fifth order, on the side that is shorter."""
    x = g / (g.norm() + 1e-7)
    if g.shape[0] > g.shape[1]:
        x = x.mT
    for _ in range(5):
        a = x @ x.mT
        b = -4.7750 * a + 2.0315 * a @ a
        x = 3.4445 * x + b @ x
    return x.mT if g.shape[0] > g.shape[1] else x


class Papers:
    """Muon as Jordan (2024) has it, with Liu et al.'s (2502.16982) decay and scale, equation 4;
    AdamW (1711.05101, algorithm 2).
    """

    def __init__(self, made: nn.Module, config: OptimizerConfig):
        self.c, self.t = config, 0
        self.w = {n: p.detach().clone() for n, p in made.named_parameters() if p.requires_grad}
        self.m, self.v = ({n: torch.zeros_like(p) for n, p in self.w.items()} for _ in range(2))

    def update(self, gradients: dict[str, Tensor]) -> None:
        self.t += 1
        for n, w in self.w.items():
            if is_hidden(n):
                pieces = zip(w, self.m[n], gradients[n], strict=True)
                for one in pieces if w.ndim == 3 else [(w, self.m[n], gradients[n])]:
                    self.muon(*one)
            else:
                self.adamw(w, self.m[n], self.v[n], gradients[n])

    def muon(self, w: Tensor, m: Tensor, g: Tensor) -> None:
        mu, lr = self.c.muon.momentum, self.c.lr
        m.copy_(mu * m + g)
        o = five_steps(g + mu * m)
        w.copy_(w - lr * (0.2 * o * math.sqrt(max(w.shape)) + self.c.weight_decay * w))

    def adamw(self, w: Tensor, m: Tensor, v: Tensor, g: Tensor) -> None:
        c = self.c
        m.copy_(c.beta1 * m + (1 - c.beta1) * g)
        v.copy_(c.beta2 * v + (1 - c.beta2) * g * g)
        decay = c.weight_decay if w.ndim > 1 else 0
        step = (m / (1 - c.beta1**self.t)) / ((v / (1 - c.beta2**self.t)).sqrt() + c.eps)
        w.copy_(w - c.lr * (step + decay * w))


@pytest.mark.parametrize("name", MODELS)
def test_muon_is_the_papers(name):
    """A dozen updates; each expert by itself, q, k and v apart."""
    made = model(MODELS[name])
    optimizer, papers = make_optimizer(made, MUON, SINGLE), Papers(made, MUON)
    assert any(map(is_hidden, papers.w)) and not all(map(is_hidden, papers.w))
    for t in range(12):
        random_gradients(made, t)
        with torch.no_grad():
            papers.update({n: p.grad for n, p in made.named_parameters() if p.grad is not None})
        optimizer.step()
    for n, p in made.named_parameters():
        if p.requires_grad:
            assert (p - papers.w[n]).abs().max() < 1e-11, n


def test_every_role_has_a_rule_and_matrices_have_muons():
    for name, rules in RULES.items():
        assert rules.keys() == set(get_args(Role)) and set(rules.values()) <= KINDS.keys(), name
    for name, config in MODELS.items():
        params = config.spec.params
        by_muon = {n for n, param in params.items() if RULES["muon"][param.role] == "muon"}
        assert by_muon == set(filter(is_hidden, params)), name


def test_a_checkpoint_has_what_the_rule_of_each_parameter_keeps():
    for config in MODELS.values():
        made = model(config)
        kept = tensors(made, make_optimizer(made, MUON, SINGLE))
        assert kept.keys() == names(made.spec.params, "muon")
        for n, p in made.named_parameters():
            kinds = ("momentum",) if is_hidden(n) else ("exp_avg", "exp_avg_sq")
            found = {
                kind for kind in ("momentum", "exp_avg", "exp_avg_sq") if f"{kind}/{n}" in kept
            }
            assert found == (set(kinds) if p.requires_grad else set()), n
        assert tensors(made, primed(made)).keys() == names(made.spec.params, "adamw")


def primed(made: nn.Module):
    optimizer = make_optimizer(made, OptimizerConfig(), SINGLE)
    prime(optimizer)
    return optimizer


def test_frozen_parameters_have_no_state_and_stay():
    made = model()
    frozen = ("embed.weight", "layers.0.attn.q.weight", "layers.1.mlp.experts.up.weight")
    for n in frozen:
        made.get_parameter(n).requires_grad_(False)
    before = {n: made.get_parameter(n).clone() for n in frozen}
    optimizer = make_optimizer(made, MUON, SINGLE)
    random_gradients(made)
    optimizer.step()
    kept = tensors(made, optimizer)
    for n in frozen:
        assert f"model/{n}" in kept and sum(name.endswith(f"/{n}") for name in kept) == 1
        assert torch.equal(made.get_parameter(n), before[n])
    for n, p in made.named_parameters():
        p.requires_grad_(is_hidden(n))
    assert {n.split("/")[0] for n in tensors(made, make_optimizer(made, MUON, SINGLE))} == {
        "model",
        "momentum",
    }
    for p in made.parameters():
        p.requires_grad_(False)
    nothing = make_optimizer(made, MUON, SINGLE)  # of a stage without an adapter
    nothing.step()
    assert not nothing.state


def test_what_a_checkpoint_keeps_goes_on_bitwise():
    """Two updates, then everything into a fresh pair, then a third: as if it had been one."""
    (one, first), (two, second) = ((m, make_optimizer(m, MUON, SINGLE)) for m in (model(), model()))
    for t in (1, 2):
        random_gradients(one, t)
        first.step()
    with torch.no_grad():
        for name, value in tensors(one, first).items():
            tensors(two, second)[name].copy_(value)
    set_step(second, 2)
    for made, optimizer in ((one, first), (two, second)):
        random_gradients(made, 3)
        optimizer.step()
        optimizer.zero_grad()
    assert all(s["step"] == 3 for s in second.state.values())
    assert all(p.grad is None for p in two.parameters())
    after = tensors(two, second)
    assert all(torch.equal(value, after[name]) for name, value in tensors(one, first).items())


def test_learning_rate_and_decay_are_those_of_the_groups():
    """A rate of 0 changes nothing; without gradients all that is by Muon shrinks."""
    made = model()
    optimizer = make_optimizer(made, MUON, SINGLE)
    before = {n: p.detach().clone() for n, p in made.named_parameters()}
    for lr, factor in ((0.0, 1.0), (0.5, 1 - 0.5 * MUON.weight_decay)):
        for group in optimizer.param_groups:
            group["lr"] = lr
        for p in made.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        for n, p in made.named_parameters():
            if is_hidden(n):
                assert torch.allclose(p, before[n] * factor, rtol=1e-14), n


def random(rows: int, columns: int) -> Tensor:
    chance = torch.Generator().manual_seed(rows * columns)
    return torch.randn(rows, columns, generator=chance, dtype=torch.float64)


@pytest.mark.parametrize("shape", [(48, 48), (32, 96), (96, 32), (1, 7)])
def test_singular_values_come_near_one(shape):
    """Their vectors stay. What began over a hundredth lies in 0.6 to 1.3."""
    g = random(*shape)
    u, s, v = torch.linalg.svd(g, full_matrices=False)
    out = orthogonalize(g, torch.float64)
    values = torch.diagonal(u.mT @ out @ v.mT)
    assert torch.allclose(u @ torch.diag(values) @ v, out, atol=1e-12)
    began = s / s.norm()
    assert all(0.6 < x < 1.3 for x in values[began > 0.01])
    assert torch.allclose(orthogonalize(g * 1e6, torch.float64), out, atol=1e-9)
    assert not orthogonalize(g * 0, torch.float64).any()


def test_half_precision_and_fp32_are_near_and_keep_the_dtype_of_the_parameter():
    g = random(64, 96)
    want = orthogonalize(g, torch.float64)
    assert (orthogonalize(g.float(), torch.float32) - want).abs().max() < 1e-5
    half = orthogonalize(g.float(), torch.bfloat16)
    assert half.dtype == torch.bfloat16 and 1e-4 < (half - want).abs().max() < 0.05
    ended = {}
    for dtype in ("float32", "bfloat16"):
        made = model(dtype=torch.float32)
        optimizer = make_optimizer(made, replace(MUON, muon=MuonConfig(dtype=dtype)), SINGLE)
        random_gradients(made)
        optimizer.step()
        assert {p.dtype for p in made.parameters()} == {torch.float32}
        ended[dtype] = made.layers["0"].attn.q.weight
    assert 1e-6 < (ended["float32"] - ended["bfloat16"]).abs().max() < 0.05 * MUON.lr


def test_the_norm_of_four_million_is_not_added_one_by_one(monkeypatch):
    """Where there are no steps what is left is G / |G|; fp32 squares added so are 1e-3 off."""
    monkeypatch.setattr(newton_schulz, "STEPS", 0)
    x = orthogonalize(torch.full((1 << 11, 1 << 11), 0.1), torch.float32)
    assert abs(x.double().norm().item() - 1) < 1e-6


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)])
def test_flops_are_those_computed(shape):
    with FlopCounterMode(display=False) as counted:
        orthogonalize(random(*shape), torch.float64)
    assert counted.get_total_flops() == flops(*shape)


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("optimizer.muon.momentum is 1.0: it must be less than 1", dict(muon=dict(momentum=1.0))),
        (
            "momentum is 0.9, but optimizer.name is adamw: set --optimizer.name muon",
            dict(name="adamw", muon=dict(momentum=0.9)),
        ),
        (
            "muon.dtype is bfloat16, but optimizer.name is adamw",
            dict(name="adamw", muon=dict(dtype="bfloat16")),
        ),
    ],
)
def test_what_is_refused(words, given):
    with pytest.raises(ValueError, match=words):
        OptimizerConfig(**{**dict(name="muon"), **given, "muon": MuonConfig(**given["muon"])})
