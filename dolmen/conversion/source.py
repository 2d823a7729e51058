"""Opens a model with its weights, in whatever format they are stored: what export, verify,
generate, evaluate and --init read.

    open_source("path/to/model")                    a directory of transformers
    open_source("org/name")                         one of the hub, or of its cache
    open_source("runs/book")                        a run: its newest whole checkpoint
    open_source("runs/book/checkpoints/step-...")   that checkpoint

A format is a class that is a ModelSource, and a line of FORMATS. Only the format knows how a file
names, joins or cuts parameters: here they have our names and shapes.

Adapters that are stored separately from their base are opened with it:

    open_adapters("fr-adapter", base)    a folder of PEFT's: checked against the base by names and
                                         shapes
    open_adapters("runs/fr", base)       a run: also by its model, and one of its frozen weights
"""

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dolmen.conversion import checkpoint, hf, meta, peft, sat, writing
from dolmen.conversion.checkpoint import RunCheckpoint
from dolmen.conversion.megatron import dist, folders
from dolmen.conversion.megatron import source as megatron
from dolmen.conversion.peft import LowRank
from dolmen.conversion.weights import Moments, Scales, Tensors, check_whole
from dolmen.core import consensus
from dolmen.core.mesh import Mesh
from dolmen.families import Model, compare_fields, training_fields
from dolmen.model.spec import ModelSpec


class Source(Tensors, Protocol):
    """Made by opening what says the model; what is stored is looked at when it is asked for."""

    @property
    def title(self) -> str:
        """Title for the end of a sentence: wrote model/, from ..."""
        ...

    @property
    def model(self) -> Model:
        """Its config.json."""
        ...

    @property
    def tree(self) -> ModelSpec:
        """Tree of the stored parameters: that of `model`, and what training has added to it."""
        ...

    @property
    def iteration(self) -> int | None:
        """Updates that have made it, where it is told."""
        ...

    @property
    def tokenizer(self) -> Path | None:
        """The folder of its tokenizer, if it has one."""
        ...

    @property
    def generation_config(self) -> dict[str, Any]:
        """Content of its generation_config.json; empty where there is none. Raises Refused."""
        ...

    @property
    def transformers(self) -> Path | None:
        """The folder, where transformers itself can load it."""
        ...

    @property
    def precise(self) -> "Source":
        """The same with its fp32 masters in place of weights of half precision; itself, where it
        has none.
        """
        ...

    @property
    def moments(self) -> Moments | None:
        """The state of AdamW that lies beside the weights; None where a source of its kind has
        none, or this one. Raises ValueError or KeyError, with the reason, where what lies there is
        not whole or of a form that is not read.
        """
        ...

    @property
    def scaling(self) -> Scales:
        """Scales of delayed scaling by weight; empty, where it has multiplied by none. Raises
        ValueError for entries that are no scales.
        """
        ...


@dataclass(frozen=True)
class Format:
    """A way in which models lie in folders."""

    title: str
    """Title of the format, and the files by which a folder shows it."""
    matches: Callable[[Path], bool]
    """Function that says whether a folder is meant as one; whether it is whole shows when it is
    opened.
    """
    newest: Callable[[Path], Path]
    """The folder to open: itself, or of a run, which grows, its newest whole checkpoint. Raises
    ValueError where there is none yet.
    """
    open: Callable[[Path, Model | None, int | None], Source]
    """Function that opens the result of `newest`; with the weights of the model, where one is
    given. The number is of the tokens, where the folder need not say how many of its rows are
    padding. Raises ValueError.
    """


def _open_adapted(folder: Path, model: Model | None, vocab_size: int | None) -> Source:
    """Adapters of PEFT's, with the model that they name: once, as that may name no other."""
    named = hf.resolve_model(peft.base(folder))
    if peft.is_peft(named):
        raise ValueError(f"{folder} names {named} as its model, which is a folder of adapters too")
    base = open_source(named, model, vocab_size)
    return peft.Adapted(folder, base, peft.read(folder, base.model))


FORMATS = (
    # before the next: a config.json lies beside what we write
    Format(
        "a Megatron checkpoint (latest_checkpointed_iteration.txt, mp_rank_00/)",
        folders.is_megatron,
        folders.newest,
        megatron.open_megatron,
    ),
    Format(
        "one of its torch_dist checkpoints (latest_checkpointed_iteration.txt, metadata.json)",
        dist.is_torch_dist,
        folders.newest,
        dist.open_torch_dist,
    ),
    Format(
        "a checkpoint of SAT (latest, mp_rank_00_model_states.pt)",
        sat.is_sat,
        sat.newest,
        lambda folder, model, _: sat.open_sat(folder, model),
    ),
    Format(
        "a transformers directory (config.json, model.safetensors)",
        hf.is_transformers,
        lambda folder: folder,
        lambda folder, model, _: hf.open_transformers(folder, model),
    ),
    Format(
        "a run or checkpoint of dolmen (checkpoints/, step-NNNNNNNN/)",
        checkpoint.is_run,
        checkpoint.newest,
        lambda folder, model, _: checkpoint.open_run(folder, model),
    ),
    Format(
        "Meta's files of a Llama (params.json, consolidated.00.pth)",
        meta.is_meta,
        lambda folder: folder,
        lambda folder, model, _: meta.open_meta(folder, model),
    ),
    Format(
        "adapters of PEFT (adapter_config.json)", peft.is_peft, lambda folder: folder, _open_adapted
    ),
)


def open_source(
    name: str | Path, model: Model | None = None, vocab_size: int | None = None
) -> Source:
    """The source in a folder of any of FORMATS, or of that id on the hub; its weights are taken as
    those of `model`, where one is given: its config.json, changed. `vocab_size` says how many
    tokens there are where a folder does not. Raises ValueError for what is none, with what was
    found there, for what a conversion has left unfinished, and for another `vocab_size` than it
    says.
    """
    folder = hf.resolve_model(name)
    writing.check(folder)
    format_ = _format(folder)
    source = format_.open(format_.newest(folder), model, vocab_size)
    if vocab_size not in (None, known := source.model.tree.vocab_size):
        raise ValueError(
            f"--vocab-size is {vocab_size}, but {source.where} says {known}: leave it out"
        )
    return source


def pin_source(name: str | Path) -> str:
    """Pin a run to its newest checkpoint, so that the same source is opened however often; anything
    else, a hub id too, stays as it is named. Raises as `open_source`.
    """
    folder = hf.resolve_model(name)
    newest = _format(folder).newest(folder)
    return str(name) if newest == folder else str(newest)


def open_alike(name: str | Path, mesh: Mesh) -> Source:
    """`open_source`, by every rank of the mesh, of what the first rank finds. Raises as that."""
    return open_source(
        name if mesh.size == 1 else consensus.run_on_rank_zero(lambda: pin_source(name))
    )


def tokenizer_folder(source: Source) -> str:
    """Folder of its tokenizer; of a source without one its own folder, to be named where it is
    refused.
    """
    return str(source.tokenizer or source.where)


def cast_source(source: Source, dtype: torch.dtype) -> Source:
    """The source that has the digits of `dtype`: of fp32 and wider its masters, where it has any,
    else its weights.
    """
    return source.precise if torch.finfo(dtype).bits >= 32 else source


def load_weights(
    source: Source, write: Callable[[str, Tensor], Any], only: Collection[str] | None = None
) -> None:
    """Calls `write(name, whole tensor)` once, for every parameter of the source, or of `only`.
    Raises as `Source.stream`, and KeyError where a parameter was never written.
    """
    wanted, written = set(source.tree.leaves if only is None else only), set()
    for name, tensor in source.stream(only):
        assert name not in written, f"{name} written twice"
        write(name, tensor)
        written.add(name)
        del tensor  # or it would still be held while the next one is read
    if left := sorted(wanted - written):
        raise KeyError(f"{len(left)} parameters are not in {source.where}, e.g. {left[:3]}")


def _format(folder: Path) -> Format:
    for format_ in FORMATS:
        if format_.matches(folder):
            return format_
    names = sorted(os.listdir(folder))
    held = f"holds {', '.join(names[:5])}{' ...' * (len(names) > 5)}" if names else "is empty"
    known = ", nor ".join(format_.title for format_ in FORMATS)
    raise ValueError(f"{folder} is neither {known}: it {held}")


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
