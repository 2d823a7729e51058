"""Advantages: from scores, log-probabilities and values to rewards, advantages and returns of each
token, [rows, tokens]. Only `kl` has a gradient.

Compared with TRL (trl/trainer/ppo_trainer.py, grpo_trainer.py), OpenRLHF (openrlhf/models/utils.py,
openrlhf/trainer/ppo_utils/experience_maker.py) and verl (verl/trainer/ppo/core_algos.py); where
these differ, a docstring names whose formula is the default, and an argument chooses the other.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from dolmen.objectives import masked

Estimator = Literal["k1", "k2", "k3"]


def kl(
    policy: Float[Tensor, "rows tokens"],
    reference: Float[Tensor, "rows tokens"],
    *,
    estimator: Estimator,
) -> Float[Tensor, "rows tokens"]:
    """Estimate KL(policy || reference) per token, from the log-probabilities that both models give
    to tokens sampled from the policy (Schulman, joschu.net/blog/kl-approx):

        d = policy - reference        k1 = d        k2 = d^2 / 2        k3 = exp(-d) - 1 + d

    k1 and k3 are unbiased, k2 and k3 are never negative. OpenRLHF's compute_approx_kl, TRL's
    (k1, k3), and verl's kl_penalty (kl, mse, low_var_kl) but for its bounds: verl cuts d at 20 and
    k3 at 10, which is not done here.
    """
    return kl_of_difference(policy - reference, estimator)


def kl_of_difference(
    d: Float[Tensor, "rows tokens"], estimator: Estimator
) -> Float[Tensor, "rows tokens"]:
    """Return the estimate of the KL per token from differences d of log-probabilities, policy -
    reference: d (k1), d^2 / 2 (k2) or exp(-d) - 1 + d (k3). Raises ValueError for an unknown
    estimator.
    """
    match estimator:
        case "k1":
            return d
        case "k2":
            return d.square() / 2
        case "k3":
            # exp(-d) - 1 without the digits that 1 would take
            return torch.expm1(-d) + d
    raise ValueError(f"estimator is {estimator!r}: it must be one of {Estimator.__args__}")


@torch.no_grad()
def token_rewards(
    scores: Float[Tensor, " rows"],
    policy: Float[Tensor, "rows tokens"],
    reference: Float[Tensor, "rows tokens"],
    mask: Shaped[Tensor, "rows tokens"],
    *,
    kl: Estimator = "k1",
    kl_coef: float,
    clip: float | tuple[float, float] | None = None,
) -> Float[Tensor, "rows tokens"]:
    """Return rewards per token: -kl_coef KL at each valid token, plus the row's score at its last
    one (2203.02155, equation 2); 0 elsewhere. The score of a row without valid tokens is lost.

    `clip` bounds the score, to -clip .. clip or to a pair of bounds, and never the KL. OpenRLHF's
    compute_reward (`reward_clip_range`), TRL's PPOTrainer (without a clip) and verl's
    apply_kl_penalty, which has the score where its reward function has put it.
    """
    valid = masked.valid_tokens(mask)
    if clip is not None:
        low, high = clip if isinstance(clip, tuple) else (-clip, clip)
        # the score is clipped, and never the KL penalty
        scores = scores.clamp(low, high)
    # 0 outside of the mask: k1, k2 and k3 of a difference of 0 are 0
    penalty = -kl_coef * kl_of_difference(masked.zero_outside(policy - reference, valid), kl)
    return penalty + scores[:, None] * last_token(mask)


def last_token(mask: Shaped[Tensor, "rows tokens"]) -> Shaped[Tensor, "rows tokens"]:
    """Return whether each token is the last valid one of its row; nowhere in a row without valid
    tokens.
    """
    valid = masked.valid_tokens(mask)
    # valid tokens from here to the end of the row: 1
    return valid & (valid.flip(1).cumsum(1).flip(1) == 1)


@torch.no_grad()
def gae(
    rewards: Float[Tensor, "rows tokens"],
    values: Float[Tensor, "rows tokens"],
    mask: Shaped[Tensor, "rows tokens"],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    holes: Literal["skipped", "steps"] = "skipped",
) -> tuple[Float[Tensor, "rows tokens"], Float[Tensor, "rows tokens"]]:
    """Return generalised advantages (1506.02438, equation 16), computed backwards over the valid
    tokens, and returns, which are advantages + values; both 0 elsewhere, neither whitened:

        delta_t = r_t + gamma V_next - V_t        A_t = delta_t + gamma lam A_next

    "next" is the next valid token; after the last one V and A are 0, so padding never bootstraps,
    whatever values it has. A hole in the mask is skipped: its rewards and values are not read, and
    it takes no power of gamma or lam, as in verl's compute_gae_advantage_return. In OpenRLHF's
    get_advantages_and_returns a hole is a step of value and reward 0: holes="steps". TRL has no
    holes. All three whiten advantages afterwards, verl and TRL by the unbiased variance.
    """
    if holes not in ("skipped", "steps"):
        raise ValueError(f"holes is {holes!r}: it must be 'skipped' or 'steps'")
    valid = masked.valid_tokens(mask)
    # steps at which V and A move backwards
    steps = valid if holes == "skipped" else torch.ones_like(valid)
    rewards, values = masked.zero_outside(rewards, valid), masked.zero_outside(values, valid)
    value = advantage = values.new_zeros(len(values))
    backwards = []
    for t in reversed(range(values.shape[1])):
        # TD error: V_next is 0 after the last valid token
        delta = rewards[:, t] + gamma * value - values[:, t]
        advantage = torch.where(steps[:, t], delta + gamma * lam * advantage, advantage)
        # a skipped hole keeps V and A of the next valid token
        value = torch.where(steps[:, t], values[:, t], value)
        backwards.append(advantage)
    advantages = torch.stack(backwards[::-1], 1) if backwards else torch.zeros_like(values)
    advantages = masked.zero_outside(advantages, valid)
    return advantages, advantages + values


@torch.no_grad()
def whiten(
    values: Float[Tensor, "rows tokens"],
    mask: Shaped[Tensor, "rows tokens"],
    *,
    eps: float = 1e-8,
) -> Float[Tensor, "rows tokens"]:
    """Normalise to mean 0 and variance 1 over the valid tokens, 0 elsewhere:

        (v - mean) / sqrt(variance + eps)

    The variance is the unbiased one: TRL's and verl's masked_whiten; OpenRLHF takes the biased one.
    A single token, and equal values, become exactly 0.
    """
    valid = masked.valid_tokens(mask)
    values = values - values[valid][:1].sum()  # exact, as in `_center_by_group`; 0 without tokens
    centred = masked.zero_outside(values - masked.token_mean(values, valid), valid)
    # unbiased: n - 1
    variance = centred.square().sum() / (valid.sum() - 1).clamp(min=1)
    return centred * (variance + eps).rsqrt()


@torch.no_grad()
def normalize_by_group(
    scores: Float[Tensor, " rows"],
    groups: Int[Tensor, " rows"],
    *,
    eps: float = 1e-4,
    variance: Literal["unbiased", "biased"] = "unbiased",
    scale: Literal["group", "batch", "none"] = "group",
) -> Float[Tensor, " rows"]:
    """Return each score minus the mean of its group, in standard deviations (2402.03300, section
    4.1.2), for groups of any sizes in any order:

        (s - mean) / (std + eps)

    The variance is the unbiased one, as torch.std's in TRL's GRPOTrainer, OpenRLHF's `group_norm`
    and verl's compute_grpo_outcome_advantage; "biased" divides by the size of the group, as
    numpy.std does. `scale` chooses the standard deviation: of the group, of all scores (TRL's
    scale_rewards="batch"), or none (Dr. GRPO, 2503.20783; verl's norm_adv_by_std_in_grpo=False).

    Equal scores, and a group of one, have advantage 0. (For a group of one TRL replaces a NaN by 0,
    and verl keeps the score.) Raises ValueError for another `variance` or `scale`.
    """
    if variance not in ("unbiased", "biased"):
        raise ValueError(f"variance is {variance!r}: it must be 'unbiased' or 'biased'")
    # group numbers may have gaps: renumber them 0, 1, 2, ...
    _, group = torch.unique(groups, return_inverse=True)
    centred = _center_by_group(scores, group)
    match scale:
        case "none":
            return centred
        case "group":
            deviations, divisor_group = centred, group
        case "batch":
            divisor_group = torch.zeros_like(group)
            deviations = _center_by_group(scores, divisor_group)
        case _:
            raise ValueError(f"scale is {scale!r}: it must be 'group', 'batch' or 'none'")
    variances = _group_means(deviations.square(), divisor_group)
    if variance == "unbiased":
        size = torch.bincount(divisor_group)[divisor_group]
        variances = variances * size / (size - 1).clamp(min=1)
    return torch.where(centred == 0, 0.0, centred / (variances.sqrt() + eps))


@torch.no_grad()
def leave_one_out(
    scores: Float[Tensor, " rows"], groups: Int[Tensor, " rows"]
) -> Float[Tensor, " rows"]:
    """Return each score minus the mean of the others of its group (RLOO, 2402.14740, equation 6),
    computed as n / (n - 1) times its difference from the mean of all n:

        s_i - mean of s_j over j != i

    TRL's RLOOTrainer, OpenRLHF's `rloo` and verl's compute_rloo_outcome_advantage. A group of
    one has advantage 0; verl keeps the score.
    """
    _, group = torch.unique(groups, return_inverse=True)
    size = torch.bincount(group)[group]
    # s_i - mean of the others = n / (n - 1) (s_i - mean of all)
    others_count = (size - 1).clamp(min=1)
    return _center_by_group(scores, group) * size / others_count


@torch.no_grad()
def reinforce(
    rewards: Float[Tensor, "rows tokens"],
    mask: Shaped[Tensor, "rows tokens"],
    *,
    gamma: float = 1.0,
) -> Float[Tensor, "rows tokens"]:
    """REINFORCE++ (2501.03262, section 3): the discounted sum of the rewards from each token on, as
    `token_rewards` returns them with the KL, whitened over all given tokens (an iteration):

        R_t = r_t + gamma R_next        (R_t - mean) / standard deviation

    OpenRLHF's get_cumulative_returns (with the biased variance) and verl's
    compute_reinforce_plus_plus_outcome_advantage. With scores minus the mean of their group it is
    REINFORCE++-baseline. Holes are skipped, as in `gae`.
    """
    # without values and with lambda 1, GAE is the discounted return
    _, returns = gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)
    return whiten(returns, mask)


@torch.no_grad()
def distillation(
    policy: Float[Tensor, "rows tokens"],
    teacher: Float[Tensor, "rows tokens"],
    mask: Shaped[Tensor, "rows tokens"],
) -> Float[Tensor, "rows tokens"]:
    """Advantages of on-policy distillation: teacher - policy log-probability of each sampled token,
    0 elsewhere. As an advantage it descends the reverse KL(policy || teacher) of the next token,
    whose estimate k1 is its negative; a token gets no credit for later ones (a discount of 0: Lu et
    al., 2025, thinkingmachines.ai/blog/on-policy-distillation; 2306.13649 has the divergence of
    whole distributions).
    """
    return masked.zero_outside(teacher - policy, masked.valid_tokens(mask))


@torch.no_grad()
def overlong_penalty(
    lengths: Int[Tensor, " rows"], *, max_length: int, buffer: int
) -> Float[Tensor, " rows"]:
    """Return DAPO's soft overlong punishment of completions with these `lengths` (2503.14476,
    equation 13): 0 up to max_length - buffer, then -1 / buffer per token, down to -1 at max_length
    and above. verl's DAPO reward manager (`overlong_buffer`).
    """
    # tokens in the buffer at the end of the allowed length
    over = lengths - (max_length - buffer)
    return -(over / buffer).clamp(0, 1)


@torch.no_grad()
def importance_weights(
    trainer: Float[Tensor, "rows tokens"],
    sampled: Float[Tensor, "rows tokens"],
    mask: Shaped[Tensor, "rows tokens"],
    *,
    cap: float,
) -> Float[Tensor, "rows tokens"]:
    """Return the factor of each token's loss that corrects for a generator whose log-probabilities
    differ from the trainer's at the same weights: min(exp(trainer - sampled), cap), 0 outside of
    the mask.

    Truncated importance sampling (Yao et al., 2025, fengyao.notion.site/off-policy-rl): TRL's
    vllm_importance_sampling_cap (2.0), verl's tis_imp_ratio_cap; per token, not per sequence. The
    surrogate is linear in the advantage, so multiplying that has the same effect.
    """
    valid = masked.valid_tokens(mask)
    return masked.zero_outside(
        masked.zero_outside(trainer - sampled, valid).exp().clamp(max=cap), valid
    )


def _center_by_group(
    scores: Float[Tensor, " rows"], group: Int[Tensor, " rows"]
) -> Float[Tensor, " rows"]:
    """Return each score minus the mean of its group; groups are numbered 0, 1, 2, ...

    The smallest score of the group is subtracted first, so that equal scores are exactly 0 whatever
    they are: in fp32 the mean of eight scores of -237.3 is not -237.3, and dividing by the
    deviation would blow up what is left.
    """
    # the minimum of each group, by a scatter
    least = scores.new_full((int(group.max()) + 1 if len(group) else 0,), torch.inf)
    shifted = scores - least.scatter_reduce(0, group, scores, "amin")[group]
    return shifted - _group_means(shifted, group)


def _group_means(
    values: Float[Tensor, " rows"], group: Int[Tensor, " rows"]
) -> Float[Tensor, " rows"]:
    """Return for each row the mean of its group's values; groups are numbered 0, 1, 2, ..."""
    size = torch.bincount(group)
    sums = values.new_zeros(len(size)).index_add_(0, group, values)
    return (sums / size)[group]
