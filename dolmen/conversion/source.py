"""A model with its weights, in whatever format they lie: what export, verify, generate, evaluate
and --init read.

    open_source("path/to/model")                    a directory of transformers
    open_source("org/name")                         one of the hub, or of its cache
    open_source("runs/book")                        a run: its newest whole checkpoint
    open_source("runs/book/checkpoints/step-...")   that one

A format is a class that is a Source, and a line of FORMATS. How a file names, joins or cuts
parameters is known to the format alone: here they have our names and shapes.
"""

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dolmen.conversion import checkpoint, hf, meta, peft, sat, unfinished
from dolmen.conversion.megatron import dist, folders
from dolmen.conversion.megatron import source as megatron
from dolmen.conversion.moments import Moments, Tensors
from dolmen.conversion.weights import Scales
from dolmen.core import consensus
from dolmen.core.mesh import Mesh
from dolmen.families import Model
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
    unfinished.check(folder)
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
