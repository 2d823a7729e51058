"""How much better than expected: from scores, log-probabilities and values to rewards, advantages
and returns of each token. Nothing here has a gradient but `kl`.

Compared with TRL (trl/trainer/ppo_trainer.py, grpo_trainer.py), OpenRLHF (openrlhf/models/utils.py,
openrlhf/trainer/ppo_utils/experience_maker.py) and verl (verl/trainer/ppo/core_algos.py); where
these differ, a docstring says whose formula is the default, and an argument chooses the other.
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
    """Of each token, from the log-probabilities that two models give it, an estimate of
    KL(policy || reference) for tokens that the policy drew (Schulman, joschu.net/blog/kl-approx):

        d = policy - reference        k1 = d        k2 = d^2 / 2        k3 = exp(-d) - 1 + d

    k1 and k3 have the right mean, k2 and k3 are never negative. OpenRLHF's compute_approx_kl, TRL's
    (k1, k3), and verl's kl_penalty (kl, mse, low_var_kl) but for its bounds: verl cuts d at 20 and
    k3 at 10, which is not done here.
    """
    return kl_of_difference(policy - reference, estimator)


def kl_of_difference(
    d: Float[Tensor, "rows tokens"], estimator: Estimator
) -> Float[Tensor, "rows tokens"]:
    """`kl` of differences of log-probabilities."""
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
    """Of each token that counts -kl_coef KL, and of the last of a row its score besides
    (2203.02155, equation 2); 0 elsewhere, so of a row without a token its score is nowhere.

    `clip` bounds the score, to -clip .. clip or to a pair of bounds, and never the KL. OpenRLHF's
    compute_reward (`reward_clip_range`), TRL's PPOTrainer (without a clip) and verl's
    apply_kl_penalty, which has the score where its reward function has put it.
    """
    here = masked.counted(mask)
    if clip is not None:
        low, high = clip if isinstance(clip, tuple) else (-clip, clip)
        scores = scores.clamp(low, high)
    penalty = -kl_coef * kl_of_difference(masked.only(policy - reference, here), kl)
    return penalty + scores[:, None] * last_token(mask)


def last_token(mask: Shaped[Tensor, "rows tokens"]) -> Shaped[Tensor, "rows tokens"]:
    """Whether a token is the last of its row that counts."""
    here = masked.counted(mask)
    return here & (here.flip(1).cumsum(1).flip(1) == 1)


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
    """Generalised advantage estimation (1506.02438, equation 16), backwards over the tokens that
    count, and returns, which are advantages + values; both 0 elsewhere, neither whitened:

        delta_t = r_t + gamma V_next - V_t        A_t = delta_t + gamma lam A_next

    The next of a token is the next that counts, and of the last there is none: its V and A are 0,
    so padding never bootstraps, whatever values stand in it. What a hole holds (rewards, values) is
    not read, and no power of gamma or lam is spent on it: verl's compute_gae_advantage_return. For
    OpenRLHF's get_advantages_and_returns a hole is a step of value and reward 0: holes="steps". TRL
    knows none. All three whiten advantages afterwards, verl and TRL by the unbiased variance.
    """
    if holes not in ("skipped", "steps"):
        raise ValueError(f"holes is {holes!r}: it must be 'skipped' or 'steps'")
    here = masked.counted(mask)
    moves = here if holes == "skipped" else torch.ones_like(here)
    rewards, values = masked.only(rewards, here), masked.only(values, here)
    value = advantage = values.new_zeros(len(values))
    backwards = []
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * value - values[:, t]
        advantage = torch.where(moves[:, t], delta + gamma * lam * advantage, advantage)
        value = torch.where(moves[:, t], values[:, t], value)
        backwards.append(advantage)
    advantages = torch.stack(backwards[::-1], 1) if backwards else torch.zeros_like(values)
    advantages = masked.only(advantages, here)
    return advantages, advantages + values


@torch.no_grad()
def whiten(
    values: Float[Tensor, "rows tokens"],
    mask: Shaped[Tensor, "rows tokens"],
    *,
    eps: float = 1e-8,
) -> Float[Tensor, "rows tokens"]:
    """At mean 0 and variance 1 over the tokens that count, 0 elsewhere:

        (v - mean) / sqrt(variance + eps)

    The variance is the unbiased one: TRL's and verl's masked_whiten; OpenRLHF takes the biased one.
    Of one token, and of values that are all alike, nothing is left but 0.
    """
    here = masked.counted(mask)
    values = values - values[here][:1].sum()  # as of `_centred`; 0 where no token counts
    centred = masked.only(values - masked.token_mean(values, here), here)
    variance = centred.square().sum() / (here.sum() - 1).clamp(min=1)
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
    """By how many standard deviations of its group each score is above the mean of its group
    (2402.03300, section 4.1.2), of groups of any sizes and in any order:

        (s - mean) / (std + eps)

    The variance is the unbiased one, as torch.std's in TRL's GRPOTrainer, OpenRLHF's `group_norm`
    and verl's compute_grpo_outcome_advantage; "biased" divides by the size of the group, as
    numpy.std does. `scale`: by the deviation of the group, of all scores together (TRL's
    scale_rewards="batch"), or by none (Dr. GRPO, 2503.20783; verl's norm_adv_by_std_in_grpo=False).

    Scores that are all alike, and one alone, have an advantage of 0: nothing says that they are
    good. (For one alone TRL makes 0 of a NaN, and verl leaves the score as it is.)
    """
    if variance not in ("unbiased", "biased"):
        raise ValueError(f"variance is {variance!r}: it must be 'unbiased' or 'biased'")
    _, group = torch.unique(groups, return_inverse=True)
    centred = _centred(scores, group)
    match scale:
        case "none":
            return centred
        case "group":
            off, among = centred, group
        case "batch":
            among = torch.zeros_like(group)
            off = _centred(scores, among)
        case _:
            raise ValueError(f"scale is {scale!r}: it must be 'group', 'batch' or 'none'")
    square = _means(off.square(), among)
    if variance == "unbiased":
        size = torch.bincount(among)[among]
        square = square * size / (size - 1).clamp(min=1)
    return torch.where(centred == 0, 0.0, centred / (square.sqrt() + eps))


@torch.no_grad()
def leave_one_out(
    scores: Float[Tensor, " rows"], groups: Int[Tensor, " rows"]
) -> Float[Tensor, " rows"]:
    """By how much each score is above the mean of the others of its group (RLOO, 2402.14740,
    equation 6), of n that is n / (n - 1) times how much it is above the mean of all:

        s_i - mean of s_j over j != i

    TRL's RLOOTrainer, OpenRLHF's `rloo` and verl's compute_rloo_outcome_advantage. Of one alone it
    is 0, as nothing says that it is good; verl leaves the score as it is.
    """
    _, group = torch.unique(groups, return_inverse=True)
    size = torch.bincount(group)[group]
    others = (size - 1).clamp(min=1)
    return _centred(scores, group) * size / others


@torch.no_grad()
def reinforce(
    rewards: Float[Tensor, "rows tokens"],
    mask: Shaped[Tensor, "rows tokens"],
    *,
    gamma: float = 1.0,
) -> Float[Tensor, "rows tokens"]:
    """REINFORCE++ (2501.03262, section 3): of each token the sum of the rewards from it on, as of
    `token_rewards`, which have the KL in them; then `whiten` over all tokens that are given, so
    over a whole phase of answers:

        R_t = r_t + gamma R_next        (R_t - mean) / standard deviation

    OpenRLHF's get_cumulative_returns (with the biased variance) and verl's
    compute_reinforce_plus_plus_outcome_advantage. Of scores less the mean of their group it is
    REINFORCE++-baseline. A hole is no step, as of `gae`.
    """
    _, returns = gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)
    return whiten(returns, mask)


@torch.no_grad()
def distillation(
    policy: Float[Tensor, "rows tokens"],
    teacher: Float[Tensor, "rows tokens"],
    mask: Shaped[Tensor, "rows tokens"],
) -> Float[Tensor, "rows tokens"]:
    """On-policy distillation: teacher - policy of each token that the policy drew, 0 elsewhere. So
    a policy gradient descends the reverse KL(policy || teacher) of the next token, of which -(it)
    is the estimate k1, and no token answers for those after it (a discount of 0: Lu et al., 2025,
    thinkingmachines.ai/blog/on-policy-distillation; 2306.13649 has the divergence, of whole
    distributions).
    """
    return masked.only(teacher - policy, masked.counted(mask))


@torch.no_grad()
def overlong_penalty(
    lengths: Int[Tensor, " rows"], *, max_length: int, buffer: int
) -> Float[Tensor, " rows"]:
    """What is added to the reward of an answer of so many tokens (DAPO's soft punishment,
    2503.14476, equation 13): 0 up to max_length - buffer, then less by 1 / buffer per token, down
    to -1 at max_length and over. verl's DAPO reward manager (`overlong_buffer`).
    """
    over = lengths - (max_length - buffer)
    return -(over / buffer).clamp(0, 1)


@torch.no_grad()
def importance_weights(
    trained: Float[Tensor, "rows tokens"],
    drawn: Float[Tensor, "rows tokens"],
    mask: Shaped[Tensor, "rows tokens"],
    *,
    cap: float,
) -> Float[Tensor, "rows tokens"]:
    """Of each token by what its loss is multiplied where the program that drew it computes other
    log-probabilities than training does, of the same weights: min(exp(trained - drawn), cap); 0
    where no token counts.

    Truncated importance sampling (Yao et al., 2025, fengyao.notion.site/off-policy-rl): TRL's
    vllm_importance_sampling_cap (2.0), verl's tis_imp_ratio_cap; of tokens, not of sequences. A
    surrogate is linear in its advantage, so it is the same to multiply that.
    """
    here = masked.counted(mask)
    return masked.only(masked.only(trained - drawn, here).exp().clamp(max=cap), here)


def _centred(scores: Float[Tensor, " rows"], group: Int[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """Each score less the mean of its group, where groups are 0, 1, 2, ...

    The least score of the group is taken off first, so that equal scores are exactly 0 whatever
    they are: in fp32 the mean of eight scores of -237.3 is not -237.3, and dividing by the
    deviation would blow up what is left.
    """
    least = scores.new_full((int(group.max()) + 1 if len(group) else 0,), torch.inf)
    shifted = scores - least.scatter_reduce(0, group, scores, "amin")[group]
    return shifted - _means(shifted, group)


def _means(values: Float[Tensor, " rows"], group: Int[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """Of each row the mean over its group, where groups are 0, 1, 2, ..."""
    size = torch.bincount(group)
    sums = values.new_zeros(len(size)).index_add_(0, group, values)
    return (sums / size)[group]
