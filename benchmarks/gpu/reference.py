"""What operators compute, by definition, in float64: no line is shared with dolmen."""

import math

import torch
from torch import Tensor


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rope of positions 0, 1, ...: x [batch, length, heads, size] as pairs (i, i + size / 2), each
    a complex number that is turned.
    """
    half = x.shape[-1] // 2
    speed = theta ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[1], device=x.device, dtype=torch.float64)[:, None, None] * speed
    turned = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), -1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    x = x.double()
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double() + bias.double()


def activation(name: str, x: Tensor) -> Tensor:
    x = x.double()
    tanh = (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh()
    return {
        "silu": x / (1 + (-x).exp()),
        "gelu": x * (1 + torch.erf(x / math.sqrt(2))) / 2,
        "gelu_tanh": x * (1 + tanh) / 2,
        "relu": x.clamp(min=0),
    }[name]


def cross_entropy(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum over the labels that are not negative."""
    logits = x.double() @ weight.double().T
    real = labels >= 0
    picked = logits[real].gather(1, labels[real][:, None])[:, 0]
    return (logits[real].logsumexp(-1) - picked).sum()


def grouped(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """x [m, in], the first counts[0] rows with weight[0] [out, in], and so on."""
    parts = zip(x.double().split(counts), weight.double(), strict=True)
    return torch.cat([rows @ matrix.T for rows, matrix in parts])
