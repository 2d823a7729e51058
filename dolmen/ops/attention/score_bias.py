"""Terms added to attention scores: ALiBi and attention sinks.

ALiBi (2108.12409) adds a slope per head times the distance; Falcon's form of it is carried by the
keys.

An attention sink is a learned logit per head that joins the sum of exponentials and weighs no value
(StreamingLLM, 2309.17453; in this form GPT-OSS, 2508.10925).

    log_sum' = log(exp(log_sum) + exp(sink))       out' = out exp(log_sum - log_sum')
    dsink    = - sum over queries of exp(sink - log_sum') delta,   delta = sum of g out', per query

Sinks are applied after attention without a sink, so no kernel handles them. And out' and log_sum'
are those of attention to one more key, whose value is 0: given them, everything that backward
computes (blocks.py) is right as it stands.
"""

import torch
import torch.nn.functional as F
from jaxtyping import BFloat16, Float, Int64
from torch import Tensor

from dolmen.core import device


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return the ALiBi slope of each head, as in the paper's code, BLOOM and Falcon: 2^(-8/n),
    2^(-16/n), ..., 2^-8 where n = heads is a power of two. Else those of the next lower n, and
    after them the first, third, fifth, ... of 2 n, between which n's own lie.
    """
    # the largest power of two that is at most `heads`
    n = 1 << (heads.bit_length() - 1)
    return (
        *(2 ** (-8 * i / n) for i in range(1, n + 1)),
        *(2 ** (-4 * i / n) for i in range(1, 2 * (heads - n), 2)),
    )


def alibi_key_bias(heads: int, positions: Int64[Tensor, "b s"]) -> BFloat16[Tensor, "b s {heads}"]:
    """Return the ALiBi bias of the key at each of `positions`, per head; `b` may be 1. Slopes,
    positions and their products are rounded to bf16, as in the build_alibi_tensor of Falcon in
    transformers.
    """
    head_slopes = torch.tensor(alibi_slopes(heads), dtype=torch.bfloat16)
    return device.to_device(head_slopes, positions.device) * positions[..., None].bfloat16()


def append_key_bias(
    q: Float[Tensor, "b s heads size"],
    k: Float[Tensor, "b s heads size"],
    steps: Float[Tensor, "#b s heads"],
    more: int,
) -> tuple[Float[Tensor, "b s heads wide"], Float[Tensor, "b s heads wide"]]:
    """Return q and k widened by `more` numbers per head so that each product q k^T also adds the
    key's `steps` (ALiBi): a 1 in every query, the step in the key, then zeros.
    """
    step, zeros = steps.to(k.dtype).expand(k.shape[:3])[..., None], (0, more - 1)
    return F.pad(F.pad(q, (0, 1), value=1.0), zeros), F.pad(torch.cat((k, step), -1), zeros)


def join_sinks(
    out: Float[Tensor, "*queries size"],
    log_sum: Float[Tensor, "*queries"],
    sinks: Float[Tensor, "..."],
) -> tuple[Float[Tensor, "*queries size"], Float[Tensor, "*queries"]]:
    """Return out' (in out's dtype) and log_sum' of attention with sinks from out and log_sum of
    attention without: exp(sink) joins each sum of exponentials, and weighs no value. `queries` ends
    in heads; `sinks` broadcasts to it.
    """
    # torch's logaddexp differs in the remainder of a vector loop (ops/invariant.py)
    sinks = sinks.to(log_sum.dtype)
    total = torch.maximum(log_sum, sinks) + (log_sum - sinks).abs().neg().exp().log1p()
    # the sink takes a share of the softmax, so out shrinks
    return (out * (log_sum - total).exp()[..., None]).to(out.dtype), total


def sink_gradient(
    g: Float[Tensor, "*queries size"],
    out: Float[Tensor, "*queries size"],
    log_sum: Float[Tensor, "*queries"],
    sinks: Float[Tensor, "..."],
) -> Float[Tensor, "..."]:
    """Return the gradient of `sinks`, in their shape, from g, the gradient of out'; `out` and
    `log_sum` are what `join_sinks` returned.
    """
    delta = (g.to(log_sum.dtype) * out).sum(-1)
    p = (sinks.to(log_sum.dtype) - log_sum).exp()
    return -(p * delta).sum_to_size(sinks.shape).to(sinks.dtype)
