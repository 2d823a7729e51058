"""Invertible weight rules: how one family's tensors on disk are made of ours, and ours of them.

A rule pairs one Hugging Face module with one or several of ours and covers its weight and, where
there is one, its bias; "{}" stands for the layer. Importer and exporter read the same rule, so they
cannot drift. Three kinds and one wrapper cover almost every layout of the field:

    Split reshapes dim 0 to [groups, sum(counts), unit] and cuts the second, e.g. 4 query and 2
    key-value heads:
      phi3:   groups=1 counts=(4, 2, 2)   rows q0 q1 q2 q3 | k0 k1 | v0 v1
      falcon: groups=2 counts=(2, 1, 1)   rows q0 q1 k0 v0 | q2 q3 k1 v1
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dolmen.model.config import ModelConfig, parameter_shapes

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rename:
    """The same tensor under another name."""

    hf: str
    ours: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.ours,)

    def split(self, tensor: Tensor) -> Iterator[Tensor]:
        yield tensor

    def join(self, parts: list[Tensor]) -> Tensor:
        return parts[0]

    def shape(self, parts: list[Shape]) -> Shape:
        return parts[0]


@dataclass(frozen=True)
class Split:
    """One tensor on disk holds several of ours: `groups` times `counts[i]` units of rows for the
    i-th of them.
    """

    hf: str
    ours: tuple[str, ...]
    groups: int
    counts: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return self.ours

    def split(self, tensor: Tensor) -> Iterator[Tensor]:
        """[rows, ...] -> one [groups * counts[i] * unit, ...] per part; views where groups is 1."""
        grouped = tensor.reshape(self.groups, sum(self.counts), -1, *tensor.shape[1:])
        for part in grouped.split(self.counts, 1):
            yield part.reshape(-1, *tensor.shape[1:])

    def join(self, parts: list[Tensor]) -> Tensor:
        """The inverse of `split`; a copy."""
        rest = parts[0].shape[1:]
        grouped = [
            p.reshape(self.groups, n, -1, *rest) for p, n in zip(parts, self.counts, strict=True)
        ]
        return torch.cat(grouped, 1).reshape(-1, *rest)

    def shape(self, parts: list[Shape]) -> Shape:
        """Raises ValueError where the parts are not whole units of one size."""
        units = {p[0] / (self.groups * n) for p, n in zip(parts, self.counts, strict=True)}
        if len(units) != 1 or units.pop() % 1:
            raise ValueError(
                f"{self.hf} stores {self.groups} groups of {self.counts} equal units, not "
                f"{', '.join(self.ours)} of {[p[0] for p in parts]} rows: set model.family to one "
                "that stores them apart"
            )
        return (sum(p[0] for p in parts), *parts[0][1:])


@dataclass(frozen=True)
class Transpose:
    """The inner rule on a weight stored [in, out], as GPT-2's Conv1D does; biases are as the inner
    rule has them.
    """

    rule: Rename | Split

    @property
    def hf(self) -> str:
        return self.rule.hf

    @property
    def names(self) -> tuple[str, ...]:
        return self.rule.names

    def split(self, tensor: Tensor) -> Iterator[Tensor]:
        return self.rule.split(tensor.t())

    def join(self, parts: list[Tensor]) -> Tensor:
        return self.rule.join(parts).t()

    def shape(self, parts: list[Shape]) -> Shape:
        return self.rule.shape(parts)[::-1]


@dataclass(frozen=True)
class Stack:
    """`count` tensors on disk, one per expert (the second "{}"), are one of ours: piece i of it
    along a new first dim.
    """

    hf: str
    ours: str
    count: int

    @property
    def names(self) -> tuple[str, ...]:
        return (self.ours,)

    def shape(self, parts: list[Shape]) -> Shape:
        return parts[0][1:]


Rule = Rename | Split | Transpose | Stack


@dataclass(frozen=True)
class Entry:
    """One tensor on disk: its name, its shape, and those of ours that it holds, in the order the
    rule yields them.
    """

    hf: str
    ours: tuple[str, ...]
    shape: Shape
    rule: Rule
    piece: int | None = None
    """Of a stack: which of its pieces this is."""

    def split(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Our (name, tensor) pairs out of the tensor on disk, views where the layout allows it."""
        return zip(self.ours, self.rule.split(tensor), strict=True)

    def join(self, parts: list[Tensor]) -> Tensor:
        """The tensor on disk out of ours, given in the order of `ours`."""
        return self.rule.join(parts) if self.piece is None else parts[0][self.piece]


def assemble(
    stored: Iterable[Entry], read: Callable[[str], Tensor], only: Collection[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Our (name, tensor) pairs of the tensors on disk, each read once by its name, in their order;
    `only` those of ours, where given. The pieces of a stack are read when the first of them comes.
    Raises ValueError where their dtypes differ.
    """
    stored, stacks = list(stored), {}
    for entry in stored:
        if entry.piece is not None:
            stacks.setdefault(entry.ours[0], {})[entry.piece] = entry.hf
    for entry in stored:
        if only is not None and not any(ours in only for ours in entry.ours):
            continue
        if entry.piece is None:
            pairs = entry.split(read(entry.hf))
        else:
            pairs = [
                (name, _stacked(stacks.pop(name), read)) for name in entry.ours if name in stacks
            ]
        for ours, tensor in pairs:
            if only is None or ours in only:
                yield ours, tensor
            del tensor  # or it would still be held while the next one is read
        del pairs


def _stacked(pieces: dict[int, str], read: Callable[[str], Tensor]) -> Tensor:
    """[count, ...], filled a piece at a time."""
    whole = None
    for i, name in sorted(pieces.items()):
        piece = read(name)
        if whole is None:
            whole = piece.new_empty((len(pieces), *piece.shape))
        if piece.dtype != whole.dtype:
            raise ValueError(
                f"{name} is {piece.dtype}, {pieces[0]} is {whole.dtype}: store all experts alike"
            )
        whole[i] = piece
    return whole


def entries(rules: Iterable[Rule], config: ModelConfig) -> dict[str, Entry]:
    """HF tensor name -> Entry for every parameter of `config`, in the order of the model. Raises
    KeyError naming the first three parameters that no rule makes, ValueError where a fused tensor
    cannot hold the model's.
    """
    shapes, found = parameter_shapes(config), {}
    for rule in rules:
        for layer in range(config.num_hidden_layers if "{}" in rule.hf else 1):
            for kind in ("weight", "bias"):
                ours = tuple(f"{name.format(layer)}.{kind}" for name in rule.names)
                present = [name for name in ours if name in shapes]
                if not present:
                    continue
                if len(present) < len(ours):
                    raise ValueError(
                        f"{rule.hf}.{kind} stores {ours}, the model has only {present}"
                    )
                shape = rule.shape([shapes[name] for name in ours])
                for piece in range(rule.count) if isinstance(rule, Stack) else (None,):
                    hf = f"{rule.hf.format(layer, piece)}.{kind}"
                    found[hf] = Entry(hf, ours, shape, rule, piece)
    order = {name: i for i, name in enumerate(shapes)}
    made = {name for entry in found.values() for name in entry.ours}
    if left := [name for name in shapes if name not in made]:
        raise KeyError(
            f"{len(left)} parameters have no weight rule in family {config.family}, e.g. {left[:3]}"
        )
    return dict(sorted(found.items(), key=lambda item: order[item[1].ours[0]]))


def disagreeing_fields(
    rules: Iterable[Rule], config: ModelConfig, hf: str, shape: Shape
) -> list[str]:
    """Config fields that set a dimension in which the stored `shape` of `hf` is not the expected
    one: those whose change changes it. Empty where the number of dimensions differs.
    """
    rules = list(rules)
    expected = entries(rules, config)[hf].shape
    if len(expected) != len(shape):
        return []
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    changed = {
        "vocab_size": 2 * config.vocab_size,
        "hidden_size": 2 * config.hidden_size,
        "intermediate_size": 2 * config.intermediate_size,
        "head_dim": 2 * config.head_dim,
        "num_attention_heads": 2 * heads,
        "num_key_value_heads": 1 if kv == heads else heads,
        "max_position_embeddings": 2 * config.max_position_embeddings,
    }
    if config.num_experts:
        changed["num_experts"] = 2 * config.num_experts
    if config.moe_intermediate_size:
        changed["moe_intermediate_size"] = 2 * config.moe_intermediate_size
    fields = []
    for field, value in changed.items():
        try:
            other = entries(rules, replace(config, **{field: value}))[hf].shape
        except ValueError:
            continue  # a fused layout ties this field to another one
        if any(e != s and e != o for e, s, o in zip(expected, shape, other, strict=True)):
            fields.append(field)
    return fields
