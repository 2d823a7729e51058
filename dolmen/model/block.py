"""One layer: a mixer and an mlp around the residual stream, arranged as
dolmen/model/spec/block.py says.


Which module computes which component of the tree (dolmen/model/spec): one line for each.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Generic, TypeVar

from jaxtyping import Float
from torch import Tensor, nn

from dolmen.core.autograd import recompute
from dolmen.model import spec
from dolmen.model.attention import Attention, LatentAttention
from dolmen.model.component import Branch, Component, Given, LayerCache, Setting, enter, leave
from dolmen.model.head import Logits, Values
from dolmen.model.layers import Norm
from dolmen.model.mlp import MLP, MoE
from dolmen.model.spec import Leaves, under
from dolmen.ops import elementwise
from dolmen.ops.attention import Attend
from dolmen.parallel.data import Unit

C = TypeVar("C", bound=Component)


class Block(nn.Module, Generic[C]):
    """x [batch * length, hidden] -> the same. Its norms and branches are registered in the order
    of the arrangement; `leaves` are the block's parameters.
    """

    takes: type[Component] = Component
    """What its mixer and its mlp must be."""
    norms: tuple[str, ...] = ()
    """Names of the norms that some arrangements have; None in a block without one."""
    attn: C
    mlp: C

    def __init__(self, block: spec.Block, leaves: Leaves, setting: Setting, attn: C, mlp: C):
        super().__init__()
        self.layer, self.dropout = setting.layer, setting.training.dropout
        self.whole = setting.split.recompute.of(setting.layer) == "full"
        branches, kernels = {"attn": attn, "mlp": mlp}, setting.split.kernels
        for name in block.arrangement.modules:
            module = branches.get(name)
            if module is None:
                module = Norm(block.norm, under(leaves, name), kernels)
            setattr(self, name, module)
        for name in self.norms:
            if name not in block.arrangement.modules:
                self.register_module(name, None)

    def forward(
        self, x: Float[Tensor, "here hidden"], given: Given, cache: LayerCache | None = None
    ) -> Float[Tensor, "here hidden"]:
        return (
            recompute(self.stream, x, given)
            if self.whole and cache is None
            else self.stream(x, given, cache)
        )

    def stream(
        self, x: Float[Tensor, "here hidden"], given: Given, cache: LayerCache | None = None
    ) -> Float[Tensor, "here hidden"]:
        """What `forward` computes, or computes again in backward."""
        raise NotImplementedError

    def drop(
        self, y: Float[Tensor, "here hidden"], given: Given, site: int
    ) -> Float[Tensor, "here hidden"]:
        """Apply dropout, where it acts, to what is added to the residual stream."""
        if given.noise is None:
            return y
        assert given.rows is not None
        return elementwise.residual(
            y, self.dropout, given.noise, given.noise.site(site), given.rows
        )

    def units(self) -> list[Unit]:
        """What is gathered and reduced by itself inside the block."""
        return [*self.attn.units(), *self.mlp.units()]

    def compile_static(self) -> None:
        """torch.compile of all of it, or of those of its two layers whose shapes are known."""
        layers = [self.attn, self.mlp]
        static = [layer for layer in layers if layer.static]
        for module in static if len(static) < len(layers) else [self]:
            module.compile()


class SequentialBlock(Block[Component]):
    """spec.Sequential: mixer, then mlp."""

    norms = ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")
    attn_norm: Norm | None
    attn_post_norm: Norm | None
    mlp_norm: Norm | None
    mlp_post_norm: Norm | None

    def __init__(
        self, block: spec.Block, leaves: Leaves, setting: Setting, attn: Component, mlp: Component
    ):
        super().__init__(block, leaves, setting, attn, mlp)
        assert isinstance(block.arrangement, spec.Sequential)
        self.arrangement = block.arrangement

    def stream(
        self, x: Float[Tensor, "here hidden"], given: Given, cache: LayerCache | None = None
    ) -> Float[Tensor, "here hidden"]:
        def mixer(y: Tensor) -> Tensor:
            y = self.attn(y, given, cache)
            y = y if self.attn_post_norm is None else self.attn_post_norm(y)
            return self.drop(y, given, elementwise.MIXER)

        def mlp(y: Tensor) -> Tensor:
            y = self.mlp(y, given)
            y = y if self.mlp_post_norm is None else self.mlp_post_norm(y)
            return self.drop(y, given, elementwise.MLP)

        return self._add(self._add(x, mixer, self.attn_norm), mlp, self.mlp_norm)

    def _add(
        self,
        x: Float[Tensor, "here hidden"],
        branch: Callable[[Tensor], Tensor],
        norm: Norm | None,
    ) -> Float[Tensor, "here hidden"]:
        """Add a branch to the residual stream; `norm` stands before the branch or, with "post",
        behind the sum.
        """
        around = self.arrangement
        post = around.norms == "post"
        y = x if norm is None or post else norm(x)
        added = _scaled(branch(y), around.branch_scale)
        x = _scaled(y if around.residual == "normed" else x, around.residual_scale) + added
        return norm(x) if norm is not None and post else x


def _scaled(y: Tensor, scale: float) -> Tensor:
    return y if scale == 1 else scale * y


class ParallelBlock(Block[Branch]):
    """spec.Parallel: x += mixer(norm x) + mlp(norm x), with dropout of the sum.

        one norm                           two norms
        x -> norm -> enter -> mixer \\      x -> norm -> enter -> mixer \\
                           -> mlp   + ->   x -> norm -> enter -> mlp   + -> leave, added to x

    Both branches are added while they are partial sums over tp: a layer leaves by one collective
    forward, and with one norm enters by one backward, where sequential layers have two each. Two
    norms are two inputs, each with a gradient to be summed.
    """

    takes = Branch
    norms = ("norm",)
    norm: Norm | None
    """Of both; None: each has its own."""
    attn_norm: Norm
    mlp_norm: Norm

    def stream(
        self, x: Float[Tensor, "here hidden"], given: Given, cache: LayerCache | None = None
    ) -> Float[Tensor, "here hidden"]:
        both, (attn, mlp) = [self.attn, self.mlp], self.entered(x)
        results = [self.attn.between(attn, given, cache), self.mlp.between(mlp, given)]
        return x + self.drop(leave(both, results), given, elementwise.MLP)

    def entered(
        self, x: Float[Tensor, "here hidden"]
    ) -> Sequence[Sequence[Float[Tensor, "tokens _"]]]:
        """The products with the columns of the mixer, and with those of the mlp."""
        if self.norm is not None:
            return enter([self.attn, self.mlp], self.norm(x))
        return [*enter([self.attn], self.attn_norm(x)), *enter([self.mlp], self.mlp_norm(x))]


MIXERS = {spec.Attention: Attention, spec.LatentAttention: LatentAttention}
MLPS = {spec.Mlp: MLP, spec.Experts: MoE}
HEADS = {spec.Head: Logits, spec.Scalar: Values}
BLOCKS = {spec.Sequential: SequentialBlock, spec.Parallel: ParallelBlock}

# What a tree can say and no module computes: any other value is refused.
ONLY: dict[type, dict[str, Any]] = {}


def build_block(block: spec.Block, leaves: Leaves, setting: Setting) -> Block:
    """The module of a block, of whose parameters are `leaves`."""
    mixer = MIXERS[type(block.mixer)](block.mixer, under(leaves, "attn"), setting)
    mlp = MLPS[type(block.mlp)](block.mlp, under(leaves, "mlp"), setting)
    return BLOCKS[type(block.arrangement)](block, leaves, setting, mixer, mlp)


def attention_kinds(model: spec.Tree) -> list[Attend]:
    """What attention each layer is."""
    return [MIXERS[type(block.mixer)].attend(block.mixer) for block in model.blocks]


def check_supported(model: spec.Tree) -> None:
    """Raises ValueError for a component, a value of one, or a block of some that nothing here
    computes.
    """
    for block in model.blocks:
        _check_arrangement(block)
    for component in _inside(model):
        kind = type(component)
        for name, computed in ONLY.get(kind, {}).items():
            value = getattr(component, name)
            if value != computed:
                raise ValueError(
                    f"{kind.__name__}.{name} is {value}: dolmen computes {computed} alone"
                )


def _check_arrangement(block: spec.Block) -> None:
    takes = BLOCKS[type(block.arrangement)].takes
    for component, module in (
        (block.mixer, MIXERS[type(block.mixer)]),
        (block.mlp, MLPS[type(block.mlp)]),
    ):
        if not issubclass(module, takes):
            raise ValueError(
                f"the arrangement {block.arrangement} with {component}: dolmen arranges "
                f"{type(component).__name__} otherwise alone"
            )


def _inside(value: Any) -> Iterator[Any]:
    """Every component under a value of the tree, itself included."""
    if isinstance(value, tuple):
        for one in value:
            yield from _inside(one)
    elif is_dataclass(value):
        yield value
        for field in fields(value):
            yield from _inside(getattr(value, field.name))
