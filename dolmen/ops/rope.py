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
from dolmen.core.reduction import widen

FEW = 64  # tokens: of more, what is copied costs more than calls of operators


def inverse_frequencies(
    size: int,
    theta: float,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, " {size}//2"]:
    """Return RoPE's frequencies theta^(-2i / size), in radians per token, for i < size / 2, in
    `dtype`.
    """
    return 1.0 / theta ** (
        torch.arange(0, size, 2, dtype=torch.int64, device=device).to(dtype) / size
    )


def linear(inv: Float[Tensor, " half"], factor: float) -> Float[Tensor, " half"]:
    """Return all frequencies divided by `factor`: position interpolation (2306.15595)."""
    return inv / factor


def llama3(
    inv: Float[Tensor, " half"],
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> Float[Tensor, " half"]:
    """Return Llama 3.1's scaled frequencies: wavelengths longer than original / low_freq_factor
    have their frequency divided by `factor`, those shorter than original / high_freq_factor are
    kept, and between them it is interpolated.
    """
    wavelength = 2 * math.pi / inv
    low = original_max_position_embeddings / low_freq_factor
    high = original_max_position_embeddings / high_freq_factor
    # 0 at the long end, 1 at the short end
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
    """Return YaRN's frequencies (2309.00071, section 3.2), from `inv` of base `theta`: dims that
    turn more than `beta_fast` times in the original context are kept, those that turn less than
    `beta_slow` times divided by `factor`, and a ramp over the dims lies between. `truncate`: the
    ramp begins and ends at whole dims.
    """
    size = 2 * len(inv)

    def dim_of(turns: float) -> float:
        """Return the (fractional) dim that makes `turns` turns over the original context."""
        wavelength = original_max_position_embeddings / (turns * 2 * math.pi)
        return size * math.log(wavelength) / (2 * math.log(theta))

    low, high = dim_of(beta_fast), dim_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    # the ramp stays within the head
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
    """Return LongRoPE's frequencies of each token (2402.13753): each divided by a factor of its
    own, from `long` for tokens of sequences that are `beyond` the original length, else from
    `short`.
    """
    factors = to_device(torch.tensor([short, long], dtype=inv.dtype), inv.device)
    return inv / torch.where(beyond[..., None], factors[1], factors[0])


def dynamic(
    inv: Float[Tensor, " half"], factor: float, longer: Float[Tensor, "*tokens"]
) -> Float[Tensor, "*tokens half"]:
    """Return the frequencies of each token by dynamic NTK: for sequences `longer` times the
    original length, the base is multiplied by (factor longer - factor + 1)^(size / (size - 2)), if
    that is over 1.
    """
    return _scale_base(inv, factor * longer.clamp(min=1) - (factor - 1))


def dynamic_by_powers(
    inv: Float[Tensor, " half"], longer: Float[Tensor, "*tokens"]
) -> Float[Tensor, "*tokens half"]:
    """Return the frequencies of each token by dynamic NTK as Qwen has it: for sequences `longer`
    times the original length, the base is multiplied by g^(size / (size - 2)), g =
    2^ceil(log2(longer) + 1) - 1, if that is over 1.
    """
    return _scale_base(inv, (longer.double().log2() + 1).ceil().exp2() - 1)


def _scale_base(inv: Tensor, growth: Tensor) -> Tensor:
    """Return the frequencies for a base multiplied by growth^(size / (size - 2)), if that is over
    1.
    """
    size = 2 * len(inv)
    # dim i scales by growth^(-2i / (size - 2)): none of it at i = 0
    powers = torch.arange(0, size, 2, device=inv.device, dtype=torch.float64) / (size - 2)
    return inv * (growth.double().clamp(min=1)[..., None] ** -powers).to(inv.dtype)


def log_n(positions: Int[Tensor, "*tokens"], original: int) -> Float64[Tensor, "*tokens"]:
    """Return Qwen's log-n factor of queries: log(i) / log(original) for the i-th token, counted
    from 1, where i is over `original`; else 1.
    """
    return ((positions + 1).double().log() / math.log(original)).clamp(min=1)


def tables(
    positions: Int[Tensor, "*tokens"], inv: Float[Tensor, "*of_tokens half"]
) -> tuple[Float[Tensor, "*tokens 1 half"], Float[Tensor, "*tokens 1 half"]]:
    """Return cos and sin of each token's angles in inv's dtype, with a head dim of 1. `inv` is the
    same for all tokens, or of each.
    """
    # [*tokens, 1, half]: the 1 broadcasts over heads
    angle = (positions[..., None].to(inv.dtype) * inv)[..., None, :]
    return angle.cos(), angle.sin()


def rotate(
    x: Float[Tensor, "batch length heads head_dim"],
    cos: Float[Tensor, "*tokens 1 half"],
    sin: Float[Tensor, "*tokens 1 half"],
    interleaved: bool = False,
    streams: int = 1,
) -> Float[Tensor, "batch length heads head_dim"]:
    """Return x rotated by its token's angles, computed in fp32 (fp64 for fp64 input), in x's dtype.
    `tokens` is batch and length, or length alone. Where the tables cover part of the head, its
    first 2 `half` dims are rotated and the others kept. `interleaved`: pairs are neighbouring dims,
    not i and i + size / 2. With several `streams` of positions each has its part of the tables, and
    of the rotated dims.
    """
    size = 2 * cos.shape[-1]
    # partial rotary embedding
    if size < x.shape[-1]:
        turned = rotate(x[..., :size], cos, sin, interleaved, streams)
        return torch.cat((turned, x[..., size:]), -1)
    if streams > 1:
        streams_ = (t.chunk(streams, -1) for t in (x, cos, sin))
        return torch.cat(
            [rotate(a, c, s, interleaved) for a, c, s in zip(*streams_, strict=True)], -1
        )
    wide = widen(x)
    a, b = wide.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else wide.chunk(2, -1)
    # rounded before they are put together, which the compiler does in memory
    turned = (a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype)
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


def rotate_heads(
    q: Float[Tensor, "batch length heads head_dim"],
    k: Float[Tensor, "batch length kv_heads head_dim"],
    cos: Float[Tensor, "*tokens 1 half"],
    sin: Float[Tensor, "*tokens 1 half"],
    interleaved: bool = False,
    streams: int = 1,
) -> tuple[
    Float[Tensor, "batch length heads head_dim"], Float[Tensor, "batch length kv_heads head_dim"]
]:
    """Return q and k rotated, as by `rotate`. Those of a few tokens are rotated as one tensor, as
    operators then cost their calls.
    """
    if torch.is_grad_enabled() or q.shape[1] > FEW:
        return (
            rotate(q, cos, sin, interleaved, streams),
            rotate(k, cos, sin, interleaved, streams),
        )
    both = rotate(torch.cat((q, k), 2), cos, sin, interleaved, streams)
    return both[:, :, : q.shape[2]], both[:, :, q.shape[2] :]


@dataclass(frozen=True, eq=False)
class PositionIds:
    """Position ids of the tokens of a batch."""

    ids: Int64[Tensor, "batch streams length"]
    longest: int
    """Tokens of a sequence that tables must have rows for (spec.PositionTable), or more."""

    @staticmethod
    def from_ids(ids: Int64[Tensor, "batch streams length"]) -> "PositionIds":
        """Return position ids with `longest` from the values of `ids`, which are on the host: the
        first stream's largest plus 1, or the largest of another, which counts from 1 already.
        """
        largest = [max(map(max, stream.tolist())) for stream in ids.unbind(1)]
        return PositionIds(ids, max([largest[0] + 1, *largest[1:]]))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> "PositionIds":
        """Return the position ids with `change` applied to the tensor."""
        return replace(self, ids=change(self.ids))

    def to_device(self, device: torch.device) -> "PositionIds":
        """Return the position ids with their tensor on `device`; the host does not wait for the
        copy.
        """
        return self.map_tensors(lambda ids: to_device(ids, device))


def prefix_positions(
    index: Int64[Tensor, "*tokens"], prefix: Int64[Tensor, "*tokens"]
) -> Int64[Tensor, "2 ..."]:
    """Return both position streams [2, tokens] of tokens at `index` in documents whose prefix has
    `prefix` tokens: the index, up to the prefix's last token, and 0 in the prefix, then 1, 2, ...
    """
    return span_positions(index, prefix, (prefix - 1).clamp(min=0), prefix)


def span_positions(
    index: Int64[Tensor, "*tokens"],
    stay: Int64[Tensor, "*tokens"],
    at: Int64[Tensor, "*tokens"],
    begin: Int64[Tensor, "*tokens"],
) -> Int64[Tensor, "2 ..."]:
    """Return both position streams of tokens at `index` in their document: the first is the index
    up to `stay`, then constant `at`; the second is 0 before `begin`, then counts from 1.
    """
    return torch.stack((torch.where(index < stay, index, at), (index - begin + 1).clamp(min=0)))
