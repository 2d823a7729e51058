"""The algebra of conversion rules (families/rules.py) on tensors, and what converts by it: weights,
AdamW's moments, and the scales of delayed scaling (parallel/quantized_product.py).

Problem. A dozen formats store the same parameters under other names, fused, transposed, stacked or
in another order. Each format needs import and export, and the two must be exact inverses.

Idea. A rule is data: which stored tensor holds which of our parameters, and by which of a few
invertible rearrangements. `split_stored` applies it (stored -> ours) and `join_stored` inverts it
(ours -> stored), with one `case` per rule in each:

    rule                stored tensor                        our parameters
    Rename              w                                    w
    Transpose(r)        w^T                                  those of r on w
    Split(groups, n)    per group: n1 rows, n2 rows, ...     the n1 rows of all groups, the n2, ...
    BareParameter(r)    named without ".weight"              those of r
    Paired(heads)       rope pairs as neighbours             rope pairs as halves of a head
    Each(r)             [experts, ...]                       those of r on each expert, stacked
    Stack               one tensor per expert                one tensor [experts, ...]

For example a fused qkv of 2 groups with 2 query heads each is Split(groups=2, counts=(2, 1, 1)):

    rows   q0 q1 k0 v0 | q2 q3 k1 v1    ->   q: q0 q1 q2 q3    k: k0 k1    v: v0 v1

Invariants.
- Rules move numbers and never change them. So they are linear, and hold for AdamW's moments and for
  gradients as well as for weights, and comparison can rename transformers' tensors by them.
- join_stored(rule, split_stored(rule, t)) is t to the bit, in both orders.
- A rule works on whole tensors only. How ranks cut a stored tensor is the format's
  (megatron/shares.py).
- Results are views where the layout allows it; `assemble` reads one stored tensor at a time.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, cast

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from dolmen.core.messages import plural
from dolmen.families.model import ModelConfig
from dolmen.families.rules import (
    BareParameter,
    Each,
    Paired,
    Rename,
    Rule,
    Split,
    Stack,
    StoredTensor,
    Transpose,
)
from dolmen.files.safetensors import Spec, Stored

MOMENTS = ("exp_avg", "exp_avg_sq")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # that weights may have


class Scaling(NamedTuple):
    """State of fp8 delayed scaling of one weight, or of a stack of experts: amax history and scale
    of the inputs, the weight and the gradients of the outputs, in this order (see
    parallel/quantized_product.py).
    """

    history: Float[Tensor, "steps *experts 3"]
    scale: Float[Tensor, "*experts 3"]


Scales = Mapping[str, Scaling]
"""Scaling of each weight that has one, by name."""


def join_scaling(parts: Iterable[Scaling]) -> Scaling:
    """Return the fp8 scaling state of weights that another program multiplies as one (q, k and v
    with the same input): the largest amax of each step, the smallest scale of each tensor.
    """
    parts = list(parts)
    history = torch.stack([part.history for part in parts]).amax(0)
    # scale = largest fp8 number / amax, so the largest amax has the smallest scale
    return Scaling(history, torch.stack([part.scale for part in parts]).amin(0))


def split_stored(rule: Rule, tensor: Tensor) -> Iterator[Tensor]:
    """Yield our parameters out of one stored tensor, in the order of the rule's names; views where
    the layout allows it, else copies. Pieces of a Stack are joined in `assemble`, not here.
    """
    match rule:
        case Rename():
            yield tensor
        case Transpose(inner):
            yield from split_stored(inner, tensor.t())  # of a bias, which has one dim, itself
        case Split(_, _, groups, counts):
            # [groups x sum(counts) x n, ...] -> per group; -1 is n, the rows of one head
            grouped = tensor.reshape(groups, sum(counts), -1, *tensor.shape[1:])
            for part in grouped.split(counts, 1):
                yield part.reshape(-1, *tensor.shape[1:])
        case BareParameter(inner):
            # only the name differs: the file leaves out ".weight"
            yield from split_stored(inner, tensor)
        case Paired(heads=heads):
            # rows x0 y0 x1 y1 ... of a head -> x0 x1 ... y0 y1 ...
            pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
            yield pairs.transpose(1, 2).reshape(tensor.shape)
        case Each(inner):
            # per expert (its parts) -> per part (its experts)
            parts = zip(*(split_stored(inner, value) for value in tensor), strict=True)
            yield from (torch.stack(part) for part in parts)
        case Stack():
            raise AssertionError(f"{rule.hf} is a piece of a stack")


def join_stored(rule: Rule, parts: list[Tensor], piece: int | None = None) -> Tensor:
    """Return the stored tensor built from our parameters `parts` by a rule: the inverse of
    `split_stored`. `piece`: index of the expert for a Stack. Several parameters are copied into
    one; a single one stays a view.
    """
    match rule:
        case Rename():
            return parts[0]
        case Transpose(inner):
            return join_stored(inner, parts).t()
        case Split(_, _, groups, counts):
            rest = parts[0].shape[1:]
            grouped = [
                part.reshape(groups, n, -1, *rest) for part, n in zip(parts, counts, strict=True)
            ]
            return torch.cat(grouped, 1).reshape(-1, *rest)
        case BareParameter(inner):
            return join_stored(inner, parts)
        case Paired(heads=heads):
            # and back: halves of a head -> neighbours
            halves = parts[0].reshape(heads, 2, -1, *parts[0].shape[1:])
            return halves.transpose(1, 2).reshape(parts[0].shape)
        case Each(inner):
            # per part (its experts) -> per expert (its parts)
            slices = zip(*parts, strict=True)
            return torch.stack([join_stored(inner, list(slice_parts)) for slice_parts in slices])
        case Stack():
            # a view: one expert of our stack
            return parts[0][piece]


def assemble(
    stored: Iterable[StoredTensor],
    read: Callable[[str], Tensor],
    only: Collection[str] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (our name, tensor in our shape) from stored tensors, in their order; `read(stored
    name)` is called once for each. `only`: our names to yield, default all. All pieces of a stack
    of experts are read when its first comes. Raises ValueError where pieces have several dtypes.
    """
    stored = list(stored)
    # our name -> expert -> stored name
    stacks: dict[str, dict[int, str]] = {}
    for entry in stored:
        if entry.piece is not None:
            stacks.setdefault(entry.ours[0], {})[entry.piece] = entry.hf
    for entry in stored:
        if only is not None and not any(ours in only for ours in entry.ours):
            continue
        if entry.piece is None:
            pairs = zip(entry.ours, split_stored(entry.rule, read(entry.hf)), strict=True)
        else:
            pairs = [
                # popped: the later pieces find nothing and yield nothing
                (name, _read_stack(stacks.pop(name), read))
                for name in entry.ours
                if name in stacks
            ]
        for ours, tensor in pairs:
            if only is None or ours in only:
                yield ours, tensor
            del tensor  # or it would still be held while the next one is read
        del pairs


def _read_stack(pieces: dict[int, str], read: Callable[[str], Tensor]) -> Tensor:
    """Read the stored tensors of a stack (index -> stored name) into one tensor [count, ...], one
    of them in memory besides it. Raises ValueError where their dtypes differ.
    """
    full = None
    for i, name in sorted(pieces.items()):
        piece = read(name)
        if full is None:
            # filled in place: torch.stack would hold all experts twice
            full = piece.new_empty((len(pieces), *piece.shape))
        if piece.dtype != full.dtype:
            raise ValueError(
                f"{name} is {piece.dtype}, {pieces[0]} is {full.dtype}: store all experts in "
                "one dtype"
            )
        full[i] = piece
    assert full is not None
    return full


class Tensors(Protocol):
    """Whole tensors by parameter name, one for each parameter of a model: weights, or one kind of
    optimizer state.
    """

    @property
    def where(self) -> Path:
        """Folder in which the tensors are stored."""
        ...

    @property
    def specs(self) -> Mapping[str, Spec]:
        """Shape, and dtype as it is stored, of every parameter of the spec, in its order; no tensor
        is read. Raises KeyError for tensors that are missing or have no place in the model,
        ValueError for those that are mis-shaped or of a dtype that is not read, and for damaged
        files.
        """
        ...

    def stream(self, only: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole CPU tensor) of every parameter, or of `only`, once, in stored order.
        One stored tensor is in memory at a time if the caller drops each. Checks first as `specs`
        does, and raises ValueError for damage found later.
        """
        ...

    def read(self, name: str) -> Shaped[Tensor, "*whole"]:
        """Return one parameter, whole, on the CPU. Raises KeyError where there is none, and as
        `stream`.
        """
        ...


def check_whole(*sources: Tensors) -> None:
    """Check names, shapes and dtypes of all stored tensors of the sources without reading them.
    Raises as `Tensors.specs`.
    """
    for source in sources:
        _ = source.specs


def describe_mismatch(extra: list[str], missing: list[str]) -> str:
    """Return text for an error that counts the stored tensors without a counterpart in the model
    and the missing ones, with three examples of each; "" if there are none.
    """
    sides = [
        (extra, "tensor has", "tensors have", "no counterpart in the model"),
        (missing, "tensor is", "tensors are", "missing"),
    ]
    return "; ".join(
        f"{plural(len(names), singular, several)} {what}, e.g. {names[:3]}"
        for names, singular, several, what in sides
        if names
    )


@dataclass(frozen=True)
class Moments:
    """AdamW's state after `step` updates."""

    step: int
    kinds: Mapping[str, Tensors]
    """Tensors of each trained parameter, by the names of MOMENTS, and "param": fp32 masters."""


def require_float(stored: Stored) -> None:
    """Raise ValueError for a stored tensor of a dtype that weights cannot have."""
    if stored.spec.dtype not in FLOATS:
        raise ValueError(
            f"{stored.name} in {stored.file} is {stored.spec.dtype}: quantised weights are not "
            "supported"
        )


class WeightsAlone:
    """Base class of sources that store weights only: what `ModelSource` says of everything else.
    Formats that have more override it.
    """

    def read_as(self, model: ModelConfig) -> Self:
        """Return the source, a dataclass, with its weights read as those of `model`."""
        return replace(cast(Any, self), model=model)

    @property
    def iteration(self) -> int | None:
        """None: the format does not record updates."""
        return None

    @property
    def generation_config(self) -> dict[str, Any]:
        """Empty: there is no generation_config.json."""
        return {}

    @property
    def transformers(self) -> Path | None:
        """None: transformers cannot load the folder."""
        return None

    @property
    def precise(self) -> Self:
        """The source itself: it has no masters."""
        return self

    @property
    def moments(self) -> Moments | None:
        """None: there is no optimizer state."""
        return None

    @property
    def scaling(self) -> Scales:
        """Empty: there are no fp8 scales."""
        return {}
