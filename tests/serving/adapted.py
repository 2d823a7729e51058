"""Adapters over the small decoders, and what each makes of a model by itself."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from decoders import PROMPTS, decoder
from engine_runs import scored

from dolmen.conversion.peft import LowRank, names
from dolmen.model.spec import LoraSpec, ModelSpec
from dolmen.serving.request import Request


@dataclass(frozen=True)
class Held:
    """A tensor, as if it lay in a file."""

    value: torch.Tensor

    def read(self) -> torch.Tensor:
        return self.value


DENSE = ("q", "k", "v", "o", "gate", "up", "down", "q_a", "q_b", "kv_a")
"""Modules of small decoders, whichever of them one has."""


def low(spec: ModelSpec, seed: int, rank: int, modules=DENSE, **form) -> LowRank:
    """An adapter that is felt on the dense weights of these modules."""
    params = spec.params
    targets = frozenset(
        name
        for name, param in params.items()
        if param.role == "matrix" and not param.stacked and name.split(".")[-2] in modules
    )
    made = LoraSpec(rank, alpha=6.0, targets=targets, **form)
    chance, found = torch.Generator().manual_seed(seed), {}
    for weight in sorted(targets):
        param = params[weight]
        shapes = [made.down(param).shape, made.up(param).shape, made.magnitude(param).shape]
        for name, shape in zip(names(made, weight), shapes, strict=False):
            sampled = torch.rand(shape, generator=chance)
            found[name] = Held(sampled + 0.5 if len(shape) == 1 else (sampled - 0.5) / 4)
    return LowRank(made, found)


def lows(spec: ModelSpec) -> dict[str, LowRank]:
    """Of unlike ranks, scales, targets and kinds."""
    return {
        "all": low(spec, 1, rank=2),
        "few": low(spec, 2, rank=5, modules=("v", "q", "q_b", "up"), scaling="root"),
        "rows": low(spec, 3, rank=3, modules=("k", "o", "down", "kv_a"), kind="dora"),
    }


def merged(name: str, one: LowRank | None):
    """The decoder with an adapter merged into its weights."""
    model = decoder(name)
    with torch.no_grad():
        for weight in one.form.targets if one is not None else ():
            p = model.get_parameter(weight)
            p.copy_(one.merge(weight, p))
    return model


def mixed(known: Mapping[str, object], **more) -> list[Request]:
    """Each prompt by each adapter and by the base, one after the other."""
    return [request for name in (None, *known) for request in scored(PROMPTS, name, **more)]
