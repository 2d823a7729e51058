"""Experts that are remembered and replayed: of the same weights nothing changes, of others tokens
go where they went, by the router's weights of now.
"""

from dataclasses import replace

import pytest
import table
import torch
from table import FAMILIES, SINGLE, Layout

from dolmen.data.batch import Batch
from dolmen.model.mlp import Router
from dolmen.model.routing_replay import choice_slices
from dolmen.objectives import forward
from dolmen.objectives.on_policy import ADVANTAGE, OLD, PPOPolicyLoss
from dolmen.ops import moe
from dolmen.training.state import TrainState
from dolmen.training.step import optimizer_step

MODEL = FAMILIES["qwen3-moe"]


def start() -> TrainState:
    return table.start(MODEL, SINGLE, Layout(), objective=PPOPolicyLoss(), dtype=torch.float64)


def batch() -> Batch:
    made = table.batches(SINGLE)[0]
    sampled = torch.rand(2, *made.tokens.shape, generator=torch.Generator().manual_seed(0)).double()
    return replace(made, numbers={OLD: -4 + sampled[0], ADVANTAGE: sampled[1] - 0.5})


def remembered(state: TrainState, given: Batch) -> Batch:
    found = forward.routed_log_probabilities(state.model, given, SINGLE, state.schedule)
    alone = forward.log_probabilities(state.model, given, SINGLE, state.schedule)
    assert torch.equal(found[..., 0], alone)
    return replace(given, experts=found[..., 1:].long())


def moved(state: TrainState) -> None:
    """Routers that would choose otherwise."""
    chance = torch.Generator().manual_seed(1)
    for module in state.model.modules():
        if isinstance(module, Router):
            with torch.no_grad():
                noise = torch.randn(module.weight.shape, generator=chance, dtype=torch.float64)
                module.weight.add_(noise)


def chosen(state: TrainState, given: Batch) -> torch.Tensor:
    """By every layer in a step, as `Batch.experts` has them."""
    seen, hooks = [], []
    for module in state.model.modules():
        if isinstance(module, Router):
            hooks.append(
                module.register_forward_hook(lambda *reported: seen.append(reported[2][1]))
            )
    optimizer_step(state, given, SINGLE)
    for hook in hooks:
        hook.remove()
    layers = len(choice_slices(MODEL.spec))
    micros = [
        torch.cat([one.experts for one in seen[i : i + layers]], 1)
        for i in range(0, len(seen), layers)
    ]
    return torch.cat(micros).view(*given.tokens.shape, -1)


def test_with_the_same_weights_nothing_changes_to_the_bit():
    plain, again = start(), start()
    given = batch()
    reported = [
        optimizer_step(plain, given, SINGLE),
        optimizer_step(again, remembered(again, given), SINGLE),
    ]
    assert reported[0] == reported[1]
    for p, q in zip(plain.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_after_a_large_step_tokens_go_where_they_went():
    state, other = start(), start()
    given = remembered(state, batch())
    moved(state), moved(other)
    assert torch.equal(chosen(state, given), given.experts)
    would = chosen(other, batch())
    assert (would != given.experts).double().mean() > 0.5


@pytest.mark.parametrize("score_of", ["softmax", "sigmoid"])
def test_weights_and_gradients_are_of_now(score_of):
    """Beside a loop over tokens and choices, in float64."""
    chance = torch.Generator().manual_seed(2)
    logits = torch.randn(5, 8, generator=chance, dtype=torch.float64, requires_grad=True)
    experts = torch.stack([torch.randperm(8, generator=chance)[:3] for _ in range(5)])
    cotangent = torch.randn(5, 3, generator=chance, dtype=torch.float64)
    found = moe.route(logits, 3, True, torch.ones(8), score=score_of, scale=2.0, experts=experts)
    assert found.experts is experts
    (got,) = torch.autograd.grad((found.weights * cotangent).sum(), logits)
    total = torch.zeros((), dtype=torch.float64)
    for token in range(5):
        made = logits[token].exp() if score_of == "softmax" else logits[token].sigmoid()
        among = sum(made[e] for e in experts[token])
        for place, e in enumerate(experts[token]):
            weight = 2 * made[e] / among
            assert found.weights[token, place].item() == pytest.approx(weight.item(), rel=1e-12)
            total = total + weight * cotangent[token, place]
    (want,) = torch.autograd.grad(total, logits)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_of_a_model_without_experts_none_are_asked():
    state = table.start(FAMILIES["llama"], SINGLE, Layout(), dtype=torch.float64)
    with pytest.raises(ValueError, match="this one has no experts"):
        forward.routed_log_probabilities(state.model, batch(), SINGLE, state.schedule)
