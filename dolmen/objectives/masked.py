"""Means over the tokens that count: what the pure objectives of policies, values and rewards share.

A mask is 1 where a token counts and 0 elsewhere, and may have holes (the turns of a tool, say).
Whatever stands where it is 0 is never read: not a NaN of it reaches a sum or a gradient.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

Reduce = Literal["token-mean", "sequence-mean"]
Empty = Literal["left-out", "counted"]
"""What a row without any token is in a mean over rows: no row, or one whose mean is 0."""

Metrics = dict[str, Tensor]
"""By name, scalars without gradient."""


def counted(mask: Shaped[Tensor, "rows tokens"]) -> Bool[Tensor, "rows tokens"]:
    return mask != 0


def only(
    values: Float[Tensor, "rows tokens"], here: Bool[Tensor, "rows tokens"]
) -> Float[Tensor, "rows tokens"]:
    """0 elsewhere, whatever stands there."""
    return torch.where(here, values, 0.0)


def token_mean(
    values: Float[Tensor, "rows tokens"], here: Bool[Tensor, "rows tokens"]
) -> Float[Tensor, ""]:
    """0 of no token."""
    return only(values, here).sum() / here.sum().clamp(min=1)


def row_means(
    values: Float[Tensor, "rows tokens"], here: Bool[Tensor, "rows tokens"]
) -> Float[Tensor, " rows"]:
    """0 of a row without a token."""
    return only(values, here).sum(1) / here.sum(1).clamp(min=1)


def sequence_mean(
    values: Float[Tensor, "rows tokens"], here: Bool[Tensor, "rows tokens"], empty: Empty
) -> Float[Tensor, ""]:
    """The mean over rows of each row's mean."""
    total = row_means(values, here).sum()
    match empty:
        case "left-out":
            return total / here.any(1).sum().clamp(min=1)
        case "counted":
            return total / max(len(here), 1)
    raise ValueError(f"empty is {empty!r}: it must be one of {Empty.__args__}")


def reduced(
    values: Float[Tensor, "rows tokens"],
    here: Bool[Tensor, "rows tokens"],
    reduce: Reduce,
    empty: Empty,
) -> Float[Tensor, ""]:
    match reduce:
        case "token-mean":
            return token_mean(values, here)
        case "sequence-mean":
            return sequence_mean(values, here, empty)
    raise ValueError(f"reduce is {reduce!r}: it must be one of {Reduce.__args__}")


def share(
    said: Bool[Tensor, "rows tokens"], here: Bool[Tensor, "rows tokens"]
) -> Float[Tensor, ""]:
    """Of the tokens that count, for how many something is so."""
    return token_mean(said.double(), here)  # times their number it is a number of tokens again
