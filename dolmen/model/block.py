"""Transformer blocks, and which module computes which spec (MIXERS, MLPS, HEADS, BLOCKS).

Problem. Families differ in where the norms of a block are, in what the branches are added to, and
in whether mixer and mlp run one after the other or in parallel. Six classes of blocks would each
repeat dropout, recomputation and the cache.

Idea. Placement is data (dolmen/model/spec/block.py), and two classes read it. `SequentialBlock`
applies one formula twice, for mixer and mlp:

    y = x                       or norm(x)           norms "pre", "sandwich"
    b = branch(y)               or norm(branch(y))   norms "output", "sandwich"
    x = scale_r * (x or y) + scale_b * dropout(b)    residual "normed": y (BLOOM, DeepNorm)
    x = norm(x)                                      norms "post"

`ParallelBlock` computes x + mixer(norm x) + mlp(norm x). Both branches enter tensor parallelism
together and their partial sums are added before they leave it, so a layer has one collective
forward where two sequential branches have two.

Invariants. Modules are registered in the order of the arrangement, as parameters are named by it.
Under full recomputation the whole block is recomputed in backward, but never with a KV cache, where
nothing is differentiated. Where modules compute one value of a spec's field only, ONLY has that
value, and any other raises an error when the model is built.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dolmen.core.autograd import recompute
from dolmen.model import spec
from dolmen.model.attention import Attention, LatentAttention
from dolmen.model.component import (
    Branch,
    Component,
    LayerCache,
    LayerInputs,
    ModuleContext,
    enter,
    leave,
)
from dolmen.model.head import LMHead, ScalarHead
from dolmen.model.layers import Norm
from dolmen.model.mlp import MLP, MoE
from dolmen.model.spec import ParamSpecs, select_prefix
from dolmen.ops import elementwise
from dolmen.ops.attention import Attend
from dolmen.parallel.data import Unit

C = TypeVar("C", bound=Component)


class TransformerBlock(nn.Module, Generic[C]):
    """One layer: x [batch * length, hidden] -> the same shape. Norms and branches are registered in
    the order of the arrangement; `params` are the block's parameters.
    """

    takes: type[Component] = Component
    """Base class required of the mixer and the mlp."""
    norms: tuple[str, ...] = ()
    """Names of the norms that some arrangements lack; a block without one has None there."""
    attn: C
    mlp: C

    def __init__(
        self, block: spec.BlockSpec, params: ParamSpecs, setting: ModuleContext, attn: C, mlp: C
    ):
        """Register the branches `attn` and `mlp`, and norms built from `params`, in the order of
        the block's arrangement; optional norms that it lacks are None.
        """
        super().__init__()
        self.layer, self.dropout = setting.layer, setting.training.dropout
        self.recompute_all = setting.split.recompute.kind_of(setting.layer) == "full"
        branches, kernels = {"attn": attn, "mlp": mlp}, setting.split.kernels
        for name in block.arrangement.modules:
            module = branches.get(name)
            if module is None:
                # a name that is no branch is a norm's
                module = Norm(block.norm, select_prefix(params, name), kernels)
            setattr(self, name, module)
        for name in self.norms:
            # registered as None, so that compute may read it in every arrangement
            if name not in block.arrangement.modules:
                self.register_module(name, None)

    def forward(
        self, x: Float[Tensor, "here hidden"], inputs: LayerInputs, cache: LayerCache | None = None
    ) -> Float[Tensor, "here hidden"]:
        """Return the layer's output. Under full recomputation only x is kept for backward, unless a
        KV `cache` is used.
        """
        return (
            recompute(self.compute, x, inputs)
            if self.recompute_all and cache is None
            else self.compute(x, inputs, cache)
        )

    def compute(
        self, x: Float[Tensor, "here hidden"], inputs: LayerInputs, cache: LayerCache | None = None
    ) -> Float[Tensor, "here hidden"]:
        """Return the layer's output for x; subclasses implement the arrangement of norms, mixer and
        mlp here.
        """
        raise NotImplementedError

    def apply_dropout(
        self, y: Float[Tensor, "here hidden"], inputs: LayerInputs, site: int
    ) -> Float[Tensor, "here hidden"]:
        """Apply dropout to a branch output y before it is added to the residual stream; unchanged
        without `inputs.noise`. `site` numbers the place in the layer, so that each has its own
        mask.
        """
        if inputs.noise is None:
            return y
        assert inputs.rows is not None
        # the mask depends on key, layer, site and the token's index in the global batch: the same
        # in every layout and when recomputed
        return elementwise.dropout(
            y, self.dropout, inputs.noise, inputs.noise.site(site), inputs.rows
        )

    def units(self) -> list[Unit]:
        """Return the modules of the block that FSDP gathers and reduces as units of their own."""
        return [*self.attn.units(), *self.mlp.units()]

    def compute_compiled(
        self, x: Float[Tensor, "here hidden"], inputs: LayerInputs, cache: LayerCache
    ) -> Float[Tensor, "here hidden"]:
        """Return `compute` of a forward that only decodes, compiled with torch.compile unless mixer
        or mlp has data-dependent shapes. One graph serves all blocks of a kind, as their weights
        are its inputs.
        """
        if not (self.attn.static and self.mlp.static):
            return self.compute(x, inputs, cache)
        # an engine disables what is compiled for training, whose graphs are of other shapes
        with torch.compiler.set_stance("default"):
            return _compile(type(self).compute)(self, x, inputs, cache)

    def compile_static(self) -> None:
        """Compile the block with torch.compile; if mixer or mlp has data-dependent shapes (an MoE
        layer), compile the static ones of the two only.
        """
        layers = [self.attn, self.mlp]
        # compiling the whole block around a data-dependent shape would recompile per batch
        static = [layer for layer in layers if layer.static]
        for module in static if len(static) < len(layers) else [self]:
            module.compile()


@cache
def _compile(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a block's `compute` compiled with torch.compile."""
    # packed weights have no strides, which the graph would compare
    return torch.compile(compute, options={"size_asserts": False})


class SequentialBlock(TransformerBlock[Component]):
    """Mixer, then mlp, each added to the residual stream (spec.SequentialResidual)."""

    norms = ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")
    attn_norm: Norm | None
    attn_post_norm: Norm | None
    mlp_norm: Norm | None
    mlp_post_norm: Norm | None

    def __init__(
        self,
        block: spec.BlockSpec,
        params: ParamSpecs,
        setting: ModuleContext,
        attn: Component,
        mlp: Component,
    ):
        """Register branches and norms as any block does, and keep the placement of norms and the
        scales of residual and branches. `block`: the block's spec.
        """
        super().__init__(block, params, setting, attn, mlp)
        assert isinstance(block.arrangement, spec.SequentialResidual)
        self.arrangement = block.arrangement

    def compute(
        self, x: Float[Tensor, "here hidden"], inputs: LayerInputs, cache: LayerCache | None = None
    ) -> Float[Tensor, "here hidden"]:
        """Return the layer's output: x with the mixer's and then the mlp's output added, normed and
        scaled as the arrangement says.
        """

        def mixer(y: Tensor) -> Tensor:
            """Return attention's output, normalised ("output", "sandwich") and with dropout."""
            y = self.attn(y, inputs, cache)
            y = y if self.attn_post_norm is None else self.attn_post_norm(y)
            return self.apply_dropout(y, inputs, elementwise.MIXER)

        def mlp(y: Tensor) -> Tensor:
            """Return the feed-forward output, normalised ("output", "sandwich") and with
            dropout.
            """
            y = self.mlp(y, inputs)
            y = y if self.mlp_post_norm is None else self.mlp_post_norm(y)
            return self.apply_dropout(y, inputs, elementwise.MLP)

        return self._add(self._add(x, mixer, self.attn_norm), mlp, self.mlp_norm)

    def _add(
        self,
        x: Float[Tensor, "here hidden"],
        branch: Callable[[Tensor], Tensor],
        norm: Norm | None,
    ) -> Float[Tensor, "here hidden"]:
        """Return scale_r * residual + scale_b * branch(y). `norm` is applied before the branch, or
        to the sum where norms are "post"; None: no norm.
        """
        around = self.arrangement
        post = around.norms == "post"
        # y is the branch input; with residual "normed" it is the residual, too
        y = x if norm is None or post else norm(x)
        # Granite: residual_multiplier
        added = _scale(branch(y), around.branch_scale)
        # BLOOM and DeepNorm add to the normed input
        x = _scale(y if around.residual == "normed" else x, around.residual_scale) + added
        return norm(x) if norm is not None and post else x


def _scale(y: Tensor, scale: float) -> Tensor:
    """Return scale * y; y itself for a scale of 1."""
    return y if scale == 1 else scale * y


class ParallelBlock(TransformerBlock[Branch]):
    """Parallel mixer and mlp: x += mixer(norm x) + mlp(norm x), with dropout of the sum.

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
    """Norm before both branches; None: each has its own."""
    attn_norm: Norm
    mlp_norm: Norm

    def compute(
        self, x: Float[Tensor, "here hidden"], inputs: LayerInputs, cache: LayerCache | None = None
    ) -> Float[Tensor, "here hidden"]:
        """Return x plus the sum of mixer and mlp, which read the same x; dropout is applied to
        their sum.
        """
        # column-parallel products of both, by one collective (two norms: two)
        both, (attn, mlp) = [self.attn, self.mlp], self.enter_branches(x)
        results = [
            self.attn.inner_with_hooks(attn, inputs, cache),
            self.mlp.inner_with_hooks(mlp, inputs),
        ]
        # one all-reduce (or reduce-scatter) for both branches
        return x + self.apply_dropout(leave(both, results), inputs, elementwise.MLP)

    def enter_branches(
        self, x: Float[Tensor, "here hidden"]
    ) -> Sequence[Sequence[Float[Tensor, "tokens _"]]]:
        """Return the column-parallel products of the normed x: first the mixer's, then the
        mlp's.
        """
        if self.norm is not None:
            return enter([self.attn, self.mlp], self.norm(x))
        return [*enter([self.attn], self.attn_norm(x)), *enter([self.mlp], self.mlp_norm(x))]


MIXERS = {spec.AttentionSpec: Attention, spec.LatentAttentionSpec: LatentAttention}
MLPS = {spec.MLPSpec: MLP, spec.MoESpec: MoE}
HEADS = {spec.LMHeadSpec: LMHead, spec.ScalarHeadSpec: ScalarHead}
BLOCKS = {spec.SequentialResidual: SequentialBlock, spec.ParallelResidual: ParallelBlock}

# Spec class -> field -> the only value that a module computes; others raise an error.
ONLY: dict[type, dict[str, Any]] = {}


def build_block(
    block: spec.BlockSpec, params: ParamSpecs, setting: ModuleContext
) -> TransformerBlock:
    """Build the module of a block from its spec; `params` are the block's parameters, without its
    prefix.
    """
    # a new kind of mixer or mlp is a spec, a module, and an entry in these tables
    mixer = MIXERS[type(block.mixer)](block.mixer, select_prefix(params, "attn"), setting)
    mlp = MLPS[type(block.mlp)](block.mlp, select_prefix(params, "mlp"), setting)
    return BLOCKS[type(block.arrangement)](block, params, setting, mixer, mlp)


def attention_kinds(model: spec.ModelSpec) -> list[Attend]:
    """Return the kind of attention (mask, window, scale, ALiBi) of each layer, in order."""
    return [MIXERS[type(block.mixer)].attend(block.mixer) for block in model.blocks]


def check_supported(model: spec.ModelSpec) -> None:
    """Raise ValueError if the model has an arrangement that its mixer or mlp does not fit, or a
    component with a field value that no module computes.
    """
    for block in model.blocks:
        _check_arrangement(block)
    for component in _components(model):
        kind = type(component)
        for name, computed in ONLY.get(kind, {}).items():
            value = getattr(component, name)
            if value != computed:
                raise ValueError(f"{kind.__name__}.{name} is {value}: only {computed} is supported")


def _check_arrangement(block: spec.BlockSpec) -> None:
    """Raise ValueError if a parallel block has a mixer or mlp that cannot share collectives with
    the other one, as its module is no `Branch` (latent attention, experts).
    """
    takes = BLOCKS[type(block.arrangement)].takes
    for component, module in (
        (block.mixer, MIXERS[type(block.mixer)]),
        (block.mlp, MLPS[type(block.mlp)]),
    ):
        if not issubclass(module, takes):
            raise ValueError(
                f"the arrangement {block.arrangement} with {component} is not supported for "
                f"{type(component).__name__}"
            )


def _components(value: Any) -> Iterator[Any]:
    """Yield `value` and, depth first, every dataclass inside its fields and tuples."""
    if isinstance(value, tuple):
        for item in value:
            yield from _components(item)
    elif is_dataclass(value):
        yield value
        for field in fields(value):
            yield from _components(getattr(value, field.name))
