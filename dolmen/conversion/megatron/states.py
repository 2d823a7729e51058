"""Weights to which the `_extra_state` entries of a checkpoint belong (scaling.py reads one).

An entry lies beside the weight of a product and is known by that weight's canonical name. A product
of experts has one state for all of a rank's experts, or each expert has its own.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dolmen.conversion.megatron import names, scaling
from dolmen.conversion.megatron.names import Name
from dolmen.conversion.weights import Scales, Scaling, join_scaling
from dolmen.families.rules import StoredTensor
from dolmen.files import torch_files
from dolmen.files.gate import refuse
from dolmen.files.torch_files import MOST_BYTES, Buffer, StoredView
from dolmen.model.spec import ModelSpec, ParamSpec

STATE = re.compile(r"(?P<module>.+\.)_extra_state(?P<number>\d{0,6})")


@dataclass(frozen=True)
class Kept:
    """An `_extra_state`, where it lies."""

    file: Path
    value: Any = None
    part: tuple[int, int] | None = None
    """Position and length of the archive in the file that has the value, alone in a list."""

    def read(self) -> list[Scaling]:
        """Scaling of each product of the module. Raises Refused."""
        value = self.value
        if self.part is not None:
            value = torch_files.load_part(self.file, *self.part)
            value = value[0] if isinstance(value, list) and len(value) == 1 else value
        match value:
            case None:
                return []
            case bytes() as content:
                pass
            case Buffer(content):
                pass
            case StoredView(shape=(size,), dtype=torch.uint8) if size <= MOST_BYTES:
                stored = value.locate("_extra_state", self.file)
                content = bytes(stored.read().numpy())
            case _:
                raise refuse(self.file, "holds an _extra_state that is no bytes")
        return scaling.read(content, self.file)


States = Mapping[str, Mapping[int, list[Kept]]]
"""Canonical name of the weight beside -> number of the first expert -> one of each rank of tp."""


def product(stored: str) -> Name | None:
    """The canonical name of the weight that a state lies beside; None: it is the name of none."""
    found = STATE.fullmatch(stored)
    if found is None:
        return None
    name = names.canonical(f"{found['module']}weight")
    if name is None or name.expert is not None or not name.rest.startswith("mlp.experts."):
        return name
    return Name(name.start, name.layer, name.rest, int(found["number"] or 0))


def place(
    held: Any,
    file: Path,
    at: tuple[int, int, int],
    before: int,
    experts: int,
    found: dict[str, dict[int, list[Kept]]],
) -> None:
    """Adds the states of a chunk to `found`: of the rank `at` (tp, pp, ep), which has so many
    `experts`, where layers `before` come first.
    """
    for stored, value in torch_files.leaves(held):
        name = product(stored)
        if name is None or (name.expert is None and at[2] > 0):  # every rank of ep has it
            continue
        first = 0 if name.expert is None else name.expert + at[2] * experts
        found.setdefault(name.with_layers_before(before), {}).setdefault(first, []).append(
            Kept(file, value)
        )


def read(
    states: States, entries: Mapping[str, StoredTensor], tree: ModelSpec
) -> dict[str, Scaling]:
    """Scaling of each weight of a product. Raises Refused for states that are none, or do not
    belong to these weights.
    """
    found: dict[str, Scaling] = {}
    for name, entry in entries.items():
        leaf = tree.leaves[entry.ours[0]]
        if name in states and leaf.role in ("matrix", "expert"):
            whole = _join_scaling(name, states[name], leaf)
            found |= {} if whole is None else dict.fromkeys(entry.ours, whole)
    return found


def _join_scaling(name: str, kept: Mapping[int, list[Kept]], leaf: ParamSpec) -> Scaling | None:
    """Scaling of a weight from those of all ranks and experts."""
    each: list[Scaling] = []
    for first in sorted(kept):
        ranks = [one.read() for one in kept[first]]
        histories = {one.history.shape for rank in ranks for one in rank}
        if len({len(rank) for rank in ranks}) > 1 or len(histories) > 1:
            raise refuse(
                kept[first][0].file, f"holds a state of {name} that ranks of tp have otherwise"
            )
        each += [join_scaling(parts) for parts in zip(*ranks, strict=True)]
    if not each:
        return None
    wanted = leaf.shape[0] if leaf.stacked else 1
    if len(each) != wanted or len({one.history.shape for one in each}) > 1:
        raise refuse(
            kept[min(kept)][0].file,
            f"holds states of {len(each)} products, of {name} there are {wanted}, all of one "
            "length",
        )
    if not leaf.stacked:
        return each[0]
    return Scaling(
        torch.stack([one.history for one in each], 1), torch.stack([one.scale for one in each])
    )


def products(scales: Scales, entry: StoredTensor) -> list[Scaling]:
    """Scalings of the products that Megatron makes of an entry, one for each expert; none, where a
    part of it has none.
    """
    parts = [scales[name] for name in entry.ours if name in scales]
    if len(parts) < len(entry.ours):
        return []
    whole = join_scaling(parts)
    if whole.scale.ndim == 1:
        return [whole]
    each = zip(whole.history.unbind(1), whole.scale.unbind(), strict=True)
    return [Scaling(*one) for one in each]


def share_scales(scales: Scales, entries: Mapping[str, StoredTensor]) -> dict[str, Scaling]:
    """Scales as they are read back: parts of one product of Megatron share one scale."""
    found: dict[str, Scaling] = {}
    for entry in entries.values():
        if products(scales, entry):
            found |= dict.fromkeys(entry.ours, join_scaling(scales[name] for name in entry.ours))
    return found
