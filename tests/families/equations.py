"""Equations that references without a class in transformers are written of."""

import math

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean x^2 + eps) w (1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.weight


def linear(inp: int, out: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(inp, out, bias=bias)


def heads(x: Tensor, number: int) -> Tensor:
    """[..., tokens, number * size] -> [..., number, tokens, size]."""
    return x.unflatten(-1, (number, -1)).transpose(-3, -2)


def turned(x: Tensor, theta: float = 10000.0) -> Tensor:
    """[..., tokens, size] of tokens 0, 1, ...: i and i + size / 2 are a pair, which the position
    times theta^(-2i / size) turns (2104.09864).
    """
    length, size = x.shape[-2:]
    rates = theta ** (-torch.arange(0, size, 2, dtype=x.dtype) / size)
    angles = torch.arange(length, dtype=x.dtype)[:, None] * rates
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def slopes(number: int) -> list[float]:
    """Of ALiBi's heads, as the paper's code has them (2108.12409): of numbers between two powers of
    two those of the lower, then every other one of the upper.
    """
    if math.log2(number).is_integer():
        first = 2 ** (-8 / number)
        return [first ** (i + 1) for i in range(number)]
    below = 2 ** math.floor(math.log2(number))
    return slopes(below) + slopes(2 * below)[0::2][: number - below]


def attended(q: Tensor, k: Tensor, v: Tensor, added: Tensor | float = 0.0) -> Tensor:
    """softmax(q k^T / sqrt(size) + added) v, each token over itself and those before it; heads side
    by side. [..., heads, tokens, size] -> [..., tokens, heads * size].
    """
    length = q.shape[-2]
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + added
    behind = torch.ones(length, length).triu(1).bool()
    scores = scores.masked_fill(behind, -math.inf)
    return (scores.softmax(-1) @ v).transpose(-3, -2).flatten(-2)
