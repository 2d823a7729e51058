"""Attention sinks: of each head a learned logit, which joins the sum of the exponentials and weighs
no value (StreamingLLM, 2309.17453; in this form GPT-OSS, 2508.10925).

    log_sum' = log(exp(log_sum) + exp(sink))       out' = out exp(log_sum - log_sum')
    dsink    = - sum over queries of exp(sink - log_sum') delta,   delta = sum of g out', per query

They come after attention without a sink, so no kernel knows of them. And out' and log_sum' are
those of attention to one more key, whose value is 0: given them, all that backward computes
(blocks.py) is right as it stands.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def join(
    out: Float[Tensor, "*queries size"],
    log_sum: Float[Tensor, "*queries"],
    sinks: Float[Tensor, "..."],
) -> tuple[Float[Tensor, "*queries size"], Float[Tensor, "*queries"]]:
    """out' in the dtype of out, log_sum'. `queries` ends in heads; `sinks` broadcasts to it."""
    total = torch.logaddexp(log_sum, sinks.to(log_sum.dtype))
    return (out * (log_sum - total).exp()[..., None]).to(out.dtype), total


def gradient(
    g: Float[Tensor, "*queries size"],
    out: Float[Tensor, "*queries size"],
    log_sum: Float[Tensor, "*queries"],
    sinks: Float[Tensor, "..."],
) -> Float[Tensor, "..."]:
    """Of `sinks`, as they are shaped, from the gradient of out'; out and log_sum are what `join`
    made.
    """
    delta = (g.to(log_sum.dtype) * out).sum(-1)
    p = (sinks.to(log_sum.dtype) - log_sum).exp()
    return -(p * delta).sum_to_size(sinks.shape).to(sinks.dtype)
