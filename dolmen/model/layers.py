"""Modules that own parameters, made from leaves (dolmen/model/tree/leaf.py), and what a leaf says
of a parameter on this rank: how it lies on tp, and of which type its gradient is.
"""

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dolmen.core import host, ranges
from dolmen.core.state import Places, Replicate, Shard, local
from dolmen.model import tree
from dolmen.model.tree import Leaf, Leaves
from dolmen.ops.kernels import Kernels
from dolmen.ops.norm import rms_norm
from dolmen.parallel import tensor, vocabulary
from dolmen.parallel.tensor import TensorParallel


def places(leaf: Leaf, sizes: Mapping[str, int]) -> Places:
    """How a parameter lies on tp, or of an expert on (ep, tp), which have so many ranks."""
    on = {
        cut.axis: Shard(cut.dim) if cut.splits(sizes[cut.axis]) else Replicate()
        for cut in leaf.cuts
    }
    tp = on.get("tp", Replicate())
    return (on["ep"], tp) if "ep" in on else tp


def is_partial(leaf: Leaf, tp: TensorParallel) -> bool:
    """Whether the gradient of a parameter is a partial sum over tp."""
    if any(cut.axis == "tp" and cut.splits(tp.axis.size) for cut in leaf.cuts):
        return False
    return {"own": False, "residual": tp.residual_partial, "branch": tp.branch_partial}[
        leaf.gradient
    ]


class Parameters(nn.Module):
    """Owns what `leaves` names: a weight, and a bias where there is one."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, leaves: Leaves):
        super().__init__()
        self.bias = None
        for name, leaf in leaves.items():
            setattr(self, name, nn.Parameter(torch.empty(leaf.shape), requires_grad=leaf.trained))


class Column(Parameters):
    """Weight and bias of a column-parallel linear; `tensor.columns` multiplies them."""


class Row(Parameters):
    """y = x W^T + b, W split over its inputs: x S(1)@tp -> y I@tp, or S(0)@tp under sequence
    parallelism.
    """

    def __init__(self, leaves: Leaves, tp: TensorParallel):
        super().__init__(leaves)
        self.tp = tp

    def forward(self, x: Float[Tensor, "tokens in"]) -> Float[Tensor, "here out"]:
        y = tensor.rows([x], [local(self.weight)], self.tp)
        return y if self.bias is None else y + local(self.bias)


class Norm(Parameters):
    """RMSNorm or LayerNorm over the last dim."""

    def __init__(self, norm: tree.Norm, leaves: Leaves, kernels: Kernels):
        super().__init__(leaves)
        self.eps = norm.eps
        self.kernel: Literal["passes", "fused"] = kernels.norm
        self.centres, self.zero_centred = norm.kind == "layernorm", norm.zero_centred

    def forward(self, x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        weight = local(self.weight)
        with ranges.mark("norm"):
            if not self.centres:
                return rms_norm(x, weight, self.eps, self.kernel, self.zero_centred)
            bias = None if self.bias is None else local(self.bias)
            return F.layer_norm(x, (x.shape[-1],), weight, bias, self.eps)


class Embedding(Parameters):
    """The vocabulary-parallel table, times its scale: tokens [n] -> [n, hidden] I@tp, or S(0)@tp.
    Its weight may serve as the head too, without the scale.
    """

    def __init__(self, embedding: tree.Embedding, leaves: Leaves, tp: TensorParallel):
        super().__init__(leaves)
        self.vocab_size, self.scale, self.tp = embedding.rows, embedding.scale, tp

    def forward(self, tokens: Int[Tensor, " tokens"]) -> Float[Tensor, "here hidden"]:
        x = vocabulary.embed(tokens, local(self.weight), self.vocab_size, self.tp)
        if self.scale == 1:
            return x
        # rounded to x's dtype, as in transformers: sqrt(3072) = 55.43 is 55.5 in bf16
        return x * host.number(self.scale, x.dtype, x.device)


class Positions(Parameters):
    """A learned table of positions (GPT-2): positions [n] -> [n, hidden]."""

    def forward(self, positions: Int[Tensor, " here"]) -> Float[Tensor, "here hidden"]:
        return F.embedding(positions, local(self.weight))
