"""Position ids, and rotary position embedding (RoPE, 2104.09864).

Dimension i is paired with i + size / 2 (rotate-half, as Llama in transformers), or neighbours with
each other (interleaved, as GPT-J and DeepSeek), so that no weight is permuted on the way from or to
Hugging Face. Tables and rotation are fp32 whatever the weights are, fp64 where the model computes
in fp64.

Position ids are what rope and learned position tables take for a token's position. The data loader
makes them with the batch; in a batch without any, a token's position is its index in the sequence.
A single stream restarts with each document. With two streams (GLM, 2103.10360, section 2.3, as
ChatGLM-6B reads them) the first is the index within the prefix and stays at the prefix's last token
after it; the second counts from there:

    prefix a b c, then d e f      a  b  c  d  e  f
    first stream                  0  1  2  2  2  2
    second stream                 0  0  0  1  2  3
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Float64, Int, Int64
from torch import Tensor

from dolmen.core.device import to_device


def inverse_frequencies(
    size: int,
    theta: float,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, " {size}//2"]:
    """Return theta^(-2i / size) for i < size / 2, in `dtype`."""
    return 1.0 / theta ** (
        torch.arange(0, size, 2, dtype=torch.int64, device=device).to(dtype) / size
    )


def linear(inv: Float[Tensor, " half"], factor: float) -> Float[Tensor, " half"]:
    """All divided by `factor` (2306.15595)."""
    return inv / factor


def llama3(
    inv: Float[Tensor, " half"],
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> Float[Tensor, " half"]:
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


def yarn(
    inv: Float[Tensor, " half"],
    theta: float,
    factor: float,
    original_max_position_embeddings: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Float[Tensor, " half"]:
    """The frequencies `inv` of base `theta`, extended by parts (2309.00071, section
    3.2): what turns more than `beta_fast` times in the original context is kept, what turns less
    than `beta_slow` times divided by `factor`, and between the two lies a ramp over the dims.
    `truncate`: the ramp begins and ends at whole dims.
    """
    size = 2 * len(inv)

    def dim_of(turns: float) -> float:
        """The dim that turns so often."""
        wavelength = original_max_position_embeddings / (turns * 2 * math.pi)
        return size * math.log(wavelength) / (2 * math.log(theta))

    low, high = dim_of(beta_fast), dim_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001  # a step, and no division by zero
    dims = torch.arange(len(inv), dtype=inv.dtype, device=inv.device)
    divided = ((dims - low) / (high - low)).clamp(0, 1)
    return inv / factor * divided + inv * (1 - divided)


def longrope(
    inv: Float[Tensor, " half"],
    short: Sequence[float],
    long: Sequence[float],
    beyond: Bool[Tensor, "*tokens"],
) -> Float[Tensor, "*tokens half"]:
    """Each divided by a factor of its own, one of `long` for tokens of texts `beyond` the original
    length (2402.13753).
    """
    factors = to_device(torch.tensor([short, long], dtype=inv.dtype), inv.device)
    return inv / torch.where(beyond[..., None], factors[1], factors[0])


def dynamic(
    inv: Float[Tensor, " half"], factor: float, longer: Float[Tensor, "*tokens"]
) -> Float[Tensor, "*tokens half"]:
    """Dynamic NTK: for sequences `longer` times the original length, the base is multiplied by
    (factor longer - factor + 1)^(size / (size - 2)), if that is over 1.
    """
    return _scale_base(inv, factor * longer.clamp(min=1) - (factor - 1))


def dynamic_by_powers(
    inv: Float[Tensor, " half"], longer: Float[Tensor, "*tokens"]
) -> Float[Tensor, "*tokens half"]:
    """Return `dynamic` with growth 2^ceil(log2(longer) + 1) - 1, as Qwen has it."""
    return _scale_base(inv, (longer.double().log2() + 1).ceil().exp2() - 1)


def _scale_base(inv: Tensor, growth: Tensor) -> Tensor:
    """Return the frequencies for a base multiplied by growth^(size / (size - 2)), if that is over
    1.
    """
    size = 2 * len(inv)
    powers = torch.arange(0, size, 2, device=inv.device, dtype=torch.float64) / (size - 2)
    return inv * (growth.double().clamp(min=1)[..., None] ** -powers).to(inv.dtype)


def log_n(positions: Int[Tensor, "*tokens"], original: int) -> Float64[Tensor, "*tokens"]:
    """log(i) / log(original) of the token numbered i from 1, where i is over `original`; else 1."""
    return ((positions + 1).double().log() / math.log(original)).clamp(min=1)


def tables(
    positions: Int[Tensor, "*tokens"], inv: Float[Tensor, "*of_tokens half"]
) -> tuple[Float[Tensor, "*tokens 1 half"], Float[Tensor, "*tokens 1 half"]]:
    """cos and sin in inv's dtype: one row per token, the same for every head. `inv` is of all, or
    of each of them, as it broadcasts.
    """
    angle = (positions[..., None].to(inv.dtype) * inv)[..., None, :]
    return angle.cos(), angle.sin()


def rotate(
    x: Float[Tensor, "batch length heads head_dim"],
    cos: Float[Tensor, "*tokens 1 half"],
    sin: Float[Tensor, "*tokens 1 half"],
    interleaved: bool = False,
    streams: int = 1,
) -> Float[Tensor, "batch length heads head_dim"]:
    """x turned by its token's angle, in fp32 (fp64 for fp64 input); x's dtype. `tokens` is batch
    and length, or length alone. Where the tables are of a part of the head, its first 2 `half` dims
    are turned and the others kept. `interleaved` says which dims are a pair, before and after. Of
    several `streams` of positions each has its part of the tables, and of the dims that are turned.
    """
    size = 2 * cos.shape[-1]
    if size < x.shape[-1]:
        turned = rotate(x[..., :size], cos, sin, interleaved, streams)
        return torch.cat((turned, x[..., size:]), -1)
    if streams > 1:
        each = (t.chunk(streams, -1) for t in (x, cos, sin))
        return torch.cat([rotate(a, c, s, interleaved) for a, c, s in zip(*each, strict=True)], -1)
    wide = x if x.dtype == torch.float64 else x.float()
    a, b = wide.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else wide.chunk(2, -1)
    # rounded before they are put together, which the compiler does in memory
    turned = (a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype)
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


@dataclass(frozen=True, eq=False)
class PositionIds:
    """Position ids of the tokens of a batch."""

    ids: Int64[Tensor, "batch streams length"]
    longest: int
    """Tokens of a sequence that tables must have rows for (tree.Table), or more."""

    @staticmethod
    def of(ids: Int64[Tensor, "batch streams length"]) -> "PositionIds":
        """Construct from ids on the host."""
        largest = [max(map(max, stream.tolist())) for stream in ids.unbind(1)]
        return PositionIds(ids, max([largest[0] + 1, *largest[1:]]))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "PositionIds":
        """Apply `change` to the ids."""
        return replace(self, ids=change(self.ids))

    def on(self, device: torch.device) -> "PositionIds":
        """The same on `device`; the host does not wait for it."""
        return self.map_tensors(lambda ids: to_device(ids, device))


def prefix_positions(
    index: Int64[Tensor, "*tokens"], prefix: Int64[Tensor, "*tokens"]
) -> Int64[Tensor, "2 ..."]:
    """Both streams, of tokens at `index` in documents with prefixes of so many tokens."""
    return span_positions(index, prefix, (prefix - 1).clamp(min=0), prefix)


def span_positions(
    index: Int64[Tensor, "*tokens"],
    stay: Int64[Tensor, "*tokens"],
    at: Int64[Tensor, "*tokens"],
    begin: Int64[Tensor, "*tokens"],
) -> Int64[Tensor, "2 ..."]:
    """Both streams, of tokens at `index` in documents of these spans (model/tree/blanks.py)."""
    return torch.stack((torch.where(index < stay, index, at), (index - begin + 1).clamp(min=0)))
