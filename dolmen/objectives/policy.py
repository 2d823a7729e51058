"""What a policy that has drawn text learns from its advantages (PPO, GRPO and their kin), and a
critic from returns: pure functions of log-probabilities and values per token.

`new` are the log-probabilities of what is trained, `old` those of the policy that drew the text.
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


def clipped(
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
    20, which is not done here), TRL's PPOTrainer (tokens alone, no dual clip). Rows without a token
    are no rows, as in verl's agg_loss and OpenRLHF; empty="counted" divides by them too. `entropy`
    is paid for, whether the ratio is clipped or not, as of `group`.

    Metrics: the share of tokens that are clipped, and of those that the dual clip bounds, the mean
    ratio, and the KL of old to new by k1, as verl's ppo_kl, and by k3.
    """
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip is {dual_clip}: it must be over 1, or None")
    here = masked.counted(mask)
    ratio = (masked.only(new - old, here)).exp()
    advantages = masked.only(advantages, here)
    losses, stopped = _surrogate(ratio, advantages, clip_low, clip_high)
    metrics = _told(new, old, ratio, stopped, here)
    if dual_clip is not None:
        bound = -dual_clip * advantages
        over = (advantages < 0) & (losses > bound)
        losses = torch.where(over, bound, losses)
        metrics["dual_clip_fraction"] = masked.share(over, here)
    losses = _paid(losses, entropy, entropy_coef, here, metrics)
    return masked.reduced(losses, here, reduce, empty), metrics


def group(
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
    """GRPO (2402.03300, equation 3) and its kin, as TRL's GRPOTrainer has them: of each token
    `clipped`'s surrogate, without a dual clip, + beta k3(new, reference), and of all

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

    `entropy`, of the distribution of each token, is paid for: less entropy_coef times it (TRL and
    verl by their entropy_coeff; 1602.01783, section 4).

    `reference` may be None where beta is 0. Rows without a token are rows, as in TRL; "left-out"
    are they in verl. Metrics: as of `clipped`, and the mean k3 from the reference.
    """
    if beta and reference is None:
        raise ValueError(
            f"beta is {beta}: it is the weight of a KL from a reference, and none is given"
        )
    here = masked.counted(mask)
    advantages = advantages[:, None].expand_as(new) if advantages.ndim == 1 else advantages
    advantages = masked.only(advantages, here)
    ratio = _ratios(masked.only(new - old, here), here, kind, level)
    losses, stopped = _surrogate(ratio, advantages, clip_low, clip_high)
    if kind == "cispo":
        bounded = ratio.detach().clamp(1 - clip_low, 1 + clip_high)
        losses, stopped = -bounded * advantages * masked.only(new, here), bounded != ratio
    metrics = _told(new, old, ratio, stopped, here)
    if reference is not None:
        away = advantage.kl(masked.only(new, here), masked.only(reference, here), estimator="k3")
        losses = losses + beta * away
        metrics["reference_kl"] = masked.token_mean(away, here).detach()
    losses = _paid(losses, entropy, entropy_coef, here, metrics)
    return _whole(losses, here, kind, max_length, empty), metrics


def _paid(
    losses: Float[Tensor, "rows tokens"],
    entropy: Float[Tensor, "rows tokens"] | None,
    coef: float,
    here: Bool[Tensor, "rows tokens"],
    metrics: Metrics,
) -> Float[Tensor, "rows tokens"]:
    """Less what the entropy of each token is worth, where it is given; `metrics` has its mean."""
    if entropy is None:
        return losses
    metrics["entropy"] = masked.token_mean(entropy, here).detach()
    return losses - coef * masked.only(entropy, here)


def _ratios(
    off: Float[Tensor, "rows tokens"], here: Bool[Tensor, "rows tokens"], kind: Kind, level: Level
) -> Float[Tensor, "rows tokens"]:
    if level not in Level.__args__:
        raise ValueError(f"level is {level!r}: it must be one of {Level.__args__}")
    if level == "token" and kind != "gspo":
        return off.exp()
    mean = masked.row_means(off, here)[:, None].expand_as(off)
    if level == "sequence":
        return mean.exp()
    return (mean.detach() + off - off.detach()).exp()


def _surrogate(
    ratio: Float[Tensor, "rows tokens"],
    advantages: Float[Tensor, "rows tokens"],
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Tensor, "rows tokens"], Bool[Tensor, "rows tokens"]]:
    """The loss of each token, and whether it is clipped, where it has no gradient."""
    free = ratio * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(free, bounded), bounded < free


def _whole(
    losses: Float[Tensor, "rows tokens"],
    here: Bool[Tensor, "rows tokens"],
    kind: Kind,
    max_length: int | None,
    empty: Empty,
) -> Float[Tensor, ""]:
    match kind:
        case "grpo" | "gspo":
            return masked.sequence_mean(losses, here, empty)
        case "bnpo" | "dapo" | "cispo":
            return masked.token_mean(losses, here)
        case "dr-grpo":
            if max_length is None or max_length < 1:
                raise ValueError(
                    f"max_length is {max_length}: dr-grpo divides by it, so it must be at least 1"
                )
            rows = max(len(here), 1) if empty == "counted" else here.any(1).sum().clamp(min=1)
            return masked.only(losses, here).sum() / (rows * max_length)
    raise ValueError(f"kind is {kind!r}: it must be one of {Kind.__args__}")


@torch.no_grad()
def _told(
    new: Float[Tensor, "rows tokens"],
    old: Float[Tensor, "rows tokens"],
    ratio: Float[Tensor, "rows tokens"],
    stopped: Bool[Tensor, "rows tokens"],
    here: Bool[Tensor, "rows tokens"],
) -> Metrics:
    old, new = masked.only(old, here), masked.only(new, here)
    return {
        "clip_fraction": masked.share(stopped, here),
        "ratio": masked.token_mean(ratio, here),
        "kl_k1": masked.token_mean(advantage.kl(old, new, estimator="k1"), here),
        "kl_k3": masked.token_mean(advantage.kl(old, new, estimator="k3"), here),
    }


def value(
    new: Float[Tensor, "rows tokens"],
    old: Float[Tensor, "rows tokens"],
    returns: Float[Tensor, "rows tokens"],
    mask: Shaped[Tensor, "rows tokens"],
    *,
    clip: float | None = None,
) -> tuple[Float[Tensor, ""], Metrics]:
    """Of a critic, half the mean over tokens of the larger square,

        max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2) / 2

    and without `clip` of the first alone: TRL's PPOTrainer, OpenRLHF's ValueLoss and verl's
    compute_value_loss agree. Metrics: the share of tokens whose clipped square is the larger, which
    have no gradient, and the mean of (V - R)^2.
    """
    here = masked.counted(mask)
    new, old, returns = (masked.only(each, here) for each in (new, old, returns))
    squares = free = (new - returns).square()
    if clip is not None:
        if clip < 0:
            raise ValueError(f"clip is {clip}: it must not be negative")
        bounded = (old + (new - old).clamp(-clip, clip) - returns).square()
        squares = torch.maximum(free, bounded)
    metrics = {
        "clip_fraction": masked.share(squares > free, here),
        "squared_error": masked.token_mean(free, here).detach(),
    }
    return masked.token_mean(squares, here) / 2, metrics
