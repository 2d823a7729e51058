"""The state of AdamW beside the weights of a source, by our names and in our shapes: the rules that
say what a stored weight is say it of its moments too, for an update is of each number alone.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from jaxtyping import Shaped
from torch import Tensor

from dolmen.conversion.weights import Scales
from dolmen.files.safetensors import Spec

MOMENTS = ("exp_avg", "exp_avg_sq")


class Tensors(Protocol):
    """One for each parameter of a model."""

    @property
    def where(self) -> Path:
        """The folder that its tensors lie in."""
        ...

    @property
    def specs(self) -> Mapping[str, Spec]:
        """Shape, and dtype as it is stored, of every parameter of the tree, in its order; no tensor
        is read. Raises KeyError for tensors that are missing or have no place in the model,
        ValueError for those that are mis-shaped or of a dtype that is not read, and for damaged
        files.
        """
        ...

    def stream(self, only: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """(name, whole CPU tensor, as in `specs`) of every parameter, or of `only`, once, in the
        order in which they lie. One stored tensor is in memory at a time if the caller lets go of
        each. Checks first, as `specs` does, and raises ValueError for damage that is found later.
        """
        ...

    def read(self, name: str) -> Shaped[Tensor, "*whole"]:
        """One parameter, as `stream` gives it. Raises KeyError where there is none, and as
        `stream`.
        """
        ...


def check_whole(*sources: Tensors) -> None:
    """Looks at what is stored, and reads no tensor. Raises as `Tensors.specs`."""
    for source in sources:
        _ = source.specs


@dataclass(frozen=True)
class Moments:
    """After `step` updates."""

    step: int
    kinds: Mapping[str, Tensors]
    """Tensors of each trained parameter, by the names of MOMENTS."""


class WeightsAlone:
    """A source of which nothing but weights comes along."""

    @property
    def precise(self) -> Self:
        return self

    @property
    def moments(self) -> None:
        return None

    @property
    def scaling(self) -> Scales:
        return {}
