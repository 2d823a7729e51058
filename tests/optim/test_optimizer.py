"""AdamW against its definition; what decays and what does not; what is refused."""

import pytest
import torch
from torch import nn

from dolmen.core.mesh import SINGLE
from dolmen.model.config import ModelConfig
from dolmen.optim.optimizer import OptimizerConfig, adamw, prime, set_step, tensors
from dolmen.train.build import build, initialize

GPT2 = ModelConfig(vocab_size=11, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
                   head_dim=4, max_position_embeddings=8, position="learned", norm="layernorm", mlp="plain", attention_bias=True,
                   output_bias=True, mlp_bias=True, tie_word_embeddings=True)
QWEN3 = ModelConfig(vocab_size=11, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                    head_dim=4, qk_norm=True)


def model(config=GPT2) -> nn.Module:
    made = build(config, SINGLE)
    initialize(made, 0)
    return made


@pytest.mark.parametrize("config", (GPT2, QWEN3), ids=("gpt2", "qwen3"))
def test_norms_and_biases_do_not_decay(config):
    """With zero gradients a step is decay alone: w (1 - lr decay) for matrices, nothing for norms and biases."""
    m = model(config)
    with torch.no_grad():
        for p in m.parameters(): p.add_(1.0)
    before = {n: p.detach().clone() for n, p in m.named_parameters()}
    optimizer = adamw(m, OptimizerConfig(lr=0.5, weight_decay=0.1))
    for p in m.parameters(): p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in m.named_parameters():
        vector = name.endswith("bias") or "norm" in name
        assert torch.equal(p, before[name]) if vector else torch.allclose(p, before[name] * 0.95, rtol=1e-6), name
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in m.parameters()}


def test_against_the_definition():
    """Three updates of AdamW (1711.05101), algorithm 2, in fp64."""
    c = OptimizerConfig(lr=0.1, weight_decay=0.3, beta1=0.8, beta2=0.9, eps=1e-4)
    layer = nn.Linear(3, 4, bias=False, dtype=torch.float64)
    optimizer, w = adamw(layer, c), layer.weight.detach().clone()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t in range(1, 4):
        g = torch.randn(4, 3, dtype=torch.float64)
        layer.weight.grad = g.clone()
        optimizer.step()
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        w = w * (1 - 0.1 * 0.3) - 0.1 * (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-4)
        torch.testing.assert_close(layer.weight.detach(), w, rtol=1e-12, atol=1e-12)


def test_frozen_parameters_are_left_out():
    m = model()
    for name, p in m.named_parameters(): p.requires_grad_("mlp" in name)
    trained = {id(p) for g in adamw(m, OptimizerConfig()).param_groups for p in g["params"]}
    assert trained == {id(p) for n, p in m.named_parameters() if "mlp" in n}


def test_prime_changes_no_update():
    """A state of zeros made before the first step is the state that AdamW would have made; the step count is put back by `set_step`."""
    one, two = model(), model()
    first, second = adamw(one, OptimizerConfig(lr=0.1)), adamw(two, OptimizerConfig(lr=0.1))
    prime(second)
    names = set(tensors(two, second))
    assert names == {f"{kind}/{n}" for kind in ("model", "exp_avg", "exp_avg_sq") for n, _ in two.named_parameters()}
    for step in range(3):
        if step == 2: set_step(second, 2)
        for m, o in ((one, first), (two, second)):
            for i, p in enumerate(m.parameters()): p.grad = torch.full_like(p, 0.1 * (i + step + 1))
            o.step()
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize(("options", "said"), [
    (dict(lr=-1.0), "optimizer.lr is -1.0"), (dict(lr=float("nan")), "optimizer.lr is nan"), (dict(weight_decay=-0.1), "optimizer.weight-decay"),
    (dict(beta2=1.0), "optimizer.beta2 (1.0)"), (dict(decay_fraction=0.0), "optimizer.decay-fraction is 0.0"),
    (dict(clip=-1.0), "optimizer.clip is -1.0"), (dict(warmup_steps=-1), "optimizer.warmup-steps is -1"),
], ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_refused(options, said):
    with pytest.raises(ValueError) as error: OptimizerConfig(**options)
    assert said in str(error.value)
