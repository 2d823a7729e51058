"""Rotary position embedding (2104.09864), rotate-half layout: dimension i is paired with i +
head_dim / 2, so that no weight is permuted on the way from or to Hugging Face. Tables and rotation
are fp32 whatever the weights are, fp64 where the model computes in fp64.
"""

import math

import torch
from torch import Tensor


def inverse_frequencies(
    size: int,
    theta: float,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[size / 2] of `dtype`: theta^(-2i / size)."""
    return 1.0 / theta ** (
        torch.arange(0, size, 2, dtype=torch.int64, device=device).to(dtype) / size
    )


def linear(inv: Tensor, factor: float) -> Tensor:
    """All divided by `factor` (2306.15595)."""
    return inv / factor


def llama3(
    inv: Tensor,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> Tensor:
    """Wavelengths longer than original / low_freq_factor are divided by `factor`, those shorter
    than original / high_freq_factor kept, and between them it goes smoothly.
    """
    wavelength = 2 * math.pi / inv
    low = original_max_position_embeddings / low_freq_factor
    high = original_max_position_embeddings / high_freq_factor
    smooth = (original_max_position_embeddings / wavelength - low_freq_factor) / (
        high_freq_factor - low_freq_factor
    )
    between = (1 - smooth) * inv / factor + smooth * inv
    return torch.where(wavelength > low, inv / factor, torch.where(wavelength < high, inv, between))


def tables(positions: Tensor, inv: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, [*positions.shape, 1, head_dim / 2] in inv's dtype: one row per token, the same
    for every head.
    """
    angle = (positions[..., None].to(inv.dtype) * inv)[..., None, :]
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [batch, length, heads, head_dim] turned by its token's angle, in fp32 (fp64 for fp64
    input); x's dtype.
    """
    a, b = (x if x.dtype == torch.float64 else x.float()).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
