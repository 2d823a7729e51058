"""The leaves of the decoder: modules that own parameters, each with its placements on tp. Placement
plans are read off `placements`, so the sharder and the memory planner cannot disagree.

    column   W S(0)@tp: its outputs are split
    row      W S(1)@tp: its inputs are split, the sum leaves the block
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dolmen.core import ranges
from dolmen.core.state import Placement, Places, Replicate, Shard, local
from dolmen.ops.kernels import Kernels
from dolmen.ops.norm import rms_norm
from dolmen.parallel import tensor
from dolmen.parallel.tensor import TensorParallel


class Leaf(nn.Module):
    """A module that owns parameters. `placements` says, per parameter, how it lies on tp (or ep and
    tp), `gradients` the type of its gradient on tp where that is not its own: Partial() for a
    weight stored whole but used on this rank's part of the activations. `std_scale` scales the
    initial std.
    """

    placements: dict[str, Places]
    gradients: Mapping[str, Placement | None] = MappingProxyType({})
    std_scale: float = 1.0


class Column(Leaf):
    """Weight and bias of a column-parallel linear (or, `whole`, kept by every rank, which uses some
    rows: `grad` types their gradient); `tensor.columns` multiplies them.
    """

    def __init__(
        self, inp: int, out: int, bias: bool, whole: bool = False, grad: Placement | None = None
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, inp))
        self.bias = nn.Parameter(torch.empty(out)) if bias else None
        place = Replicate() if whole else Shard(0)
        self.placements = {"weight": place, "bias": place}
        self.gradients = {"weight": grad, "bias": grad}


class Row(Leaf):
    """y = x W^T + b, W split over its inputs: x S(1)@tp -> y I@tp, or S(0)@tp under sequence
    parallelism.
    """

    def __init__(self, inp: int, out: int, bias: bool, tp: TensorParallel, std_scale: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, inp))
        self.bias = nn.Parameter(torch.empty(out)) if bias else None
        self.placements = {"weight": Shard(1), "bias": Replicate()}
        self.gradients = {"bias": tp.residual_grad}
        self.tp, self.std_scale = tp, std_scale

    def forward(self, x: Tensor) -> Tensor:
        y = tensor.rows(x, local(self.weight), self.tp)
        return y if self.bias is None else y + local(self.bias)


class Norm(Leaf):
    """RMSNorm or LayerNorm over the last dim. `grad` types the weight's gradient on tp where it
    sees a part of the tokens or heads.
    """

    placements = {"weight": Replicate(), "bias": Replicate()}

    def __init__(
        self, size: int, kind: str, eps: float, grad: Placement | None, kernels: Kernels = Kernels()
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if kind == "layernorm" else None
        self.eps, self.kind = eps, kernels.norm
        self.gradients = {"weight": grad, "bias": grad}

    def forward(self, x: Tensor) -> Tensor:
        weight = local(self.weight)
        bias = None if self.bias is None else local(self.bias)
        with ranges.mark("norm"):
            if bias is None:
                return rms_norm(x, weight, self.eps, self.kind)
            return F.layer_norm(x, (x.shape[-1],), weight, bias, self.eps)


class Embedding(Leaf):
    """The vocabulary-parallel table: tokens [n] -> [n, hidden] I@tp, or S(0)@tp. Its weight may
    serve as the head too.
    """

    placements = {"weight": Shard(0)}

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.vocab_size, self.tp = vocab_size, tp

    def forward(self, tokens: Tensor) -> Tensor:
        return tensor.embed(tokens, local(self.weight), self.vocab_size, self.tp)


class Positions(Leaf):
    """A learned table of positions (GPT-2): whole on every rank, its gradient partial where a rank
    sees some of the tokens.
    """

    placements = {"weight": Replicate()}

    def __init__(self, length: int, hidden_size: int, tp: TensorParallel):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, hidden_size))
        self.gradients = {"weight": tp.residual_grad}

    def forward(self, positions: Tensor) -> Tensor:
        return F.embedding(positions, local(self.weight))
