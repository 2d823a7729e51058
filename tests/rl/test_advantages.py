"""What answers are to learn, from their rewards."""

import math
from dataclasses import replace
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from dolmen.ops.loss import IGNORED
from dolmen.rl.config import RolloutConfig
from dolmen.rl.generation import degenerate_groups, resample_degenerate_groups
from dolmen.rl.iteration import PPORolloutBatches
from dolmen.rl.rollout import make_rollout
from dolmen.rl.targets import compute_advantages

PROMPTS = [[1, 2], [1, 2], [3], [3]]
ANSWERS = [[5, 6], [7, 8, 9], [4], [4, 4, 5, 6]]
REWARDS = [1.0, 3.0, -1.0, 0.5]
NAN = math.nan


def learned(rewards=REWARDS, **options) -> list[list[float]]:
    """Of each answer the advantages of its tokens; the policy is 0.1 ahead of the reference at each
    of them, and 0.2 ahead of what has drawn.
    """
    made = make_rollout(PROMPTS, ANSWERS, [[-1.0] * len(a) for a in ANSWERS], 16, 2)
    made = replace(
        made,
        rewards=torch.tensor(rewards),
        old_logprobs=made.sampled_logprobs + 0.2,
        reference_logprobs=made.sampled_logprobs + 0.1,
    )
    made = compute_advantages(made, RolloutConfig(num_generations=2, **options))
    here = made.labels != IGNORED
    assert not made.advantages[~here].any()
    return [row[own].tolist() for row, own in zip(made.advantages, here, strict=True)]


def compute_over_rows(*advantages) -> list:
    return [
        pytest.approx([one] * len(a), rel=1e-4, abs=1e-6)
        for one, a in zip(advantages, ANSWERS, strict=True)
    ]


def test_by_the_group():
    d = [1 / math.sqrt(2), 0.75 / stdev([-1.0, 0.5])]
    assert learned() == compute_over_rows(-d[0], d[0], -d[1], d[1])
    assert learned(scale_rewards="none") == compute_over_rows(-1, 1, -0.75, 0.75)
    whole = stdev(REWARDS)
    assert learned(scale_rewards="batch") == compute_over_rows(
        -1 / whole, 1 / whole, -0.75 / whole, 0.75 / whole
    )


def test_by_the_others():
    assert learned(advantage_estimator="rloo") == compute_over_rows(-2, 2, -1.5, 1.5)


def test_the_kl_of_an_answer_is_in_its_reward():
    """0.1 per token, weighed by 2: 0.4, 0.6, 0.2 and 0.8 less."""
    found = learned(advantage_estimator="rloo", reward_kl_coef=2.0)
    assert found == compute_over_rows(0.6 - 2.4, 2.4 - 0.6, -1.2 + 0.3, -0.3 + 1.2)


@pytest.mark.parametrize("baseline", [False, True])
def test_by_tokens(baseline):
    """REINFORCE++: rewards from each token on, at mean 0 and variance 1 over all tokens."""
    kind = "reinforce-plus-plus-baseline" if baseline else "reinforce-plus-plus"
    found = learned(advantage_estimator=kind, reward_kl_coef=2.0)
    scores = [-1, 1, -0.75, 0.75] if baseline else REWARDS
    returns = [
        [score - 0.2 * (len(a) - t) for t in range(len(a))]
        for score, a in zip(scores, ANSWERS, strict=True)
    ]
    mean, deviation = fmean(sum(returns, [])), stdev(sum(returns, []))
    for got, row in zip(found, returns, strict=True):
        assert got == pytest.approx([(one - mean) / deviation for one in row], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    "kind", ["grpo", "rloo", "reinforce-plus-plus", "reinforce-plus-plus-baseline"]
)
def test_an_answer_without_a_reward_says_nothing(kind):
    """Its group has another one, which alone has none to be compared with; the other group is as it
    would be without it.
    """
    found = learned([NAN, 3.0, -1.0, 0.5], advantage_estimator=kind)
    assert found[0] == [0, 0]
    if kind != "reinforce-plus-plus":
        assert found[2][0] < 0 < found[3][0]
    if kind in ("grpo", "rloo"):
        assert found[1] == [0, 0, 0] and found[2:] == learned(advantage_estimator=kind)[2:]


def test_what_was_drawn_with_other_probabilities_is_weighed():
    plain = learned(scale_rewards="none")
    for cap, by in ((2.0, math.exp(0.2)), (1.1, 1.1)):
        found = learned(scale_rewards="none", importance_sampling_cap=cap)
        for got, row in zip(found, plain, strict=True):
            assert got == pytest.approx([by * one for one in row], rel=1e-4)


def test_by_a_teacher():
    """Which finds each token less likely by 0.1."""
    assert learned(advantage_estimator="distillation") == compute_over_rows(-0.1, -0.1, -0.1, -0.1)


def test_groups_from_which_nothing_is_learned():
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, NAN, 2.0, NAN, NAN])
    assert degenerate_groups(rewards, 2).tolist() == [True, False, True, True]


class One(NamedTuple):
    group: int
    time: int
    reward: float


def test_groups_that_are_alike_are_replaced_and_no_others():
    """The second is told apart at first, the first the second time, the third never."""
    calls = []

    def draw(groups, time):
        calls.append((list(groups), time))
        separate = {(1, 0), (0, 2)}
        return [One(g, time, float(n * ((g, time) in separate))) for g in groups for n in range(2)]

    found, again = resample_degenerate_groups(draw, 3, 2, 3)
    assert calls == [([0, 1, 2], 0), ([0, 2], 1), ([0, 2], 2), ([2], 3)]
    assert [one[:2] for one in found] == [(0, 2), (0, 2), (1, 0), (1, 0), (2, 3), (2, 3)]
    assert again == (5, 1)
    assert resample_degenerate_groups(draw, 3, 2, 0)[1] == (0, 2)


@pytest.mark.parametrize(
    "options, why",
    [
        (
            dict(overlong_buffer=200),
            "rollout.overlong-buffer .200. exceeds rollout.max-new-tokens .128.",
        ),
        (dict(importance_sampling_cap=0.0), "importance-sampling-cap is 0.0"),
        (dict(max_resamples=-1), "resamples is -1"),
        (dict(advantage_estimator="distillation", max_resamples=2), "rollout.max-resamples .2."),
        (dict(reward_kl_coef=-0.1), "reward-kl-coef is -0.1"),
    ],
)
def test_what_is_refused(options, why):
    with pytest.raises(ValueError, match=why):
        RolloutConfig(**options)


def test_how_far_from_what_has_drawn_is_bounded():
    config = RolloutConfig(num_generations=4, prompts=4, epochs=2, max_off_policy_steps=3)
    assert config.updates(8) == 4
    with pytest.raises(ValueError, match="has 8 updates .* set --rollout.max-off-policy-steps 7"):
        config.updates(4)


@pytest.mark.parametrize("estimator", ("k1", "k3"))
def test_the_kl_of_a_completion_is_that_of_its_trained_tokens(estimator):
    """Summed over them, the mean of completions with any; what is left out counts for nothing."""
    trained = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()
    old = torch.tensor([[-1.0, -2.0, -9.0], [-0.5, -7.0, -7.0], [-3.0, -3.0, -3.0]])
    reference = torch.tensor([[-1.5, -1.0, -1.0], [-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])
    rollout = SimpleNamespace(trained=trained, old_logprobs=old, reference_logprobs=reference)
    batches = SimpleNamespace(
        models=SimpleNamespace(reference=object()), ppo=SimpleNamespace(kl_estimator=estimator)
    )

    def of(difference: float) -> float:
        return difference if estimator == "k1" else math.exp(-difference) - 1 + difference

    found = PPORolloutBatches.kl_per_completion(batches, rollout)
    assert found == pytest.approx((of(0.5) + of(-1.0) + of(0.5)) / 2)
    batches.models.reference = None
    assert PPORolloutBatches.kl_per_completion(batches, rollout) == 0
