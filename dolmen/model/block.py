"""One layer: a mixer and an mlp around the residual stream. How they are arranged, and with which
norms, is a subclass, one for each arrangement.
"""

from typing import Generic, TypeVar

from jaxtyping import Float
from torch import Tensor, nn

from dolmen.model.cached import LayerCache
from dolmen.model.component import Component, Setting
from dolmen.model.given import Given
from dolmen.ops import dropout
from dolmen.parallel.data import Unit
from dolmen.parallel.recompute import again

C = TypeVar("C", bound=Component)


class Block(nn.Module, Generic[C]):
    """x [batch * length, hidden] -> the same. A subclass makes its norms in the order of its
    parameters, keeps `attn` and `mlp` among them, and says in `stream` how x passes.
    """

    takes: type[Component] = Component
    """What its mixer and its mlp must be."""
    attn: C
    mlp: C

    def __init__(self, setting: Setting):
        super().__init__()
        self.layer, self.dropout = setting.layer, setting.training.dropout
        self.whole = setting.split.recompute.of(setting.layer) == "full"

    def forward(
        self, x: Float[Tensor, "here hidden"], given: Given, cache: LayerCache | None = None
    ) -> Float[Tensor, "here hidden"]:
        return (
            again(self.stream, x, given)
            if self.whole and cache is None
            else self.stream(x, given, cache)
        )

    def stream(
        self, x: Float[Tensor, "here hidden"], given: Given, cache: LayerCache | None = None
    ) -> Float[Tensor, "here hidden"]:
        """What `forward` computes, or computes again."""
        raise NotImplementedError

    def drop(
        self, y: Float[Tensor, "here hidden"], given: Given, site: int
    ) -> Float[Tensor, "here hidden"]:
        """What is added to the residual stream, with dropout where it acts."""
        if given.noise is None:
            return y
        assert given.rows is not None
        return dropout.residual(y, self.dropout, given.noise, given.noise.site(site), given.rows)

    def units(self) -> list[Unit]:
        """What is gathered and reduced by itself inside the block."""
        return [*self.attn.units(), *self.mlp.units()]

    def compile_static(self) -> None:
        """torch.compile of all of it, or of those of its two layers whose shapes are known."""
        layers = [self.attn, self.mlp]
        static = [layer for layer in layers if layer.static]
        for module in static if len(static) < len(layers) else [self]:
            module.compile()
