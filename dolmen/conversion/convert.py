"""From any source to a folder of a format that dolmen writes: one tensor in memory at a time, and
proved by reading it back. Nothing stands at the destination until all of it does.
"""

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import MofNCompleteColumn

from dolmen.conversion import beside, hf_export, proof
from dolmen.conversion.config import ConvertConfig
from dolmen.conversion.hf import stated_dtype
from dolmen.conversion.megatron import dist_export, export, names
from dolmen.conversion.moments import Moments
from dolmen.conversion.source import Source, in_dtype, open_source
from dolmen.core.words import counted
from dolmen.data.progress import bar
from dolmen.families import unknown
from dolmen.optim.precision import DTYPES

Written = Iterator[str]  # names of parameters, each when it lies in a file


@dataclass(frozen=True)
class Prepared:
    """A conversion of which nothing is written, and that can be complete."""

    write: Callable[[Path], Written]
    """Into an empty folder."""
    beside: bool
    """Whether config.json and tokenizer are still to be brought along."""


def export_model(source: str | Path, to: Path, dtype: str | None = None) -> str:
    """Stream `source`, whatever it is, to `to`, a transformers directory; what it was. Raises
    ValueError, KeyError or OSError.
    """
    opened = open_source(source)
    unknown.warn(opened.model)
    wanted = DTYPES[dtype] if dtype else stated_dtype(opened.model)
    _state(opened, "hf")
    hf_export.write(in_dtype(opened, wanted), to, wanted)
    return opened.title


def convert(asked: ConvertConfig, shown: bool = False) -> str:
    """Write the source in the format that is asked for; what was done, in lines. `shown`: a bar on
    stderr. Raises ValueError, KeyError or OSError for what cannot be written whole, before
    anything is, and proof.Unlike where it is not what it was written of.
    """
    opened = open_source(asked.source, vocab_size=asked.vocab_size)
    target = Path(asked.destination).resolve()  # a link cannot be replaced by a folder
    unknown.warn(opened.model)
    hf_export.check_target(target)
    if target.is_mount():
        raise ValueError(f"{target} is where a disk is mounted: name a folder in it")
    source, state = in_dtype(opened, _dtype(opened, asked)), _state(opened, asked.to)
    count = len(source.specs)
    prepared = WRITERS[asked.to](source, state, asked)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
        part = Path(temporary) / target.name
        with bar(f"writing {target}", count, shown, MofNCompleteColumn()) as reach:
            for done, _ in enumerate(prepared.write(part), 1):
                reach(done)
        written = open_source(part, vocab_size=source.tree.vocab_size if prepared.beside else None)
        with bar("reading it back", count, shown, MofNCompleteColumn()) as reach:
            same = proof.compare_weights(source, written, reach)
        logits = proof.compare_logits(source, written)
        told = "" if state is None else proof.compare_state(state, written)
        if prepared.beside:
            hf_export.write_beside(source, part, _dtype(source, asked))
        os.rename(part, target)
    return (
        f"read {source.title}\nwrote {target}: {counted(same, 'parameter')} read back, the same to "
        f"the bit; {logits}{told}"
    )


def _state(source: Source, to: str) -> Moments | None:
    """What of an optimizer comes along to a format: the moments of AdamW, and fp32 masters as one
    kind more. What stays behind is told in a warning.
    """
    try:
        state, why = source.moments, f"--to {to} has no place for it"
    except (ValueError, KeyError) as error:
        state, why = None, str(error.args[0])
    else:
        if state is None:
            return None
        if to == "torch-dist":
            masters = source.precise
            more = {} if masters is source else {"param": masters}
            return Moments(state.step, {**state.kinds, **more})
    warnings.warn(f"the optimizer's state is left behind: {why}", stacklevel=3)
    return None


def _dtype(source: Source, asked: ConvertConfig) -> torch.dtype:
    return DTYPES[asked.dtype] if asked.dtype else stated_dtype(source.model)


def _hf(source: Source, state: Moments | None, asked: ConvertConfig) -> Prepared:
    def write(folder: Path) -> Written:
        hf_export.write(source, folder, DTYPES[asked.dtype] if asked.dtype else None)
        yield from source.specs

    hf_export.check_expressible(source.model, source.tree)
    return Prepared(write, beside=False)


def _megatron(source: Source, state: Moments | None, asked: ConvertConfig) -> Prepared:
    hf_export.check_expressible(source.model, source.tree)
    ranks = export.Ranks(asked.tp, asked.pp, asked.virtual_stages)
    dialect = names.LEGACY
    if asked.to == "megatron-core":
        dialect = names.LOCAL if asked.spec == "local" else names.TE
    plan, dtype = export.Plan(source.tree, ranks, dialect), _dtype(source, asked)
    beside.expressed(source.tree)  # or it could not be read back alone
    return Prepared(
        lambda folder: export.write(plan, source.read, folder, dtype, source.iteration),
        beside=True,
    )


def _torch_dist(source: Source, state: Moments | None, asked: ConvertConfig) -> Prepared:
    hf_export.check_expressible(source.model, source.tree)
    plan, dtype = export.Plan(source.tree, export.Ranks(), names.TE), _dtype(source, asked)
    beside.expressed(source.tree)  # or it could not be read back alone
    return Prepared(
        lambda folder: dist_export.write(plan, source.read, folder, dtype, source.iteration, state),
        beside=True,
    )


WRITERS: dict[str, Callable[[Source, Moments | None, ConvertConfig], Prepared]] = {
    "hf": _hf,
    "megatron": _megatron,
    "megatron-core": _megatron,
    "torch-dist": _torch_dist,
}
"""By the name of a format."""
