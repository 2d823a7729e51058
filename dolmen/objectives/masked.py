"""Masked means, which the losses of policies, values and rewards share.

A mask is nonzero where a token counts, and may have holes (such as the turns of a tool). Values
outside of it are never read: even a NaN there reaches no sum and no gradient, as torch.where
selects before anything is added.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

Reduce = Literal["token-mean", "sequence-mean"]
Empty = Literal["left-out", "counted"]
"""How a row without valid tokens counts in a mean over rows: not at all, or as a mean of 0."""

Metrics = dict[str, Tensor]
"""Scalar tensors without gradient, by name."""


def valid_tokens(mask: Shaped[Tensor, "rows tokens"]) -> Bool[Tensor, "rows tokens"]:
    """Return True where a mask, of any dtype, is not 0."""
    return mask != 0


def zero_outside(
    values: Float[Tensor, "rows tokens"], valid: Bool[Tensor, "rows tokens"]
) -> Float[Tensor, "rows tokens"]:
    """Return the values where `valid`, and 0 elsewhere, even where there was a NaN."""
    # not values * valid: NaN times 0 is NaN
    return torch.where(valid, values, 0.0)


def token_mean(
    values: Float[Tensor, "rows tokens"], valid: Bool[Tensor, "rows tokens"]
) -> Float[Tensor, ""]:
    """Return the mean of all valid values; 0 where there are none."""
    # clamp: 0 / 1 where no token is valid
    return zero_outside(values, valid).sum() / valid.sum().clamp(min=1)


def row_means(
    values: Float[Tensor, "rows tokens"], valid: Bool[Tensor, "rows tokens"]
) -> Float[Tensor, " rows"]:
    """Return the mean of each row's valid values [rows]; 0 for a row without any."""
    return zero_outside(values, valid).sum(1) / valid.sum(1).clamp(min=1)


def sequence_mean(
    values: Float[Tensor, "rows tokens"], valid: Bool[Tensor, "rows tokens"], empty: Empty
) -> Float[Tensor, ""]:
    """Return the mean over rows of each row's mean over its valid tokens. Rows without any are left
    out, or count as 0, by `empty`: "left-out" or "counted". Raises ValueError for another `empty`.
    """
    total = row_means(values, valid).sum()
    match empty:
        case "left-out":
            return total / valid.any(1).sum().clamp(min=1)
        case "counted":
            return total / max(len(valid), 1)
    raise ValueError(f"empty is {empty!r}: it must be one of {Empty.__args__}")


def aggregate(
    values: Float[Tensor, "rows tokens"],
    valid: Bool[Tensor, "rows tokens"],
    reduce: Reduce,
    empty: Empty,
) -> Float[Tensor, ""]:
    """Return the mean of the valid values: over all tokens ("token-mean"), or over rows of each
    row's mean ("sequence-mean"), by `reduce`. Rows without valid values are left out of a mean over
    rows, or count as 0, by `empty` ("left-out", "counted"). Raises ValueError for another `reduce`
    or `empty`.
    """
    match reduce:
        case "token-mean":
            return token_mean(values, valid)
        case "sequence-mean":
            return sequence_mean(values, valid, empty)
    raise ValueError(f"reduce is {reduce!r}: it must be one of {Reduce.__args__}")


def fraction(
    condition: Bool[Tensor, "rows tokens"], valid: Bool[Tensor, "rows tokens"]
) -> Float[Tensor, ""]:
    """Return the share of valid tokens for which the condition holds, in fp64; 0 without valid
    tokens.
    """
    return token_mean(
        condition.double(), valid
    )  # times their number it is a number of tokens again
