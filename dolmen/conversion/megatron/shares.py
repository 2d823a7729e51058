"""The part of a tensor that each tensor-parallel rank of Megatron holds.

Experts of one rank as GroupedMLP of Megatron-Core keeps them: all in two tensors, whose numbers
lie as its products need them, whatever their shapes suggest.

    mlp.experts.weight1   [hidden, experts x 2 width]   of each expert [hidden, gate and up]
    mlp.experts.weight2   [experts x width, hidden]     of each expert [width, hidden]

What each rank of tensor parallelism holds of one tensor, and the whole tensor of theirs.

Share(None)          all of it: norms, biases of rows
Share(0)             its rows, in order: columns, the vocabulary, q, k, v by groups of heads
Share(1)             its columns, in order: rows
Share(0, blocks=2)   of each half its rows: [gate; up] is [gate_r; up_r] on rank r. Ranks joined
                     as they lie, [gate_0; up_0; gate_1; up_1], are another model
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Shaped
from torch import Tensor

from dolmen.conversion.weights import require_float
from dolmen.core.messages import plural
from dolmen.families.rules import Each, Rule, Shape, Split, StoredTensor
from dolmen.files.gate import refuse
from dolmen.files.safetensors import Spec, Stored
from dolmen.files.torch_files import Strided
from dolmen.model.spec import ParamSpec

TENSOR = re.compile(r"(.*mlp\.experts\.)weight([12])")


def split_experts(tensors: Mapping[str, Stored], hidden: int, experts: int) -> dict[str, Stored]:
    """Return a rank's stored tensors with GroupedMLP's stacked ones split into one [out, in] matrix
    per expert, named as SequentialMLP does; other tensors are unchanged. `experts`: on this rank.
    Raises Refused where the size is not that of so many experts.
    """
    split: dict[str, Stored] = {}
    for name, stored in tensors.items():
        if matched := TENSOR.fullmatch(name):
            start, which = matched.groups()
            parts = _split_stacked(stored, which == "1", hidden, experts)
            split |= {f"{start}local_experts.{e}.linear_fc{which}.weight": p for e, p in parts}
        else:
            split[name] = stored
    return split


def _split_stacked(
    stored: Stored, first: bool, hidden: int, experts: int
) -> Iterator[tuple[int, Stored]]:
    """Yield (expert, place of its matrix) for a stacked tensor, as strided views into the file.
    `first`: it is weight1, which is stored transposed.
    """
    # experts x hidden x width numbers (weight1: gate and up count as width)
    width, left = divmod(math.prod(stored.spec.shape), max(1, experts * hidden))
    if left or not experts or isinstance(stored, Strided):
        raise refuse(
            stored.file,
            f"{stored.name} is {stored.spec.shape}, not {experts} experts of {hidden} numbers in",
        )
    # weight1 is [hidden, width] per expert, read as [width, hidden]
    shape, strides = ((width, hidden), (1, width)) if first else ((hidden, width), (1, hidden))
    size = hidden * width
    for e in range(experts):
        at = stored.offset + e * size * stored.spec.dtype.itemsize
        spec = Spec(shape, stored.spec.dtype)
        yield e, Strided(stored.name, spec, stored.file, at, strides, size)


@dataclass(frozen=True)
class Share:
    """How the ranks of tensor parallelism shard one tensor."""

    dim: int | None
    """Dim that it is sharded along; None: every rank has all of it."""
    blocks: int = 1
    """Number of equal parts of that dim which are sharded one by one."""
    padded: bool = False
    """True if rows are padded so that all ranks have equally many (the vocabulary)."""

    def shape(self, full: Shape, size: int) -> Shape:
        """Return the shape of one rank's part of a tensor of shape `full` (padding included),
        sharded over `size` ranks. Raises ValueError where the dim is not divisible by blocks x
        `size`.
        """
        if self.dim is None:
            return full
        if full[self.dim] % (self.blocks * size):
            raise ValueError(f"{full[self.dim]} of {full} is not divisible by {self.blocks * size}")
        return tuple(n // size if i == self.dim else n for i, n in enumerate(full))

    def full_shape(self, shape: Shape, size: int) -> Shape:
        """Return the shape of the tensor, padding included, whose `size` ranks hold parts of
        `shape`: the inverse of `shape`.
        """
        if self.dim is None:
            return shape
        return tuple(n * size if i == self.dim else n for i, n in enumerate(shape))

    def check(self, parts: Sequence[Stored], shape: Shape) -> None:
        """Raise ValueError unless the `parts` of a tensor, one of each rank, have one shape and one
        dtype, which weights may have, and make up a tensor of `shape`.
        """
        first = parts[0]
        require_float(first)
        if other := next((part for part in parts if part.spec != first.spec), None):
            raise ValueError(
                f"{first.name} is {first.spec.shape} of {first.spec.dtype} in {first.file}, but "
                f"{other.spec.shape} of {other.spec.dtype} in {other.file}"
            )
        if (full := self.full_shape(first.spec.shape, len(parts))) != shape:
            raise ValueError(
                f"{first.name} is {first.spec.shape} on each of {plural(len(parts), 'rank')} in "
                f"{first.file}, {full} together; the config implies {shape}"
            )

    def cut(self, tensor: Shaped[Tensor, "*whole"], rank: int, size: int) -> Tensor:
        """Return the part of `tensor` (padded already) that rank `rank` of `size` ranks holds."""
        if self.dim is None:
            return tensor
        blocks = tensor.chunk(self.blocks, self.dim)
        return torch.cat([block.chunk(size, self.dim)[rank] for block in blocks], self.dim)

    def join(self, shards: Iterable[Shaped[Tensor, "*held"]]) -> Tensor:
        """Return the tensor whose parts, in rank order, are `shards`."""
        shards = list(shards)
        if self.dim is None or len(shards) == 1:
            return shards[0]
        # [gate_0; up_0], [gate_1; up_1] -> [gate_0; gate_1; up_0; up_1]
        blocks = zip(*(shard.chunk(self.blocks, self.dim) for shard in shards), strict=True)
        return torch.cat([part for block in blocks for part in block], self.dim)


def share(entry: StoredTensor, param: ParamSpec) -> Share:
    """Return how Megatron's tp ranks shard a stored tensor: along the dim in which ours shard
    `param`, the first parameter that it holds.
    """
    cut = next((cut for cut in param.shards if cut.axis == "tp"), None)
    if cut is None:
        return Share(None)
    return Share(cut.dim, _blocks(entry.rule), padded=cut.uneven)


def _blocks(rule: Rule) -> int:
    """Return how many equal parts of a stored tensor are sharded one by one: 2 for [gate; up], else
    1.
    """
    match rule:
        case Each(inner):
            return _blocks(inner)
        case Split(shard_parts=True):
            return len(rule.ours)
    return 1


def pad(tensor: Shaped[Tensor, "*table"], rows: int) -> Tensor:
    """Return a table padded to `rows` rows with copies of its last row, as Megatron's own converter
    does.
    """
    more = rows - len(tensor)
    return torch.cat([tensor, tensor[-1:].expand(more, *tensor.shape[1:])]) if more else tensor
