"""One update of PPO, of two models of the house, beside one that is written from the papers, token
by token in float64; and what is seen of it where something in it is wrong.
"""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from objectives import scalar
from table import FAMILIES
from tiny_models import Tiny, build, initialize

from dolmen.core.mesh import SINGLE
from dolmen.data.batch import Batch
from dolmen.model import head
from dolmen.model.layout import Layout
from dolmen.model.mlp import Router
from dolmen.objectives.on_policy import (
    ADVANTAGE,
    OLD,
    RETURN,
    VALUE,
    PPOPolicyLoss,
    PPOValueLoss,
)
from dolmen.ops.loss import IGNORED
from dolmen.optim import optimizer as optim
from dolmen.optim.config import OptimizerConfig
from dolmen.rl.config import PPOConfig
from dolmen.rl.rollout import PPORollout, make_rollout
from dolmen.rl.targets import compute_ppo_targets
from dolmen.training.state import PretrainingLoss, TrainState
from dolmen.training.step import optimizer_step

PROMPTS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]
ANSWERS = [[11, 12, 13], [14, 15, 16, 17], [18], [19, 20]]
REWARDS = [1.0, -9.0, 0.5, float("nan")]
"""The last answer has none."""
ASKED = PPOConfig(
    kl_estimator="k3", kl_coef=0.3, reward_clip=2.0, gamma=0.9, lam=0.8, dual_clip=1.2
)
OPTIMIZER = OptimizerConfig(lr=1e-2, clip=0.0, schedule="constant", weight_decay=0.1)
TEMPERATURE, CLIP = 0.8, 0.2


def random_rollout() -> PPORollout:
    """Answers with log-probabilities and values as another model may have had them."""
    made = make_rollout(PROMPTS, ANSWERS, [[0.0] * len(a) for a in ANSWERS], 16, 8)
    chance = torch.Generator().manual_seed(0)
    shape = made.tokens.shape
    old, reference = -4.0 + torch.rand((2, *shape), generator=chance)
    values = torch.randn(shape, generator=chance)
    rewards = torch.tensor(REWARDS)
    labels = torch.where(rewards[:, None].isnan(), IGNORED, made.labels)
    made = replace(
        made, labels=labels, rewards=rewards, old_logprobs=old, reference_logprobs=reference
    )
    return compute_ppo_targets(made, reference, values, ASKED, ASKED.kl_coef)


def places(row: int) -> range:
    """Where the tokens of an answer are foretold."""
    first = len(PROMPTS[row]) - 1
    return range(first, first + len(ANSWERS[row]))


def worth(made: PPORollout) -> tuple[dict, dict]:
    """Advantages and returns by (row, place), of the answers that have a reward."""
    advantages, returns = {}, {}
    for row in range(3):
        own = places(row)
        ahead, then = 0.0, 0.0
        for place in reversed(own):
            d = made.old_logprobs[row, place].item() - made.reference_logprobs[row, place].item()
            reward = -0.3 * (math.exp(-d) - 1 + d)
            if place == own[-1]:
                reward += max(-2.0, min(2.0, REWARDS[row]))
            value = made.values[row, place].item()
            ahead = reward + 0.9 * then - value + 0.9 * 0.8 * ahead
            then = value
            advantages[row, place], returns[row, place] = ahead, ahead + value
    mean = sum(advantages.values()) / len(advantages)
    variance = sum((a - mean) ** 2 for a in advantages.values()) / (len(advantages) - 1)
    return {at: (a - mean) / math.sqrt(variance) for at, a in advantages.items()}, returns


def test_what_a_token_is_worth():
    """2203.02155, equation 2, 1506.02438, equation 16, and the mean and variance of all tokens."""
    made = random_rollout()
    advantages, returns = worth(made)
    for row in range(4):
        for place in range(made.tokens.shape[1]):
            at = row, place
            assert made.advantages[at].item() == pytest.approx(advantages.get(at, 0.0), abs=1e-5)
            assert made.returns[at].item() == pytest.approx(returns.get(at, 0.0), abs=1e-5)
            assert (made.values[at] != 0) == (at in returns)


def state_of(config: Tiny, objective) -> TrainState:
    schedule = Layout().make_schedule(4, 2)
    model = build(config, SINGLE, Layout(), schedule, dtype=torch.float64)
    initialize(model, 3)
    optimizer = optim.make_optimizer(model, OPTIMIZER, SINGLE)
    optim.prime(optimizer)
    return TrainState(model, optimizer, OPTIMIZER, 10, 1, schedule, objective=objective)


def expected(state: TrainState, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parameters after one update of AdamW (1711.05101) by the gradient of `loss`."""
    named = dict(state.model.named_parameters())
    gradients = torch.autograd.grad(loss, list(named.values()))
    kept, lr = state.model.local_specs(), OPTIMIZER.lr
    out = {}
    for (name, p), g in zip(named.items(), gradients, strict=True):
        decay = 1 - lr * OPTIMIZER.weight_decay if kept[name].decays else 1.0
        # of a first step both moments are the gradient's own
        out[name] = p.detach() * decay - lr * g / (g.abs() + OPTIMIZER.eps)
    return out


def policy_loss(state: TrainState, made: PPORollout) -> torch.Tensor:
    """1707.06347, equation 7, and 1912.09729, equation 5."""
    logits = state.model(made.tokens, head.compute_logits)
    total = []
    for row in range(3):
        for place in places(row):
            p = (logits[row, place] / TEMPERATURE).log_softmax(-1)[made.labels[row, place]]
            r, a = (
                (p - made.old_logprobs[row, place].item()).exp(),
                made.advantages[row, place].item(),
            )
            one = torch.minimum(r * a, r.clamp(0.8, 1.2) * a)
            total.append(-(torch.maximum(one, torch.tensor(1.2 * a)) if a < 0 else one))
    return torch.stack(total).mean()


def undecided_loss(state: TrainState, made: PPORollout) -> torch.Tensor:
    """Less 0.3 times the entropy of each token's distribution (1602.01783, section 4)."""
    logits = state.model(made.tokens, head.compute_logits)
    p = torch.cat([logits[row, list(places(row))] for row in range(3)]) / TEMPERATURE
    p = p.softmax(-1)
    return policy_loss(state, made) + 0.3 * (p * p.log()).sum(-1).mean()


def value_loss(state: TrainState, made: PPORollout) -> torch.Tensor:
    """Half the mean of the larger square."""
    rows = state.model(made.tokens, lambda hidden, end: end.values(hidden))
    total = []
    for row in range(3):
        for place in places(row):
            v, old = rows[row, place], made.values[row, place].item()
            want = made.returns[row, place].item()
            near = old + (v - old).clamp(-CLIP, CLIP)
            total.append(torch.maximum((v - want) ** 2, (near - want) ** 2) / 2)
    return torch.stack(total).mean()


TEXT = Batch(
    torch.arange(32).view(4, 8) % 30,
    torch.where(torch.arange(32).view(4, 8) < 2, IGNORED, (torch.arange(32).view(4, 8) + 1) % 30),
)
"""Rows that have nothing to do with what is drawn, the first of fewer labels."""
POLICY = PPOPolicyLoss(0.2, 0.2, ASKED.dual_clip, TEMPERATURE)
UNDECIDED = PPOPolicyLoss(0.2, 0.2, ASKED.dual_clip, TEMPERATURE, 0.3)
MODELS = {
    "policy": (FAMILIES["llama"], POLICY, policy_loss),
    "undecided": (FAMILIES["llama"], UNDECIDED, undecided_loss),
    "critic": (scalar(FAMILIES["llama"]), PPOValueLoss(CLIP), value_loss),
}


@pytest.mark.parametrize("kind", MODELS)
def test_an_update_is_that_of_a_plain_loop(kind):
    """Where a gradient is about eps, an update is a quotient of rounding: 1e-7, of 1e-2."""
    config, objective, loss = MODELS[kind]
    made, state = random_rollout(), state_of(config, objective)
    wanted = loss(state, made)
    after = expected(state, wanted)
    metrics = optimizer_step(state, made.batch(slice(0, 4)), SINGLE)
    assert metrics.loss == pytest.approx(wanted.item(), rel=1e-12)
    for name, p in state.model.named_parameters():
        assert torch.allclose(p, after[name], rtol=0, atol=1e-7), name


def text_loss(state: TrainState) -> torch.Tensor:
    """The mean of -log p over the labels there are."""
    logits = state.model(TEXT.tokens, head.compute_logits)
    return F.cross_entropy(logits.flatten(0, 1), TEXT.labels.flatten(), ignore_index=IGNORED)


def with_text(weight: float) -> tuple[TrainState, PPORollout]:
    config, objective, _ = MODELS["policy"]
    state = state_of(config, objective)
    state.pretraining = PretrainingLoss(weight, lambda step: TEXT)
    return state, random_rollout()


def test_text_beside_adds_its_gradient():
    """2203.02155, equation 2, in the form of both gradients computed apart."""
    state, made = with_text(27.8)
    policy, text = policy_loss(state, made), text_loss(state)
    after = expected(state, policy + 27.8 * text)
    metrics = optimizer_step(state, made.batch(slice(0, 4)), SINGLE)
    assert metrics.loss == pytest.approx((policy + 27.8 * text).item(), rel=1e-12)
    assert metrics.objective["objective/pretraining_loss"] == pytest.approx(text.item(), rel=1e-12)
    assert metrics.tokens == 8 + 30  # those of three answers and of the text
    for name, p in state.model.named_parameters():
        assert torch.allclose(p, after[name], rtol=0, atol=1e-7), name


def router_losses(state: TrainState, batch: Batch) -> torch.Tensor:
    """Of every layer of experts, the mean over sequences of how uneven tokens are (2101.03961,
    equation 4) and the square of the logits' sum (2202.08906, equation 5), a twentieth of each.
    """
    seen: list[torch.Tensor] = []
    routers = [module for module in state.model.modules() if isinstance(module, Router)]
    hooks = [one.register_forward_hook(lambda m, x, y: seen.append(y[0])) for one in routers]
    state.model(
        batch.tokens, head.compute_logits, documents=batch.documents, positions=batch.positions
    )
    for hook in hooks:
        hook.remove()
    total = torch.zeros((), dtype=torch.float64)
    for logits in (one.view(*batch.tokens.shape, -1) for one in seen):
        chosen = torch.zeros_like(logits).scatter_(-1, logits.topk(2).indices, 1.0)
        uneven = (8 * chosen.mean(1) / 2 * logits.softmax(-1).mean(1)).sum(-1)
        total = total + 0.05 * (uneven + logits.logsumexp(-1).square().mean(1)).mean()
    return total


def test_losses_of_routers_are_not_weighed_as_text_is():
    """Those of the text count as those of what is drawn do, and the cross-entropy alone more."""
    made, state = random_rollout(), state_of(FAMILIES["qwen3-moe"], POLICY)
    state.pretraining, given = PretrainingLoss(27.8, lambda step: TEXT), made.batch(slice(0, 4))
    loss = policy_loss(state, made) + 27.8 * text_loss(state)
    after = expected(state, loss + router_losses(state, given) + router_losses(state, TEXT))
    metrics = optimizer_step(state, given, SINGLE)
    assert metrics.loss == pytest.approx(loss.item(), rel=1e-12)
    for name, p in state.model.named_parameters():
        assert torch.allclose(p, after[name], rtol=0, atol=1e-7), name


def test_text_of_no_weight_is_as_none():
    state, made = with_text(0.0)
    alone = state_of(*MODELS["policy"][:2])
    for one in (state, alone):
        optimizer_step(one, made.batch(slice(0, 4)), SINGLE)
    for (name, p), q in zip(state.model.named_parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(p, q), name


def off_by_one(batch: Batch) -> Batch:
    """Log-probabilities and values of the token before."""
    moved = {name: batch.numbers[name].roll(1, 1) for name in (OLD, VALUE)}
    return replace(batch, numbers={**batch.numbers, **moved})


def flipped(batch: Batch) -> Batch:
    moved = {name: -batch.numbers[name] for name in (ADVANTAGE, RETURN)}
    return replace(batch, numbers={**batch.numbers, **moved})


def shuffled(batch: Batch) -> Batch:
    moved = {name: batch.numbers[name].roll(1, 0) for name in (ADVANTAGE, RETURN)}
    return replace(batch, numbers={**batch.numbers, **moved})


@pytest.mark.parametrize("wrong", [off_by_one, flipped, shuffled])
@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_what_is_wrong_is_seen(kind, wrong):
    config, objective, loss = MODELS[kind]
    made, state = random_rollout(), state_of(config, objective)
    wanted = loss(state, made).item()
    metrics = optimizer_step(state, wrong(made.batch(slice(0, 4))), SINGLE)
    assert abs(metrics.loss / wanted - 1) > 1e-2


def test_a_batch_without_numbers_is_refused():
    made = random_rollout().batch(slice(0, 4))
    for objective, name in ((POLICY, ADVANTAGE), (PPOValueLoss(), RETURN)):
        numbers = {other: each for other, each in made.numbers.items() if other != name}
        with pytest.raises(ValueError, match=f"batch lacks: {name}"):
            objective.count(replace(made, numbers=numbers))
