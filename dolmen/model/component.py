"""What every module that computes a component of a block has, and is made with."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from dolmen.model.split import Split
from dolmen.model.training import Training
from dolmen.ops.attention import Attend
from dolmen.parallel.data import Unit


@dataclass(frozen=True)
class Setting:
    """Where a component stands: what its module needs to know beside it and its leaves."""

    layer: int
    split: Split
    training: Training


class Component(nn.Module):
    """A mixer, x [batch * length / cp, hidden] I@tp (or S(0)@tp) -> the same, by `forward(x, given,
    cache)`; or an mlp, by `forward(x, given)`.
    """

    @property
    def static(self) -> bool:
        """Whether no shape depends on the values of tensors, and nothing is read from the
        device.
        """
        return True

    @property
    def balance_bias(self) -> Float[Tensor, " experts"] | None:
        """Of its router, where a bias balances experts."""
        return None

    @staticmethod
    def attend(mixer: Any) -> Attend:
        """What attention a mixer of the tree is: of any microbatch, and all heads of the model."""
        raise NotImplementedError

    def units(self) -> list[Unit]:
        """What is gathered and reduced apart from the rest of its block, in the order of use."""
        return []
