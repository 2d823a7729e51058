"""Interfaces of a block's modules: their inputs, the KV cache they are given, and column-row
branches.

A mixer or an mlp is a `Component`. Its forward takes this rank's residual stream x [tokens,
hidden], I@tp or S(0)@tp, and `LayerInputs`, what a layer needs beside it: positions, documents,
dropout noise, router losses.

The KV cache (`LayerCache`; implemented in dolmen/serving/kv_cache.py) is called by the mixer with
queries and the new keys and values. A cached forward has batch 1: the new tokens of all sequences
follow one another. Token-wise modules do not see sequences; only the cache has which token
belongs to which.

A `Branch` is a column-row pair of tensor parallelism (Megatron-LM, 1909.08053):

    x -> enter -> columns -> inner -> row -> leave -> y

    enter   I@tp: copy, backward all-reduces;   S(0)@tp: all-gather, backward reduce-scatters
    leave   I@tp: all-reduce;                    S(0)@tp: reduce-scatter

Branches of one input, or whose results are added, enter and leave together: one collective each way
for all of them, where each alone would have its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn

from dolmen.core import device
from dolmen.model.layers import RowParallelLinear
from dolmen.model.routing_replay import Routes
from dolmen.model.split import ModelSplit
from dolmen.model.training import Training
from dolmen.ops.attention import Attend, Documents
from dolmen.ops.elementwise import Noise
from dolmen.parallel import tensor
from dolmen.parallel.data import Unit
from dolmen.parallel.tensor import Linear, TensorParallel

PagedAttention = Callable[..., Tensor]
"""attend_paged(q [sequences, heads, size], *kept [pages, kv_heads, page, ...], pages: Pages |
Alone) -> [sequences, heads, value size]: one query of each sequence.
"""
SequenceAttention = Callable[..., Tensor]
"""attend_sequences(q [sequences, new, heads, size], *kept [sequences, length, kv_heads, ...],
documents: Documents | None) -> [sequences, new, heads, value size]: the last `new` of `length`
tokens of sequences of equal length; `documents` has their prefixes.
"""


@runtime_checkable
class LayerCache(Protocol):
    """KV cache of one layer during one forward."""

    def attend(
        self,
        q: Float[Tensor, "1 tokens heads size"],
        new: Sequence[Float[Tensor, "1 tokens kv_heads _"]],
        attend_paged: PagedAttention,
        attend_sequences: SequenceAttention,
    ) -> Float[Tensor, "tokens heads value_size"]:
        """Append the keys and values (or latents) in `new` to the cache, and return the attention
        of q over all cached tokens of each token's sequence. `attend_paged` computes sequences that
        decode (one new token, or a few with drafts), `attend_sequences` those that are prefilled.
        No autograd.
        """
        ...


@runtime_checkable
class ForwardCache(Protocol):
    """KV cache during one forward: positions of the new tokens, and each layer's cache."""

    @property
    def positions(self) -> Int64[Tensor, "streams 1 tokens"]:
        """Position of each token in its own sequence."""
        ...

    @property
    def lengths(self) -> Int64[Tensor, "1 tokens"] | None:
        """Length of the sequence of each token; None if no layer needs it."""
        ...

    @property
    def longest(self) -> int:
        """Length of the longest sequence in tokens, the new ones included."""
        ...

    @property
    def is_compiled(self) -> bool:
        """True if compiled blocks compute the forward: one new token of each sequence."""
        ...

    @property
    def layers(self) -> Sequence[LayerCache]:
        """KV cache of each layer, by its number in the model."""
        ...


class RouterLosses(NamedTuple):
    """Inputs by which the auxiliary losses of one MoE layer enter the gradient, and by which its
    statistics are collected.
    """

    scale: Float[Tensor, ""]
    """Weight of the losses of one sequence in the gradient."""
    tally: Float64[Tensor, " experts+2"]
    """Zeros, whose gradient is the statistics: number of tokens of each expert, then the sums of
    balance and z loss over sequences. Gradients accumulate over microbatches by themselves, and
    forward passes that are recomputed are not counted twice.
    """


class PositionInputs(NamedTuple):
    """Position inputs of a layer: rope tables, key bias and query factor, per sequence or shared by
    all (batch 1).
    """

    cos: Float[Tensor, "batch length 1 half"] | None = None
    """Cosines of rope's angles; None: no rope."""
    sin: Float[Tensor, "batch length 1 half"] | None = None
    steps: Float[Tensor, "batch length heads"] | None = None
    """ALiBi bias of each key before scaling (Falcon); None: no bias."""
    growth: Float[Tensor, "batch length 1 1"] | None = None
    """Factor of each query (Qwen's log-n scaling); None: 1."""


class LayerInputs(NamedTuple):
    """Inputs of a layer beside the residual stream, for this cp rank's `length` tokens of each
    sequence.
    """

    batch: int
    """Sequences of the microbatch."""
    cos: Float[Tensor, "batch length 1 half"] | None = None
    """See PositionInputs; of this layer."""
    sin: Float[Tensor, "batch length 1 half"] | None = None
    steps: Float[Tensor, "batch length heads"] | None = None
    growth: Float[Tensor, "batch length 1 1"] | None = None
    documents: Documents | None = None
    """Documents of this rank's tokens; None: each sequence is one, without a prefix."""
    noise: Noise | None = None
    """Dropout noise of this layer; None: no dropout."""
    rows: Int64[Tensor, " here"] | None = None
    """Index in the global batch of each token of this rank's residual stream, for dropout."""
    balance: RouterLosses | None = None
    """Router losses of an MoE layer; None: no gradient is wanted."""
    forced_experts: Int64[Tensor, "n k"] | None = None
    """Experts of each token, forced by routing replay; None: the router chooses."""
    on_routing: Callable[[Tensor], None] | None = None
    """Callback of an MoE layer with the experts of each token."""

    def for_layer(
        self,
        number: int,
        where: PositionInputs,
        balance: RouterLosses | None,
        routes: Routes | None = None,
    ) -> "LayerInputs":
        """Return these inputs for layer `number`: with its position inputs `where`, its router
        losses, its forced experts and routing callback from `routes`, and noise keyed by the layer
        number.
        """
        # cos, sin, steps and growth of this layer's kind of positions
        here = self._replace(**where._asdict(), balance=balance)
        if routes is not None:
            here = here._replace(
                forced_experts=routes.forced_experts.get(number), on_routing=routes.listener(number)
            )
        if self.noise is None:
            return here
        # a tensor, so that one compiled block serves all layers
        layer = device.scalar_tensor(number, torch.int64, self.noise.key.device)
        return here._replace(noise=self.noise._replace(layer=layer))


@dataclass(frozen=True)
class ModuleContext:
    """Layer number, split and training options that a module is built with, besides its spec and
    parameters.
    """

    layer: int
    split: ModelSplit
    training: Training


class Component(nn.Module):
    """A mixer, called as `forward(x, given, cache)`, or an mlp, called as `forward(x, given)`: x
    [batch * length / cp, hidden] I@tp (or S(0)@tp) -> the same shape and placement.
    """

    @property
    def static(self) -> bool:
        """True if no shape depends on values of tensors and nothing is read from the device, as for
        all but experts.

        Only static modules are compiled, and only others need explicit prefetching.
        """
        return True

    @property
    def balance_bias(self) -> Float[Tensor, " experts"] | None:
        """Balance bias of the router [experts]; None for a module without one."""
        return None

    @staticmethod
    def attend(mixer: Any) -> Attend:
        """Return the kind of attention (mask, window, scale, ALiBi slopes) of a mixer's spec, over
        all heads of the model. Raises NotImplementedError for modules that are no mixer.
        """
        raise NotImplementedError

    def units(self) -> list[Unit]:
        """Return the modules that FSDP gathers and reduces separately from the block, in the order
        of use.
        """
        return []


class Passthrough(nn.Module):
    """The identity: a module on which hooks can see values that are no module's result."""

    def forward(self, x: Any) -> Any:
        """Return x."""
        return x


class Branch(Component):
    """A mixer or mlp made of one column-parallel and one row-parallel product. Hooks on `products`
    and `result` see the input and the output of `inner` in every arrangement of the block.
    """

    tp: TensorParallel

    def __init__(self):
        """Add the identity modules `products` and `result`, on which hooks see what `inner` gets
        and returns.
        """
        super().__init__()
        self.products, self.result = Passthrough(), Passthrough()

    @property
    def columns(self) -> list[Linear]:
        """Column-parallel weights [out_i / tp, hidden] that multiply x."""
        raise NotImplementedError

    @property
    def row(self) -> RowParallelLinear:
        """Row-parallel module that multiplies the result of `inner`, this rank's columns of it, and
        sums over tp.
        """
        raise NotImplementedError

    def inner(
        self,
        products: Sequence[Float[Tensor, "tokens _"]],
        inputs: LayerInputs,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "tokens _"]:
        """Compute what is between the two products: from the products of x with the columns, each
        [tokens, out_i / tp], return the input of the row-parallel product, [tokens, in / tp]. All
        are this tp rank's columns.
        """
        raise NotImplementedError

    def inner_with_hooks(
        self,
        products: Sequence[Float[Tensor, "tokens _"]],
        inputs: LayerInputs,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "tokens _"]:
        """Return `inner` of the products, passing input and output through the hook modules
        `products` and `result`.
        """
        return self.result(self.inner(self.products(products), inputs, cache))

    def forward(
        self, x: Float[Tensor, "here hidden"], inputs: LayerInputs, cache: LayerCache | None = None
    ) -> Float[Tensor, "here hidden"]:
        """Return row(inner(columns x)): one collective on the way in (under sequence parallelism,
        or in backward) and one on the way out.
        """
        (products,) = enter([self], x)
        return self.row(self.inner_with_hooks(products, inputs, cache))

    def part(
        self, x: Float[Tensor, "tokens hidden"], inputs: LayerInputs
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the branch (column products, inner part, row product) of x without the row bias,
        as a partial sum over tp: the caller adds it to others and reduces them together. x is the
        same on all ranks of tp and must have entered tp already: that is not done here.
        """
        y = self.inner_with_hooks(tensor.products(x, self.columns, self.tp), inputs)
        # x has entered already: `products`, not `columns`
        return tensor.part_of_rows(y, self.row.linear(), self.tp)


def enter(
    branches: Sequence[Branch], x: Float[Tensor, "here hidden"]
) -> list[tuple[Float[Tensor, "tokens _"], ...]]:
    """Return the products of x with the column-parallel weights of each branch, by one collective
    for all: a list with one tuple of products per branch. x is replicated over tp, or sharded by
    tokens under sequence parallelism.
    """
    columns = [branch.columns for branch in branches]
    products = tensor.columns(x, [linear for group in columns for linear in group], branches[0].tp)
    # regroup the flat list of products by branch
    ends = list(accumulate(map(len, columns)))
    return [products[end - len(group) : end] for group, end in zip(columns, ends, strict=True)]


def leave(
    branches: Sequence[Branch], results: Sequence[Float[Tensor, "tokens _"]]
) -> Float[Tensor, "here hidden"]:
    """Return the sum of the branches' outputs from the `results` of their `inner`: row-parallel
    products are added as partial sums and reduced by one collective over tp (all-reduce, or
    reduce-scatter of tokens under sequence parallelism).
    """
    return tensor.rows(results, [branch.row.linear() for branch in branches], branches[0].tp)
