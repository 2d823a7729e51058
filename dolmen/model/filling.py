"""What the head of a model that fills in masked tokens makes of the last hidden vectors before they
are multiplied (dolmen/model/tree/ends.py: Transform). Every rank computes it of its own tokens.
"""

from jaxtyping import Float
from torch import Tensor

from dolmen.model import tree
from dolmen.model.layers import Norm, Whole
from dolmen.model.tree import Leaves, under
from dolmen.ops.activation import ACTIVATIONS
from dolmen.ops.kernels import Kernels
from dolmen.parallel.tensor import TensorParallel


class Transform(Whole):
    """norm(act(W x + b))."""

    def __init__(
        self, transform: tree.Transform, leaves: Leaves, tp: TensorParallel, kernels: Kernels
    ):
        super().__init__({name: leaf for name, leaf in leaves.items() if "." not in name}, tp)
        self.act = ACTIVATIONS[transform.activation]
        self.norm = Norm(transform.norm, under(leaves, "norm"), kernels)

    def forward(self, x: Float[Tensor, "here hidden"]) -> Float[Tensor, "here hidden"]:
        return self.norm(self.act(super().forward(x)))
