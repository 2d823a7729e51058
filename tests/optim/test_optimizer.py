"""AdamW, against its paper in fp64; what decays; what a checkpoint keeps of it; and the norm that
clipping needs.
"""

import pytest
import torch
from tiny_models import Flat, build, initialize
from torch import nn

from dolmen.core.mesh import SINGLE
from dolmen.optim.optimizer import OptimizerConfig, adamw, prime, set_step, tensors
from dolmen.parallel.data import gradient_norm, scale_gradients

# biases, q and k norms, layer norms, learned positions: every kind of parameter there is
CONFIG = Flat(
    vocab_size=71,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=12,
    position="learned",
    norm="layernorm",
    qk_norm=True,
    attention_bias=True,
    output_bias=True,
    mlp_bias=True,
)


def model() -> nn.Module:
    made = build(CONFIG, SINGLE)
    initialize(made, 0)
    return made


def random_gradients(made: nn.Module, seed: int = 0) -> None:
    chance = torch.Generator().manual_seed(seed)
    for p in made.parameters():
        p.grad = torch.randn(p.shape, generator=chance)


def test_norms_and_biases_do_not_decay():
    """With no gradient all that moves is decay: matrices shrink by 1 - lr x decay, vectors stay
    bitwise.
    """
    made = model()
    optimizer = adamw(made, OptimizerConfig(lr=0.5, weight_decay=0.2))
    before = {n: p.detach().clone() for n, p in made.named_parameters()}
    for p in made.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    stayed = {
        n for n, p in made.named_parameters() if torch.equal(p, before[n]) and before[n].any()
    }
    for n, p in made.named_parameters():
        vector = n.endswith(".bias") or "norm" in n
        assert (
            torch.equal(p, before[n])
            if vector
            else torch.allclose(p, before[n] * (1 - 0.5 * 0.2), rtol=1e-6)
        ), n
    # the five norms are not zero
    assert len(stayed) == 5 and all(group["fused"] for group in optimizer.param_groups)


def test_adamw_is_the_papers():
    """1711.05101, algorithm 2, in fp64: three updates of every parameter."""
    made, c = model(), OptimizerConfig(lr=0.01, weight_decay=0.1, beta1=0.8, beta2=0.9, eps=1e-3)
    optimizer = adamw(made, c)
    want = {n: p.detach().double() for n, p in made.named_parameters()}
    m, v = ({n: torch.zeros_like(p) for n, p in want.items()} for _ in range(2))
    for t in (1, 2, 3):
        random_gradients(made, t)
        for n, p in made.named_parameters():
            g = p.grad.double()
            m[n], v[n] = c.beta1 * m[n] + (1 - c.beta1) * g, c.beta2 * v[n] + (1 - c.beta2) * g * g
            decay = c.weight_decay if p.ndim > 1 else 0
            want[n] = want[n] * (1 - c.lr * decay) - c.lr * (m[n] / (1 - c.beta1**t)) / (
                (v[n] / (1 - c.beta2**t)).sqrt() + c.eps
            )
        optimizer.step()
    for n, p in made.named_parameters():
        assert (p - want[n]).abs().max() < 1e-6, n


def test_frozen_parameters_are_left_out():
    made = model()
    made.embed.weight.requires_grad_(False)
    optimizer = adamw(made, OptimizerConfig())
    prime(optimizer)
    kept = tensors(made, optimizer)
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(made.parameters())) - 1
    assert (
        "model/embed.weight" in kept
        and "exp_avg/embed.weight" not in kept
        and "exp_avg_sq/head.weight" in kept
    )
    for p in made.parameters():
        p.requires_grad_(False)
    nothing = adamw(made, OptimizerConfig())  # of a stage without an adapter
    nothing.step()
    assert not nothing.state


def test_what_a_checkpoint_keeps_goes_on_bitwise():
    """Two updates, then everything into a fresh pair, then a third: as if it had been one."""
    c, pairs = OptimizerConfig(lr=0.01), []
    for _ in range(2):
        made = model()
        optimizer = adamw(made, c)
        prime(optimizer)
        pairs.append((made, optimizer))
    (one, first), (two, second) = pairs
    for t in (1, 2):
        random_gradients(one, t)
        first.step()
    with torch.no_grad():
        for name, value in tensors(one, first).items():
            tensors(two, second)[name].copy_(value)
    set_step(second, 2)
    for made, optimizer in pairs:
        random_gradients(made, 3)
        optimizer.step()
    assert all(
        torch.equal(value, tensors(two, second)[name])
        for name, value in tensors(one, first).items()
    )
    assert len(tensors(one, first)) == 3 * len(list(one.parameters()))


def test_priming_changes_no_update():
    a, b = model(), model()
    for made, early in ((a, True), (b, False)):
        optimizer = adamw(made, OptimizerConfig(lr=0.01))
        if early:
            prime(optimizer)
        random_gradients(made)
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_a_checkpoint_of_what_has_no_state_is_refused():
    made = model()
    with pytest.raises(KeyError):
        tensors(made, adamw(made, OptimizerConfig()))


def test_the_norm_of_ten_million_gradients():
    """Within 1e-6 of fp64. Summed one by one in fp32, as torch does on a CPU, it is 4e-4 off.
    Elements that are all equal round all the same way: the worst there is, within 1e-5.
    """
    p = nn.Parameter(torch.empty(10_000_000))
    for gradient, tolerance in (
        (torch.randn(10_000_000, generator=torch.Generator().manual_seed(0)), 1e-6),
        (torch.full((10_000_000,), 0.1), 1e-5),
    ):
        p.grad = gradient
        want = gradient.double().norm().item()
        assert abs(gradient_norm([p], SINGLE).item() / want - 1) < tolerance


def test_the_norm_is_of_all_parameters_and_counts_no_missing_gradient():
    made = model()
    random_gradients(made)
    made.head.weight.grad = None
    want = (
        torch.cat([p.grad.flatten() for p in made.parameters() if p.grad is not None])
        .double()
        .norm()
        .item()
    )
    assert gradient_norm(made.parameters(), SINGLE).item() == pytest.approx(want, rel=1e-6)
    scale_gradients(made.parameters(), torch.tensor(0.25))
    assert gradient_norm(made.parameters(), SINGLE).item() == pytest.approx(want / 4, rel=1e-6)
    assert gradient_norm([nn.Parameter(torch.zeros(3))], SINGLE).item() == 0.0
