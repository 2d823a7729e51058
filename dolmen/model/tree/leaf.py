"""A leaf: everything that is known of one parameter before there is a tensor, once. What places,
initialises, groups, counts and checks parameters reads it here.
"""

import math
from dataclasses import dataclass
from typing import Literal

Role = Literal["matrix", "embedding", "head", "norm", "bias", "router", "expert"]


@dataclass(frozen=True)
class Cut:
    """How one dim of a parameter is split over a mesh axis: `units` equal pieces of it may not be
    parted further, such as the heads of a query projection.
    """

    axis: Literal["tp", "ep"]
    dim: int
    units: int
    """What the size of the axis must divide."""
    knob: str
    """Name of the field that sets `units`, for the refusal."""
    or_whole: bool = False
    """Where the axis does not divide the units: every rank stores all of it, uses some, and its
    gradient is partial.
    """
    uneven: bool = False
    """The pieces need not be equal (rows of a vocabulary)."""


@dataclass(frozen=True)
class Leaf:
    """One parameter, by the name that it has in its component."""

    shape: tuple[int, ...]
    role: Role
    cuts: tuple[Cut, ...] = ()
    gradient: Literal["own", "residual", "branch"] = "own"
    """Of what every rank of tp stores whole: its type on tp. `residual`: it sees this rank's tokens
    of the residual stream, partial under sequence parallelism; `branch`: it sees this rank's heads
    or columns, always partial.
    """
    initial: Literal["normal", "ones", "zeros"] = "normal"
    std_scale: float = 1.0
    """Of `normal`: times the model's initializer_range."""
    products: float = 0.0
    """Multiply-adds per token, as a share of the elements: 1 for a matrix, k / E for k of E
    experts, 0 for a table or a vector.
    """
    trained: bool = True
    """Whether gradients move it."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


Leaves = dict[str, Leaf]


def within(prefix: str, leaves: Leaves) -> Leaves:
    """The same under `prefix.`"""
    return {f"{prefix}.{name}": leaf for name, leaf in leaves.items()}
