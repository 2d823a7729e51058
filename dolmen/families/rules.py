"""Weight rules: which tensors on disk hold which parameters of ours, as invertible data.

Problem. Every family stores the same model in another form: q, k and v fused in one of four orders,
gate and up in one tensor, weights transposed, experts one by one or stacked, rope's pairs
interleaved. An importer and an exporter written by hand per family drift apart, and neither can
give the shape of what is on disk before it is read.

Idea. A family is a list of rules, without torch. A rule pairs the name of a module on disk (`hf`)
with the names of one or several modules of ours (`names`), and covers weight and bias; "{}" stands
for the number of the layer, a second one for that of an expert. Three readers share a rule:

    shape(parts)             the shape on disk from the shapes of ours, or a ValueError: checked
                             before anything is read or written
    split_stored, assemble   from disk to ours    (conversion/weights.py)
    join_stored              from ours to disk    (conversion/weights.py)

A leaf of the algebra moves data, a wrapper changes how an inner rule is applied:

    Rename           one tensor, another name
    Split            one tensor on disk is several of ours: dim 0 is reshaped to
                     [groups, sum(counts), unit], and its second dim is cut. E.g. 4 query and
                     2 key-value heads:
                       phi3:   groups=1 counts=(4, 2, 2)   rows q0 q1 q2 q3 | k0 k1 | v0 v1
                       falcon: groups=2 counts=(2, 1, 1)   rows q0 q1 k0 v0 | q2 q3 k1 v1
    Stack            several tensors on disk, one per expert, are one of ours, stacked
    Paired           rope's pairs as neighbours on disk, as halves here
    Transpose(rule)  the inner rule on weights stored [in, out]
    Each(rule)       the inner rule on each matrix of a stack
    BareParameter(rule)  the inner rule on a parameter that no module owns

Invariants. `join_stored(rule, split_stored(rule, t))` is t, bit for bit, for every rule and every t
of its shape, and the other way round. Every parameter of a model is made by a rule:
`entries` raises otherwise. A rule never looks at numbers, only at shapes, so ranks that hold parts
of a tensor apply it to their parts where the cut allows it (conversion/megatron/shares.py).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rename:
    """One stored module is one of ours, under another name; tensors are equal."""

    hf: str
    ours: str
    bias: str = "bias"
    """Name of the bias in the file."""
    weight: str = "weight"
    """Name of the weight in the file."""

    @property
    def names(self) -> tuple[str, ...]:
        """Name of our module, as a tuple of one."""
        return (self.ours,)

    def shape(self, parts: list[Shape]) -> Shape:
        """Return the shape of the stored tensor: that of our only parameter in it, `parts[0]`."""
        return parts[0]


@dataclass(frozen=True)
class Split:
    """One tensor on disk holds several of ours: `groups` times, one after the other, `counts[i]`
    units of rows of the i-th of them.
    """

    hf: str
    ours: tuple[str, ...]
    groups: int
    counts: tuple[int, ...]
    shard_parts: bool = False
    """Each part is sharded by itself on Megatron ranks, so that a rank has its slice of every part
    ([gate; up]), not contiguous rows.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """Names of our modules, in the order of `counts`."""
        return self.ours

    def shape(self, parts: list[Shape]) -> Shape:
        """Return the shape of the fused tensor from those of its parts. Raises ValueError if the
        parts are not whole numbers of units of one size.
        """
        # rows per unit, such as a head's size: the same for q, k and v
        units = {p[0] / (self.groups * n) for p, n in zip(parts, self.counts, strict=True)}
        if len(units) != 1 or units.pop() % 1:
            raise ValueError(
                f"{self.hf} stores {self.groups} groups of {self.counts} equal units, not "
                f"{', '.join(self.ours)} of {[p[0] for p in parts]} rows: set --model.model-type "
                "to a family that stores them apart"
            )
        return (sum(p[0] for p in parts), *parts[0][1:])


@dataclass(frozen=True)
class WrappedRule:
    """A rule that changes how an inner rule is applied; names are those of the inner rule."""

    rule: "Rule"

    @property
    def hf(self) -> str:
        """Name of the stored module: that of the inner rule."""
        return self.rule.hf

    @property
    def names(self) -> tuple[str, ...]:
        """Names of our modules: those of the inner rule."""
        return self.rule.names


@dataclass(frozen=True)
class Transpose(WrappedRule):
    """Apply the inner rule to a weight stored [in, out], as GPT-2's Conv1D; biases are not
    transposed.
    """

    rule: Rename | Split

    def shape(self, parts: list[Shape]) -> Shape:
        """Return the shape on disk of the transposed tensor: that of the inner rule for `parts`,
        reversed.
        """
        return self.rule.shape(parts)[::-1]


@dataclass(frozen=True)
class Stack:
    """`count` tensors on disk, one per expert (the second "{}" of `hf`), are one of ours: tensor i
    is index i along its first dim.
    """

    hf: str
    ours: str
    count: int

    @property
    def names(self) -> tuple[str, ...]:
        """Name of our stacked module, as a tuple of one."""
        return (self.ours,)

    def shape(self, parts: list[Shape]) -> Shape:
        """Return the shape of each stored tensor: that of our stack (`parts[0]`) without its first
        dim.
        """
        return parts[0][1:]


@dataclass(frozen=True)
class Each(WrappedRule):
    """Apply the inner rule to each matrix of a stack, which is [experts, ...] on disk as well."""

    rule: Rename | Split | Transpose

    def shape(self, parts: list[Shape]) -> Shape:
        """Return the shape on disk of the stack: [experts, ...], with the inner rule's shape of one
        matrix.
        """
        return (parts[0][0], *self.rule.shape([part[1:] for part in parts]))


@dataclass(frozen=True)
class BareParameter(WrappedRule):
    """Apply the inner rule to a parameter that no module owns on disk: the weight's name has no
    suffix, and the bias's ends in `_bias`.
    """

    rule: Rename | Each

    def shape(self, parts: list[Shape]) -> Shape:
        """Return the shape of the stored tensor, which is that of the inner rule."""
        return self.rule.shape(parts)


@dataclass(frozen=True)
class Paired:
    """Rotary rows: on disk each of `heads` heads has its rope pairs as neighbours (0, 1) (2, 3)
    ..., ours has first elements of all pairs and then second elements (rotate-half). Both rotate
    the same pairs.
    """

    hf: str
    ours: str
    heads: int

    @property
    def names(self) -> tuple[str, ...]:
        """Name of our module, as a tuple of one."""
        return (self.ours,)

    def shape(self, parts: list[Shape]) -> Shape:
        """Return the shape of the stored tensor: ours, as rows only change places."""
        return parts[0]


Rule = Rename | Split | Transpose | Stack | Each | BareParameter | Paired


@dataclass(frozen=True)
class StoredTensor:
    """One tensor on disk: its name and shape, and our parameters that it holds, in the rule's
    order.
    """

    hf: str
    ours: tuple[str, ...]
    shape: Shape
    rule: Rule
    piece: int | None = None
    """Index in a stack; None: not stacked."""


def entries(
    rules: Iterable[Rule], shapes: Mapping[str, Shape], layers: int
) -> dict[str, StoredTensor]:
    """Return stored tensor name -> StoredTensor for every parameter of `shapes` (our name ->
    shape), in its order; `layers`: number of layers that "{}" in a rule stands for. Raises
    KeyError, naming three, for parameters that no rule makes, and ValueError if a fused tensor
    cannot hold the model's.
    """
    by_name: dict[str, StoredTensor] = {}
    for rule in rules:
        # rules without "{}" are of modules outside the layers
        for layer in range(layers if "{}" in rule.hf else 1):
            for kind in ("weight", "bias"):
                by_name |= {entry.hf: entry for entry in _layer_entries(rule, layer, kind, shapes)}
    # an export writes tensors in the order of the model
    order = {name: i for i, name in enumerate(shapes)}
    covered = {name for entry in by_name.values() for name in entry.ours}
    if left := [name for name in shapes if name not in covered]:
        raise KeyError(f"{len(left)} parameters have no weight rule in the family, e.g. {left[:3]}")
    return dict(sorted(by_name.items(), key=lambda item: order[item[1].ours[0]]))


def _layer_entries(
    rule: Rule, layer: int, kind: str, shapes: Mapping[str, Shape]
) -> list[StoredTensor]:
    """Return the stored tensors that one rule makes of one layer's weights or biases (`kind`); an
    empty list if the model has none of them. Raises ValueError if it has only some.
    """
    ours = tuple(f"{name.format(layer)}.{kind}" for name in rule.names)
    present = [name for name in ours if name in shapes]
    if not present:
        return []
    if len(present) < len(ours):
        raise ValueError(f"{rule.hf}.{kind} stores {ours}, the model has only {present}")
    shape = rule.shape([shapes[name] for name in ours])
    # each expert's tensor is an entry of its own
    pieces = range(rule.count) if isinstance(rule, Stack) else (None,)
    return [
        StoredTensor(rule.hf.format(layer, piece) + ending(rule, kind), ours, shape, rule, piece)
        for piece in pieces
    ]


def ending(rule: Rule, kind: str) -> str:
    """Return the suffix of a stored weight or bias (`kind`) after its module's name, with the dot;
    a bare parameter has none, and "_bias" for its bias.
    """
    match rule:
        case BareParameter():
            return "" if kind == "weight" else "_bias"
        case Rename():
            return f".{rule.weight if kind == 'weight' else rule.bias}"
    return f".{kind}"
