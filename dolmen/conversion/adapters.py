"""Adapters of a base that lie apart from it, to be read beside it: a folder that PEFT or `dolmen
export --adapters` has written, or a run that has trained adapters.

    opened("fr-adapter", base)    a folder of PEFT's: checked against the base by names and shapes
    opened("runs/fr", base)       a run: by its model too, and one of the weights that it has frozen
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dolmen.conversion import checkpoint, hf, peft
from dolmen.conversion.checkpoint import RunCheckpoint
from dolmen.conversion.moments import check_whole
from dolmen.conversion.peft import LowRank
from dolmen.conversion.source import Source
from dolmen.families import compare_fields, training_fields

ROUNDED = (
    1 / 128
)  # of the largest: half a scale of eight bits (1 / 254), or of bf16 (1 / 256), twice


@dataclass(frozen=True)
class OfRun:
    """A matrix of a run's adapters."""

    run: RunCheckpoint
    name: str

    def read(self) -> Tensor:
        return self.run.read_adapter(self.name)


def open_adapters(name: str | Path, base: Source) -> LowRank:
    """The adapters in a folder, or in that of a hub id, which are of the model of `base`. Raises
    ValueError, with the folder, for what they are not.
    """
    folder = hf.resolve_model(name)
    if peft.is_peft(folder):
        return peft.read(folder, base.model)
    if not checkpoint.is_run(folder):
        raise ValueError(
            f"{folder} has no adapters: give a folder that PEFT has written "
            f"({peft.CONFIG}, {peft.WEIGHTS}), or a run with adapters"
        )
    return _from_run(checkpoint.open_run(checkpoint.newest(folder)), base)


def pin_adapters(name: str | Path) -> str:
    """Pin a run to its newest checkpoint, so that the same adapters are opened however often.
    Raises ValueError.
    """
    folder = hf.resolve_model(name)
    if peft.is_peft(folder) or not checkpoint.is_run(folder):
        return str(name)
    return str(checkpoint.newest(folder))


def _from_run(run: RunCheckpoint, base: Source) -> LowRank:
    form = run.adapter
    if form is None:
        raise ValueError(f"{run.where} has no adapters: it is of a run that trains all weights")
    free, differing = training_fields(run.model), compare_fields(run.model, base.model)
    if differences := [f"{n} is {a} there, {b} here" for n, a, b in differing if n not in free]:
        raise ValueError(
            f"{run.where} is of another model than {base.where}: {'; '.join(differences)}"
        )
    check_whole(run)
    weight = min(form.targets)
    theirs, ours = run.frozen(weight).double(), base.read(weight).double()
    off = float((theirs - ours).abs().max() / ours.abs().max().clamp(min=torch.finfo().tiny))
    if not off <= ROUNDED:
        raise ValueError(
            f"{run.where} has trained adapters beside other weights than those of {base.where}: "
            f"{weight} is {off:.2g} of its largest value off, and rounding makes it up to "
            f"{ROUNDED:.2g}; give the model that the run began with, {run.init}"
        )
    names = [name for weight in form.targets for name in peft.names(form, weight)]
    return LowRank(form, {name: OfRun(run, name) for name in names})
