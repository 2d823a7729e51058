"""What PPO keeps of a phase, and how its KL is held."""

from dataclasses import fields, replace

import pytest
import torch

from dolmen.files.gate import Refused
from dolmen.objectives.advantage import whiten
from dolmen.rl import rollout
from dolmen.rl.config import CriticConfig, PPOConfig
from dolmen.rl.rollout import PPORollout, make_rollout
from dolmen.rl.targets import KLController, compute_ppo_targets

PLAIN = PPOConfig(whiten_advantages=False)


def two(kl_coef: float = 0.05, asked: PPOConfig = PLAIN) -> PPORollout:
    made = make_rollout([[1, 2, 3], [4]], [[5, 6], [7, 8, 9]], [[-0.5] * 2, [-0.7] * 3], 16, 4)
    made = replace(made, rewards=torch.tensor([1.0, 2.0]), old_logprobs=made.sampled_logprobs)
    values = torch.full(made.tokens.shape, 0.25)
    return compute_ppo_targets(made, made.old_logprobs - 0.1, values, asked, kl_coef)


def test_a_file_is_read_as_it_was_written(tmp_path):
    made = two(1 / 3)
    rollout.save(made, tmp_path, 8, [])
    found = rollout.load(tmp_path, 8, 2, PPORollout)
    assert found is not None and float(found.kl_coef) == 1 / 3
    for one in fields(PPORollout):
        assert torch.equal(vars(made)[one.name], vars(found)[one.name]), one.name


def test_a_file_of_another_kind_is_refused(tmp_path):
    """A run that had no critic."""
    plain = make_rollout([[1, 2]], [[3]], [[-0.5]], 16, 4)
    rollout.save(plain, tmp_path, 0, [])
    with pytest.raises(Refused, match="kl_coef"):
        rollout.load(tmp_path, 0, 1, PPORollout)


def test_the_kl_is_taken_from_each_token_and_the_reward_is_at_the_last():
    """At gamma and lambda 1 a return is what is still to come."""
    made = two(asked=PPOConfig(lam=1.0, whiten_advantages=False))
    assert made.returns[0].tolist() == pytest.approx([0, 0, 1 - 0.01, 1 - 0.005])
    assert made.returns[1].tolist() == pytest.approx([2 - 0.015, 2 - 0.01, 2 - 0.005, 0])


def test_whitened_over_all_tokens_and_holes_are_not_read():
    values = torch.tensor([[1.0, 5.0, float("nan")], [3.0, float("inf"), 7.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    found = whiten(values, mask)
    here = found[mask == 1]
    assert here.mean().abs() < 1e-6 and here.var() == pytest.approx(1.0)
    assert found[mask == 0].tolist() == [0, 0]
    one = torch.ones(1, 3)
    assert whiten(one, one).abs().max() == 0


def test_the_coefficient_holds_a_target():
    """1909.08593, section 2.2, per answer: up where the KL is over it, by a fifth at most."""
    held = KLController(0.1, target=6.0, horizon=1000)
    assert held.next_value(0.1, 6.0, 100) == 0.1
    assert held.next_value(0.1, 6.6, 100) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert held.next_value(0.1, 600.0, 100) == pytest.approx(0.1 * (1 + 0.2 * 0.1))
    assert held.next_value(0.1, 0.0, 100) == pytest.approx(0.1 * (1 - 0.2 * 0.1))
    # without a target it is what the options say, whatever a phase before was drawn with
    assert KLController(0.1, None, 1000).next_value(0.2, 600.0, 100) == 0.1


def test_what_a_critic_explains():
    made = two()
    returns = torch.tensor([[0, 0, 1.0, 2.0], [3.0, 4.0, 5.0, 0]])
    assert replace(made, returns=returns, values=returns).explained_variance() == pytest.approx(1)
    assert replace(made, returns=returns).explained_variance() == pytest.approx(0)
    assert replace(made, returns=returns, values=-returns).explained_variance() == pytest.approx(-3)
    assert made.entropy() == pytest.approx((0.5 * 2 + 0.7 * 3) / 5)


@pytest.mark.parametrize(
    "said, why",
    [
        (dict(gamma=1.1), "ppo.gamma is 1.1: it must be at most 1"),
        (dict(lam=-0.1), "ppo.lam is -0.1"),
        (dict(kl_coef=-1.0), "ppo.kl-coef is -1.0: it must be at least 0"),
        (dict(kl_target=0.0), "ppo.kl-target is 0.0: it must be over 0"),
        (dict(kl_target=6.0, kl_coef=0.0), r"ppo.kl-target \(6\) adapts ppo.kl-coef"),
        (dict(reward_clip=float("inf")), "ppo.reward-clip is inf"),
        (dict(dual_clip=1.0), "ppo.dual-clip is 1.0: it must be over 1"),
    ],
)
def test_what_cannot_be_is_refused(said, why):
    with pytest.raises(ValueError, match=why):
        PPOConfig(**said)


def test_what_no_critic_can_be_is_refused():
    with pytest.raises(ValueError, match="critic.lr is -1.0"):
        CriticConfig(lr=-1.0)
    with pytest.raises(ValueError, match="critic.clip is nan"):
        CriticConfig(clip=float("nan"))
    with pytest.raises(ValueError, match="critic.warmup-steps is -1"):
        CriticConfig(warmup_steps=-1)
