"""Opens a model with its weights, in whatever format they are stored: what export, verify,
generate, evaluate and --init read.

    open_source("path/to/model")                    a directory of transformers
    open_source("org/name")                         one of the hub, or of its cache
    open_source("runs/book")                        a run: its newest complete checkpoint
    open_source("runs/book/checkpoints/step-...")   that checkpoint

A format is a class that is a ModelSource, and a line of FORMATS. Only the format defines how a file
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

from dolmen.checkpoint.remote import pin_url
from dolmen.conversion import checkpoint, hf, meta, peft, sat, writing
from dolmen.conversion.checkpoint import RunCheckpoint
from dolmen.conversion.megatron import dist, folders
from dolmen.conversion.megatron import source as megatron
from dolmen.conversion.peft import LowRank
from dolmen.conversion.weights import Moments, Scales, Tensors, check_whole
from dolmen.core.filesystem import is_url
from dolmen.families import ModelConfig, compare_fields, training_fields
from dolmen.model.spec import ModelSpec


class ModelSource(Tensors, Protocol):
    """A model with its weights, in any format. Opening reads what describes it and no tensor;
    stored tensors are looked at when a property or method needs them.
    """

    @property
    def title(self) -> str:
        """Title for the end of a sentence, such as "wrote model/, from {title}"."""
        ...

    @property
    def model(self) -> ModelConfig:
        """The model's family and configuration, as its config.json has them."""
        ...

    @property
    def spec(self) -> ModelSpec:
        """Spec of the stored parameters: that of `model`, plus what training has added (a router's
        bias).
        """
        ...

    @property
    def iteration(self) -> int | None:
        """Number of steps (iterations) that trained it, or None where the format does not record
        it.
        """
        ...

    @property
    def tokenizer(self) -> Path | None:
        """Folder of its tokenizer files, or None."""
        ...

    @property
    def generation_config(self) -> dict[str, Any]:
        """Content of its generation_config.json, empty without one. Raises Refused for a malformed
        one.
        """
        ...

    @property
    def transformers(self) -> Path | None:
        """Folder from which transformers itself can load the model, or None."""
        ...

    def read_as(self, model: ModelConfig) -> "ModelSource":
        """Return the source with its weights read as those of `model`, another config for the same
        weights, without opening it again.
        """
        ...

    @property
    def precise(self) -> "ModelSource":
        """The source with its fp32 master weights in place of half-precision ones; the source
        itself where it has no masters.
        """
        ...

    @property
    def moments(self) -> Moments | None:
        """AdamW's state stored with the weights, or None where there is none. Raises ValueError or
        KeyError, with the reason, where the stored state is incomplete or in a form that is not
        read.
        """
        ...

    @property
    def scaling(self) -> Scales:
        """Scales of fp8 delayed scaling by parameter name, empty without any. Raises ValueError for
        entries that are not valid scales.
        """
        ...


@dataclass(frozen=True)
class Format:
    """A format in which models are stored in folders: how to recognise it and how to open it."""

    title: str
    """Title of the format, and the files by which a folder shows it."""
    matches: Callable[[Path], bool]
    """Returns True if a folder looks like this format, complete or not: damage is reported when it
    is opened.
    """
    newest: Callable[[Path], Path]
    """Returns the folder to open: itself, or for folders that grow its newest complete checkpoint.
    Raises ValueError where there is none yet.
    """
    open: Callable[[Path, int | None], ModelSource]
    """Opens the result of `newest`; arguments: folder, number of tokens where the folder does not
    say which rows are padding (or None). Raises ValueError.
    """


def _open_adapted(folder: Path, vocab_size: int | None) -> ModelSource:
    """Open a PEFT folder as its base model with the adapters merged. `vocab_size` is for the base
    (see `open_source`). Raises ValueError where the base is a PEFT folder too.
    """
    # base_model_name_or_path: a folder, or a hub id
    named = hf.resolve_model(peft.base(folder))
    if peft.is_peft(named):
        raise ValueError(
            f"{folder} names {named} as its base model, which is a folder of adapters itself"
        )
    base = open_source(named, vocab_size)
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
        lambda folder, _: sat.open_sat(folder),
    ),
    Format(
        "a transformers directory (config.json, model.safetensors)",
        hf.is_transformers,
        lambda folder: folder,
        lambda folder, _: hf.open_transformers(folder),
    ),
    Format(
        "a run or checkpoint of dolmen (checkpoints/, step-NNNNNNNN/)",
        checkpoint.is_run,
        checkpoint.newest,
        lambda folder, _: checkpoint.open_run(folder),
    ),
    Format(
        "Meta's files of a Llama (params.json, consolidated.00.pth)",
        meta.is_meta,
        lambda folder: folder,
        lambda folder, _: meta.open_meta(folder),
    ),
    Format(
        "adapters of PEFT (adapter_config.json)", peft.is_peft, lambda folder: folder, _open_adapted
    ),
)


def open_source(name: str | Path, vocab_size: int | None = None) -> ModelSource:
    """Open a model with its weights, from a folder of any of FORMATS or a hub id, without reading
    tensors. `vocab_size`: number of tokens, for folders that do not say how many rows are padding.
    Raises ValueError for a folder of no known format (listing its content), an unfinished
    conversion, and a `vocab_size` other than the folder's.
    """
    folder = hf.resolve_model(name)
    # before the format is guessed: an unfinished folder may look like one
    writing.check(folder)
    format_ = _format(folder)
    source = format_.open(format_.newest(folder), vocab_size)
    if vocab_size not in (None, known := source.model.spec.vocab_size):
        raise ValueError(
            f"--vocab-size is {vocab_size}, but {source.where} has {known} tokens: leave it out"
        )
    return source


def pin_source(name: str | Path) -> str:
    """Return a name that opens the same checkpoint while a run goes on: for a folder with several
    checkpoints (a run, Megatron's, SAT's) the path or URL of the newest; other names, hub ids too,
    unchanged. Raises as `open_source`.
    """
    folder = hf.resolve_model(name)
    newest = _format(folder).newest(folder)
    if is_url(name):
        return pin_url(str(name), newest)
    # a hub id stays an id: its folder in the cache is nobody's name
    return str(name) if newest == folder else str(newest)


def tokenizer_folder(source: ModelSource) -> str:
    """Return the folder of the source's tokenizer; for a source without one its own folder, so that
    the error of loading a tokenizer names it.
    """
    return str(source.tokenizer or source.where)


def cast_source(source: ModelSource, dtype: torch.dtype) -> ModelSource:
    """Return the source to read from when writing in `dtype`: with its fp32 masters, if any, for
    dtypes of 32 bits or more, else as it is. Nothing is cast here.
    """
    return source.precise if torch.finfo(dtype).bits >= 32 else source


def load_weights(
    source: ModelSource, write: Callable[[str, Tensor], Any], only: Collection[str] | None = None
) -> None:
    """Read every parameter of the source, or those in `only`, and call `write(name, tensor)` once
    for each. Raises as `ModelSource.stream`, and KeyError where a parameter was never written.
    """
    requested, written = set(source.spec.params if only is None else only), set()
    for name, tensor in source.stream(only):
        assert name not in written, f"{name} written twice"
        write(name, tensor)
        written.add(name)
        del tensor  # or it would still be held while the next one is read
    if left := sorted(requested - written):
        raise KeyError(f"{len(left)} parameters are missing in {source.where}, e.g. {left[:3]}")


def _format(folder: Path) -> Format:
    """Return the first of FORMATS that matches the folder. Raises ValueError, with the known
    formats and the folder's content, if none does.
    """
    for format_ in FORMATS:
        if format_.matches(folder):
            return format_
    names = sorted(os.listdir(folder))
    content = f"holds {', '.join(names[:5])}{' ...' * (len(names) > 5)}" if names else "is empty"
    # the error lists what would have been recognised
    known = ", nor ".join(format_.title for format_ in FORMATS)
    raise ValueError(f"{folder} is neither {known}: it {content}")


ROUNDED = (
    1 / 128
)  # of the largest: half a scale of eight bits (1 / 254), or of bf16 (1 / 256), twice


@dataclass(frozen=True)
class OfRun:
    """An adapter matrix (A, B or magnitude) in a run's checkpoint, read on demand."""

    run: RunCheckpoint
    name: str

    def read(self) -> Tensor:
        """Read the adapter matrix from the run's checkpoint."""
        return self.run.read_adapter(self.name)


def open_adapters(name: str | Path, base: ModelSource) -> LowRank:
    """Open LoRA adapters that were trained on the model of `base`: from a PEFT folder, a run of
    dolmen, or a hub id. Raises ValueError, naming the folder, where it has no adapters or they do
    not fit the base.
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
    """Return a name that opens the same adapters while a run goes on: the newest checkpoint for a
    run's folder; PEFT folders and hub ids unchanged. Raises ValueError for a run without
    checkpoints.
    """
    folder = hf.resolve_model(name)
    if peft.is_peft(folder) or not checkpoint.is_run(folder):
        return str(name)
    return str(checkpoint.newest(folder))


def _from_run(run: RunCheckpoint, base: ModelSource) -> LowRank:
    """Return the adapters in a run's checkpoint. Raises ValueError where it has none, where its
    model differs from that of `base`, or where one frozen weight, compared as a sample, is off by
    more than rounding explains.
    """
    form = run.adapter
    if form is None:
        raise ValueError(f"{run.where} has no adapters: its run trained all weights")
    # Fields that only training reads (dropout, for example) may differ.
    free, differing = training_fields(run.model), compare_fields(run.model, base.model)
    if differences := [
        f"{n} is {a} in the one, {b} in the other" for n, a, b in differing if n not in free
    ]:
        raise ValueError(
            f"{run.where} belongs to another model than {base.where}: {'; '.join(differences)}"
        )
    # shapes and names first: the comparison below reads one weight only
    check_whole(run)
    # One weight is enough to detect another base; min, so that the same one is read every time. A
    # frozen weight may lie in eight bits, so it is compared up to rounding, relative to the
    # largest.
    weight = min(form.targets)
    theirs, ours = run.frozen(weight).double(), base.read(weight).double()
    # A run that froze its base in int8 stores rounded weights: up to half a scale of each row.
    off = float((theirs - ours).abs().max() / ours.abs().max().clamp(min=torch.finfo().tiny))
    if not off <= ROUNDED:
        raise ValueError(
            f"{run.where} trained its adapters on other weights than those of {base.where}: "
            f"{weight} differs by {off:.2g} of its largest value, where rounding explains up to "
            f"{ROUNDED:.2g}; give the run's initial model, {run.init}"
        )
    names = [name for weight in form.targets for name in peft.names(form, weight)]
    return LowRank(form, {name: OfRun(run, name) for name in names})
