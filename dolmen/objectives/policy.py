"""Policy losses (PPO, GRPO and its variants) and the value loss of a critic: pure functions of
log-probabilities, advantages, values and returns, [rows, tokens].

`new` are the log-probabilities in the policy that is trained, `old` those in the policy that
sampled the completions.
Compared with TRL (trl/trainer/ppo_trainer.py, grpo_trainer.py), OpenRLHF (openrlhf/models/loss.py)
and verl (verl/trainer/ppo/core_algos.py); where these differ, a docstring says whose formula is the
default, and an argument chooses the other.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from dolmen.objectives import advantage, masked
from dolmen.objectives.masked import Empty, Metrics, Reduce

Kind = Literal["grpo", "bnpo", "dr-grpo", "dapo", "gspo", "cispo"]
Level = Literal["token", "sequence"]


def ppo_loss(
    new: Float[Tensor, "rows tokens"],
    old: Float[Tensor, "rows tokens"],
    advantages: Float[Tensor, "rows tokens"],
    mask: Shaped[Tensor, "rows tokens"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    reduce: Reduce = "token-mean",
    empty: Empty = "left-out",
    entropy: Float[Tensor, "rows tokens"] | None = None,
    entropy_coef: float = 0.0,
) -> tuple[Float[Tensor, ""], Metrics]:
    """PPO's clipped surrogate (1707.06347, equation 7), of each token

        r = exp(new - old)        -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    and with `dual_clip` c > 1, where A < 0, at most -c A (1912.09729, equation 5). Its mean over
    all tokens, or over rows of their means: OpenRLHF's PolicyLoss (token_level_loss), verl's
    compute_policy_loss_vanilla (loss_agg_mode token-mean, seq-mean-token-mean; it cuts new - old at
    20, which is not done here), TRL's PPOTrainer (tokens alone, no dual clip). Rows without a valid
    token are left out of the mean, as in verl's agg_loss and OpenRLHF; with empty="counted" they
    count. entropy_coef times `entropy` is subtracted, whether the ratio is clipped or not.

    Metrics: the shares of tokens that are clipped and dual-clipped, the mean ratio, and estimates
    of KL(old || new) by k1, as verl's ppo_kl, and by k3. Raises ValueError for a `dual_clip` of 1
    or less.
    """
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip is {dual_clip}: it must be over 1, or None")
    valid = masked.valid_tokens(mask)
    # 0 outside of the mask before exp: an inf there would make NaN gradients
    ratio = (masked.zero_outside(new - old, valid)).exp()
    advantages = masked.zero_outside(advantages, valid)
    losses, is_clipped = _surrogate(ratio, advantages, clip_low, clip_high)
    metrics = _ratio_metrics(new, old, ratio, is_clipped, valid)
    if dual_clip is not None:
        # for A < 0 the surrogate grows with r without bound: at most -c A
        bound = -dual_clip * advantages
        over = (advantages < 0) & (losses > bound)
        losses = torch.where(over, bound, losses)
        metrics["dual_clip_fraction"] = masked.fraction(over, valid)
    losses = _subtract_entropy_bonus(losses, entropy, entropy_coef, valid, metrics)
    return masked.aggregate(losses, valid, reduce, empty), metrics


def grpo_loss(
    new: Float[Tensor, "rows tokens"],
    old: Float[Tensor, "rows tokens"],
    reference: Float[Tensor, "rows tokens"] | None,
    advantages: Float[Tensor, " rows"] | Float[Tensor, "rows tokens"],
    mask: Shaped[Tensor, "rows tokens"],
    *,
    kind: Kind = "grpo",
    beta: float = 0.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    level: Level = "token",
    max_length: int | None = None,
    empty: Empty = "counted",
    entropy: Float[Tensor, "rows tokens"] | None = None,
    entropy_coef: float = 0.0,
) -> tuple[Float[Tensor, ""], Metrics]:
    """GRPO (2402.03300, equation 3) and its variants, as TRL's GRPOTrainer has them: per token
    `ppo_loss`'s surrogate, without a dual clip, + beta k3(new, reference), aggregated by kind:

        grpo       the mean over rows of their means
        bnpo       the mean over tokens
        dapo       the same, with clip_high over clip_low (2503.14476, equation 8). All tokens of a
                   step are to be given at once: TRL divides by those of the global batch
        dr-grpo    the sum over tokens / (rows max_length) (2503.20783). verl divides by the width
                   of the mask instead, which changes with what a batch was padded to: say that
        gspo       as grpo, of ratios of sequences (2507.18071)
        cispo      the mean over tokens of -sg(clip(r, 1 - clip_low, 1 + clip_high)) A new, whose
                   gradient no token loses (2506.13585, equation 4; verl). TRL bounds r above alone,
                   by its epsilon_high: clip_low=1, clip_high=epsilon_high - 1

    By `level` sequence, r of all tokens of a row is exp of the mean of new - old over them, whose
    gradient each token has a share of (TRL's importance_sampling_level; GSPO's equation 7). Kind
    gspo at level token is GSPO-token (its equation 14; verl's compute_policy_loss_gspo): the same
    r, through which each token's gradient is its own. They differ where advantages do in a row.

    entropy_coef times the `entropy` of each token's distribution is subtracted (1602.01783, section
    4; entropy_coeff in TRL and verl).

    `reference` may be None where beta is 0. Rows without a valid token count in means over rows, as
    in TRL; empty="left-out" is verl's choice. Metrics: the share of clipped tokens, the mean ratio,
    k1 and k3 of KL(old || new), and the mean k3 from the reference. Raises ValueError for an
    unknown kind or level.
    """
    if beta and reference is None:
        raise ValueError(
            f"beta is {beta}: it is the weight of the KL from a reference model, but none is given"
        )
    valid = masked.valid_tokens(mask)
    # one advantage per completion: each of its tokens has it
    advantages = advantages[:, None].expand_as(new) if advantages.ndim == 1 else advantages
    advantages = masked.zero_outside(advantages, valid)
    ratio = _ratios(masked.zero_outside(new - old, valid), valid, kind, level)
    losses, is_clipped = _surrogate(ratio, advantages, clip_low, clip_high)
    if kind == "cispo":
        # CISPO clips the weight, not the gradient: new has one at every token
        bounded = ratio.detach().clamp(1 - clip_low, 1 + clip_high)
        losses, is_clipped = (
            -bounded * advantages * masked.zero_outside(new, valid),
            bounded != ratio,
        )
    metrics = _ratio_metrics(new, old, ratio, is_clipped, valid)
    if reference is not None:
        # k3 of new from the reference: not negative, and with a gradient
        kl = advantage.kl(
            masked.zero_outside(new, valid), masked.zero_outside(reference, valid), estimator="k3"
        )
        # GRPO has the KL in the loss, PPO in the rewards
        losses = losses + beta * kl
        metrics["reference_kl"] = masked.token_mean(kl, valid).detach()
    losses = _subtract_entropy_bonus(losses, entropy, entropy_coef, valid, metrics)
    return _aggregate_losses(losses, valid, kind, max_length, empty), metrics


def _subtract_entropy_bonus(
    losses: Float[Tensor, "rows tokens"],
    entropy: Float[Tensor, "rows tokens"] | None,
    coef: float,
    valid: Bool[Tensor, "rows tokens"],
    metrics: Metrics,
) -> Float[Tensor, "rows tokens"]:
    """Return the losses minus coef times the entropies, whose mean is added to `metrics`; unchanged
    losses where `entropy` is None.
    """
    if entropy is None:
        return losses
    metrics["entropy"] = masked.token_mean(entropy, valid).detach()
    return losses - coef * masked.zero_outside(entropy, valid)


def _ratios(
    log_ratios: Float[Tensor, "rows tokens"],
    valid: Bool[Tensor, "rows tokens"],
    kind: Kind,
    level: Level,
) -> Float[Tensor, "rows tokens"]:
    """Return the probability ratio new / old of each token. Level "token": its own; but for kind
    "gspo" the value is its row's ratio, and the gradient that of its own log-probability. Level
    "sequence": its row's, the geometric mean over valid tokens. Raises ValueError for an unknown
    level.
    """
    if level not in Level.__args__:
        raise ValueError(f"level is {level!r}: it must be one of {Level.__args__}")
    if level == "token" and kind != "gspo":
        return log_ratios.exp()
    # the geometric mean of the ratios of a row's tokens (GSPO, equation 7)
    mean = masked.row_means(log_ratios, valid)[:, None].expand_as(log_ratios)
    if level == "sequence":
        return mean.exp()
    # GSPO-token: the value of the row's ratio, the gradient of the token's own log-probability
    return (mean.detach() + log_ratios - log_ratios.detach()).exp()


def _surrogate(
    ratio: Float[Tensor, "rows tokens"],
    advantages: Float[Tensor, "rows tokens"],
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Tensor, "rows tokens"], Bool[Tensor, "rows tokens"]]:
    """Return the clipped surrogate loss of each token, and whether it is clipped and so has no
    gradient.
    """
    unclipped = ratio * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    # the minimum is a pessimistic bound: clipping never makes the loss smaller
    return -torch.minimum(unclipped, bounded), bounded < unclipped


def _aggregate_losses(
    losses: Float[Tensor, "rows tokens"],
    valid: Bool[Tensor, "rows tokens"],
    kind: Kind,
    max_length: int | None,
    empty: Empty,
) -> Float[Tensor, ""]:
    """Return the mean of token losses that belongs to the `kind`: over rows of their means (grpo,
    gspo), over tokens (bnpo, dapo, cispo), or the sum over tokens divided by rows x max_length
    (dr-grpo). `empty`: whether rows without valid tokens count. Raises ValueError for an unknown
    kind, and for dr-grpo without `max_length`.
    """
    match kind:
        # completions count alike, whatever their length
        case "grpo" | "gspo":
            return masked.sequence_mean(losses, valid, empty)
        # tokens count alike, so long completions weigh more
        case "bnpo" | "dapo" | "cispo":
            return masked.token_mean(losses, valid)
        case "dr-grpo":
            if max_length is None or max_length < 1:
                raise ValueError(
                    f"max_length is {max_length}: dr-grpo divides by it, so it must be at least 1"
                )
            # a constant divisor: no length bias, which is the point of Dr. GRPO
            rows = max(len(valid), 1) if empty == "counted" else valid.any(1).sum().clamp(min=1)
            return masked.zero_outside(losses, valid).sum() / (rows * max_length)
    raise ValueError(f"kind is {kind!r}: it must be one of {Kind.__args__}")


@torch.no_grad()
def _ratio_metrics(
    new: Float[Tensor, "rows tokens"],
    old: Float[Tensor, "rows tokens"],
    ratio: Float[Tensor, "rows tokens"],
    is_clipped: Bool[Tensor, "rows tokens"],
    valid: Bool[Tensor, "rows tokens"],
) -> Metrics:
    """Return means over valid tokens: the share that is clipped, the ratio, and the estimates k1
    and k3 of KL(old || new); without gradient.
    """
    old, new = masked.zero_outside(old, valid), masked.zero_outside(new, valid)
    return {
        "clip_fraction": masked.fraction(is_clipped, valid),
        "ratio": masked.token_mean(ratio, valid),
        "kl_k1": masked.token_mean(advantage.kl(old, new, estimator="k1"), valid),
        "kl_k3": masked.token_mean(advantage.kl(old, new, estimator="k3"), valid),
    }


def value_loss(
    new: Float[Tensor, "rows tokens"],
    old: Float[Tensor, "rows tokens"],
    returns: Float[Tensor, "rows tokens"],
    mask: Shaped[Tensor, "rows tokens"],
    *,
    clip: float | None = None,
) -> tuple[Float[Tensor, ""], Metrics]:
    """Return the clipped value loss: half the mean over tokens of the larger square,

        max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2) / 2

    and without `clip` the first: TRL's PPOTrainer, OpenRLHF's ValueLoss and verl's
    compute_value_loss agree. Metrics: the share of tokens whose clipped square is the larger one,
    which has no gradient, and the mean of (V - R)^2. Raises ValueError for a negative `clip`.
    """
    valid = masked.valid_tokens(mask)
    new, old, returns = (masked.zero_outside(values, valid) for values in (new, old, returns))
    squares = unclipped = (new - returns).square()
    if clip is not None:
        if clip < 0:
            raise ValueError(f"clip is {clip}: it must not be negative")
        # the value may move at most `clip` from what it was when completions were sampled
        bounded = (old + (new - old).clamp(-clip, clip) - returns).square()
        # the larger square is the pessimistic one: where it is the clipped one, there is no
        # gradient
        squares = torch.maximum(unclipped, bounded)
    metrics = {
        "clip_fraction": masked.fraction(squares > unclipped, valid),
        "squared_error": masked.token_mean(unclipped, valid).detach(),
    }
    return masked.token_mean(squares, valid) / 2, metrics
