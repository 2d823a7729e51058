"""What an operator multiplies: its shape as (batch, rows, columns, contraction), and its floating
point operations, two per multiplication and addition.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

Shape = tuple[int, int, int, int]


class Multiplied(NamedTuple):
    """What is known of one operator."""

    kind: str
    """product, or attention."""
    shape: Shape
    """Of attention (sequences x heads, queries, keys, size of a head)."""
    flops: int
    dtype: torch.dtype
    """Of the factors."""


def _matrices(a: Tensor, b: Tensor) -> Multiplied:
    """[..., rows, contraction] x [..., contraction, columns]; of groups, of rows or of what is
    contracted over, the sum of their products.
    """
    batch = a.shape[0] if a.ndim == 3 else 1
    shape = batch, a.shape[-2], b.shape[-1], a.shape[-1]
    return Multiplied("product", shape, 2 * math.prod(shape), a.dtype)


def _flash(
    q: Tensor,
    segments: Tensor | None,
    longest: tuple[int, int],
    causal: bool,
    options: dict[str, Any],
) -> Multiplied:
    """One of the products of scores: of q [sequences, queries, heads, size], or of the segments of
    [tokens, heads, size], each as long as the longest.
    """
    heads, size = q.shape[-2:]
    queries, keys = longest
    sequences = q.shape[0] if segments is None else q.shape[0] // queries
    left, right = options["window_size_left"], options["window_size_right"]
    seen = _seen(queries, keys, left, 0 if causal else right)
    shape = sequences * heads, queries, keys, size
    return Multiplied("attention", shape, 2 * sequences * heads * size * seen, q.dtype)


@cache
def _seen(queries: int, keys: int, left: int, right: int) -> int:
    """Pairs of a query and a key that it sees: as many keys left and right of the diagonal, -1 for
    no bound, which ends at the last query and the last key.
    """
    before = keys if left < 0 else left
    behind = keys if right < 0 else right
    diagonal = range(keys - queries, keys)
    return sum(max(0, min(keys - 1, at + behind) - max(0, at - before) + 1) for at in diagonal)


def _flash_forward(args: Sequence[Any], options: dict[str, Any]) -> Multiplied:
    """Scores, and their sum of values."""
    q, _, _, segments, _, queries, keys, _, causal = args[:9]
    one = _flash(q, segments, (queries, keys), causal, options)
    return one._replace(flops=2 * one.flops)


def _flash_backward(args: Sequence[Any], options: dict[str, Any]) -> Multiplied:
    """Scores once more, and the gradients of scores, queries, keys and values: five products."""
    _, q, _, _, _, _, segments, _, queries, keys, _, causal = args[:12]
    one = _flash(q, segments, (queries, keys), causal, options)
    return one._replace(flops=5 * one.flops)


PRODUCTS: dict[str, Callable[[Sequence[Any], dict[str, Any]], Multiplied]] = {
    "aten.mm": lambda args, _: _matrices(*args[:2]),
    "aten.bmm": lambda args, _: _matrices(*args[:2]),
    "aten.addmm": lambda args, _: _matrices(*args[1:3]),
    "aten.addmm_": lambda args, _: _matrices(*args[1:3]),
    "aten.baddbmm": lambda args, _: _matrices(*args[1:3]),
    "aten.baddbmm_": lambda args, _: _matrices(*args[1:3]),
    "aten._grouped_mm": lambda args, _: _matrices(*args[:2]),
    "aten._scaled_mm_v2": lambda args, _: _matrices(*args[:2]),
    "aten._flash_attention_forward": _flash_forward,
    "aten._flash_attention_backward": _flash_backward,
}
"""By the name of the operator, without its overload."""
