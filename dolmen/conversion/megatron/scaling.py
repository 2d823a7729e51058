"""Scales of delayed scaling as Transformer Engine keeps them, and the weights that they belong to.

The `_extra_state` stored next to the weights of a module is bytes with these tensors
(transformer_engine/pytorch/module/base.py, get_extra_state):

    amax_history_fwd [steps, 3 n]    input, weight and output of each of n products
    scale_fwd [3 n]                  the factor of each before it is rounded
    amax_history_bwd [steps, 2 n]    the gradients of output and input of each
    scale_bwd [2 n]

The first step of a history is the one in progress, as in ours. Theirs has places for what is never
rounded: outputs, gradients of inputs. Where one product of theirs is several of ours (q, k and v
with the same input), each has the scales of the whole, and the whole the largest of each.

An entry is stored next to the weight of a product and is known by that weight's canonical name. A
product of experts has one state for all of a rank's experts, or each expert has its own.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dolmen.conversion.megatron import names
from dolmen.conversion.megatron.names import Name
from dolmen.conversion.weights import Scales, Scaling, join_scaling
from dolmen.families.rules import StoredTensor
from dolmen.files import torch_files
from dolmen.files.gate import refuse
from dolmen.files.torch_files import MOST_BYTES, Buffer, StoredView, dump_bytes, load_bytes
from dolmen.model.spec import ModelSpec, ParamSpec

TENSORS = ("amax_history_fwd", "scale_fwd", "amax_history_bwd", "scale_bwd")


def read_extra_state(state: bytes, where: Path) -> list[Scaling]:
    """Decode a Transformer Engine module's `_extra_state`: return the fp8 scaling state of each of
    its products, empty where it has not used delayed scaling. `where`: file that the bytes are
    from, for errors. Raises Refused for shapes that do not fit each other and for scales that are
    not positive and finite.
    """
    if not state:
        return []
    value = load_bytes(state, where)
    if not set(TENSORS) & value.keys():  # of another recipe
        return []
    fields_ = [value.get(name) for name in TENSORS]
    shapes = [tuple(value.shape) if isinstance(value, Tensor) else None for value in fields_]
    forward, backward = shapes[0] or (0, 0), shapes[2] or (0, 0)
    # input, weight and output of each product
    number = forward[-1] // 3
    # length of the amax history
    steps = forward[0]
    want = [(steps, 3 * number), (3 * number,), (steps, 2 * number), (2 * number,)]
    if not number or shapes != want:
        raise refuse(
            where,
            f"has a delayed-scaling state whose {', '.join(TENSORS)} have the shapes "
            f"{', '.join(map(str, shapes))}, which do not match {max(1, number)} matrix products",
        )
    assert backward == want[2]
    histories, scales, back, back_scales = (torch.as_tensor(value).float() for value in fields_)
    for name, scale in zip(TENSORS[1::2], (scales, back_scales), strict=True):
        # a factor: 0 or infinity would destroy the weight
        if not ((scale > 0) & scale.isfinite()).all():
            raise refuse(
                where, f"has a delayed-scaling state whose {name} is not positive and finite"
            )
    return [
        Scaling(
            # ours are input, weight, output's gradient; theirs has unused columns for the output
            # and the input's gradient
            torch.cat((histories[:, 3 * i : 3 * i + 2], back[:, 2 * i : 2 * i + 1]), 1),
            torch.cat((scales[3 * i : 3 * i + 2], back_scales[2 * i : 2 * i + 1])),
        )
        for i in range(number)
    ]


def write_extra_state(products: Iterable[Scaling]) -> bytes:
    """Encode scaling states as an `_extra_state`, the inverse of `read_extra_state`, as Transformer
    Engine 1.x wrote it and every later version reads it. Without a recipe, which is then taken as
    DelayedScaling.
    """
    products = list(products)
    steps = products[0].history.shape[0]
    # history and scale of what is never rounded to fp8
    none, unit = torch.zeros(steps, 1), torch.ones(1)
    tensors = (
        torch.cat([part for p in products for part in (p.history[:, :2].cpu(), none)], 1),
        torch.cat([part for p in products for part in (p.scale[:2].cpu(), unit)]),
        torch.cat([part for p in products for part in (p.history[:, 2:].cpu(), none)], 1),
        torch.cat([part for p in products for part in (p.scale[2:].cpu(), unit)]),
    )
    named = dict(zip(TENSORS, tensors, strict=True))
    return dump_bytes({**named, "extra_fp8_variables": {"num_gemms": len(products)}})


STATE = re.compile(r"(?P<module>.+\.)_extra_state(?P<number>[0-9]{0,6})")


@dataclass(frozen=True)
class Kept:
    """Place of an `_extra_state`: a value of a pickle, or an archive inside a file."""

    file: Path
    value: Any = None
    part: tuple[int, int] | None = None
    """Position and length of the archive in the file whose content is a list of this one value."""

    def read(self) -> list[Scaling]:
        """Read the `_extra_state` and return the scaling state of each product of the module; empty
        where there is none. Raises Refused where it is not bytes.
        """
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
                raise refuse(self.file, "has an _extra_state that is not bytes")
        return read_extra_state(content, self.file)


States = Mapping[str, Mapping[int, list[Kept]]]
"""Canonical weight name -> number of the first expert -> its states, one per tp rank."""


def state_weight(stored: str) -> Name | None:
    """Return the canonical name of the weight next to which an `_extra_state` is stored; None if
    the name `stored` is not of such a state.
    """
    match = STATE.fullmatch(stored)
    if match is None:
        return None
    name = names.canonical(f"{match['module']}weight")
    if name is None or name.expert is not None or not name.rest.startswith("mlp.experts."):
        return name
    return Name(name.start, name.layer, name.rest, int(match["number"] or 0))


def add_states(
    content: Any,
    file: Path,
    at: tuple[int, int, int],
    before: int,
    experts: int,
    states: dict[str, dict[int, list[Kept]]],
) -> None:
    """Add the places of all `_extra_state` entries in `content`, the chunk of rank (tp, pp, ep)
    `at` in `file`, to `states`. `before`: number of layers in front of the chunk; `experts`: number
    on this rank.
    """
    for stored, value in torch_files.leaves(content):
        name = state_weight(stored)
        if name is None or (name.expert is None and at[2] > 0):  # every rank of ep has it
            continue
        first = 0 if name.expert is None else name.expert + at[2] * experts
        states.setdefault(name.with_layers_before(before), {}).setdefault(first, []).append(
            Kept(file, value)
        )


def read_scales(
    states: States, entries: Mapping[str, StoredTensor], spec: ModelSpec
) -> dict[str, Scaling]:
    """Return our weight's name -> fp8 scaling state, for those that have one in `states`. Raises
    Refused for malformed states, and for numbers of experts or ranks that do not fit the weights.
    """
    scales: dict[str, Scaling] = {}
    for name, entry in entries.items():
        param = spec.params[entry.ours[0]]
        if name in states and param.role in ("matrix", "expert"):
            full = _join_scaling(name, states[name], param)
            # q, k and v get the same scale
            scales |= {} if full is None else dict.fromkeys(entry.ours, full)
    return scales


def _join_scaling(name: str, states: Mapping[int, list[Kept]], param: ParamSpec) -> Scaling | None:
    """Return the scaling state of one weight, joined from all tp ranks (largest amax) and experts
    (stacked); None where all are empty. Raises Refused where ranks differ, or experts are missing.
    """
    scalings: list[Scaling] = []
    for first in sorted(states):
        ranks = [state.read() for state in states[first]]
        histories = {scaling.history.shape for rank in ranks for scaling in rank}
        if len({len(rank) for rank in ranks}) > 1 or len(histories) > 1:
            raise refuse(
                states[first][0].file,
                f"has a delayed-scaling state of {name} that differs between tp ranks",
            )
        # each tp rank has seen a part of the weight: the largest amax is that of all
        scalings += [join_scaling(parts) for parts in zip(*ranks, strict=True)]
    if not scalings:
        return None
    expected = param.shape[0] if param.stacked else 1
    if len(scalings) != expected or len({scaling.history.shape for scaling in scalings}) > 1:
        raise refuse(
            states[min(states)][0].file,
            f"holds states of {len(scalings)} products, of {name} there are {expected}, all of one "
            "length",
        )
    if not param.stacked:
        return scalings[0]
    return Scaling(
        torch.stack([scaling.history for scaling in scalings], 1),
        torch.stack([scaling.scale for scaling in scalings]),
    )


def products(scales: Scales, entry: StoredTensor) -> list[Scaling]:
    """Return the fp8 scaling states of the products that Megatron makes of a stored tensor, one per
    expert; empty where one of our parameters in it has none.
    """
    parts = [scales[name] for name in entry.ours if name in scales]
    # q has a scale and k has none: then the product has none
    if len(parts) < len(entry.ours):
        return []
    full = join_scaling(parts)
    if full.scale.ndim == 1:
        return [full]
    pairs = zip(full.history.unbind(1), full.scale.unbind(), strict=True)
    return [Scaling(*pair) for pair in pairs]


def share_scales(scales: Scales, entries: Mapping[str, StoredTensor]) -> dict[str, Scaling]:
    """Return the scales as they are read back from Megatron: our weights that it multiplies as one
    product (q, k, v) share one scale.
    """
    shares: dict[str, Scaling] = {}
    for entry in entries.values():
        if products(scales, entry):
            shares |= dict.fromkeys(entry.ours, join_scaling(scales[name] for name in entry.ours))
    return shares
