"""From logits to the next token: pure functions of the logits and of one uniform number per row.

    logits / temperature -> top-k -> top-p (nucleus sampling, 1904.09751) -> softmax -> cumulative
    -> its inverse

The uniform number follows from (seed, prompt, step) alone: neither batch nor device nor layout
changes it.
"""

import math
import random
import sys

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def check_knobs(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raises ValueError naming the knob for a value that has no meaning, or no effect."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature}: use --temperature 0 (greedy) or more")
    if 0 < temperature < sys.float_info.min:  # too few bits are left to divide by it
        raise ValueError(
            f"temperature is {temperature}: use --temperature 0 (greedy), or at least 1e-307"
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}: use --top-k 1 or more")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}: use --top-p above 0, at most 1")
    for name, value in (("--top-k", top_k), ("--top-p", top_p)):
        if value is not None and not temperature:
            raise ValueError(
                f"{name} draws, and without --temperature nothing is drawn: add --temperature 1"
            )


def uniform(seed: int, prompt: int, step: int) -> float:
    """The number in [0, 1) that chooses token `step` of prompt `prompt`."""
    return random.Random(f"{seed}/{prompt}/{step}").random()


def keep_top_k(logits: Float[Tensor, "batch vocab"], k: int) -> Float[Tensor, "batch vocab"]:
    """With all below the k-th largest of its row at -inf; those equal to it stay."""
    least = logits.topk(min(k, logits.shape[-1]), -1).values[:, -1:]
    return logits.masked_fill(logits < least, -math.inf)


def keep_top_p(logits: Float[Tensor, "batch vocab"], p: float) -> Float[Tensor, "batch vocab"]:
    """With all at -inf but the fewest most likely tokens that have probability p together."""
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    probability = ordered.double().softmax(-1)
    before = probability.cumsum(-1) - probability
    before[:, 0] = 0.0  # the most likely token stays, however small p is
    out = torch.empty_like(before, dtype=torch.bool).scatter_(-1, index, before >= p)
    return logits.masked_fill(out, -math.inf)


def greedy(logits: Float[Tensor, "batch vocab"]) -> Int64[Tensor, " batch"]:
    """The most likely token of each row."""
    return logits.argmax(-1)


def sample(
    logits: Float[Tensor, "batch vocab"],
    uniforms: Float[Tensor, " batch"],
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Int64[Tensor, " batch"]:
    """Tokens from logits and uniform numbers in [0, 1); temperature 0 is greedy.

    The first token whose cumulative probability exceeds the uniform number, in fp64: none of
    probability 0 is drawn.
    """
    if temperature == 0:
        return greedy(logits)
    # the largest at 0: a small temperature then gives 0 and -inf, never inf
    logits = logits.double()
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if top_k is not None:
        logits = keep_top_k(logits, top_k)
    if top_p is not None:
        logits = keep_top_p(logits, top_p)
    cumulative = logits.softmax(-1).cumsum(-1)
    drawn = uniforms.to(cumulative)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, drawn, right=True)[:, 0]
