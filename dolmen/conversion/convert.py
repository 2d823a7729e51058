"""From any source to a folder of a format that dolmen writes: one tensor in memory at a time, and
proved by reading it back, in one process or several. Nothing stands at the destination until all of
it does.
"""

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.progress import MofNCompleteColumn

from dolmen.conversion import beside, checkpoint, division, hf_export, peft, proof, unfinished
from dolmen.conversion.config import ConvertConfig
from dolmen.conversion.hf import stated_dtype
from dolmen.conversion.megatron import dist_export, export, names
from dolmen.conversion.moments import Moments
from dolmen.conversion.source import Source, in_dtype, open_source, pinned
from dolmen.conversion.weights import Scales
from dolmen.core.log import bar
from dolmen.core.messages import counted
from dolmen.families import unknown
from dolmen.launch import process
from dolmen.launch.side_by_side import Group
from dolmen.optim.optimizer import DTYPES


class Writing(Protocol):
    """A conversion of which nothing is written, and that can be complete. What is written is
    divided into units, each of which any process can write; the bytes are the same.
    """

    @property
    def sizes(self) -> list[int]:
        """About how many bytes each unit has."""
        ...

    @property
    def count(self) -> int:
        """Tensors that are written, by all."""
        ...

    @property
    def scales(self) -> Scales:
        """What of delayed scaling is written, as it reads back."""
        ...

    def begin(self, folder: Path) -> None:
        """Into an empty folder, what all need."""
        ...

    def write(self, folder: Path, units: range) -> Generator[int, None, Any]:
        """These, one tensor in memory at a time; yields how many tensors lie there now that did
        not before.
        """
        ...

    def end(self, folder: Path, results: Sequence[Any]) -> None:
        """When all units are there, in order: what remains. `results` are those of `write`."""
        ...

    def say(self, words: Path) -> None:
        """Into an empty folder, the files that say what lies there: they join the others when
        these are proved.
        """
        ...

    def opened(self, folder: Path, words: Path) -> Source:
        """What was written, by nothing but what it says of itself."""
        ...


@dataclass(frozen=True)
class Conversion:
    """One, as each of its processes knows it, who opens the source by itself."""

    asked: ConvertConfig

    @cached_property
    def opened(self) -> Source:
        return open_source(self.asked.source, vocab_size=self.asked.vocab_size)

    @cached_property
    def source(self) -> Source:
        """What of it is written."""
        return in_dtype(self.opened, _dtype(self.opened, self.asked))

    @cached_property
    def state(self) -> Moments | None:
        return _state(self.opened, self.asked.to)

    @cached_property
    def writing(self) -> Writing:
        return WRITERS[self.asked.to](self.source, self.state, self.asked)

    def write(self, folder: Path, units: range) -> Generator[int, None, Any]:
        return (yield from self.writing.write(folder, units))

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return Conversion, (self.asked,)  # and nothing that is open


@dataclass(frozen=True)
class Proof:
    """That what lies in `folder` is the same model, as each process knows it."""

    conversion: Conversion
    folder: Path
    words: Path

    @cached_property
    def written(self) -> Source:
        return self.conversion.writing.opened(self.folder, self.words)

    @cached_property
    def units(self) -> list[list[str]]:
        return division.by_layer(self.conversion.source.specs, str)

    @property
    def sizes(self) -> list[int]:
        specs = self.conversion.source.specs
        return [sum(specs[name].nbytes for name in unit) for unit in self.units]

    def weights(self, units: range) -> Generator[int, None, None]:
        """Raises as proof.compare_weights."""
        names = {name for unit in units for name in self.units[unit]}
        yield from proof.compare_weights(self.conversion.source, self.written, names)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return Proof, (self.conversion, self.folder, self.words)


def export_model(
    source: str | Path,
    to: Path,
    dtype: str | None = None,
    adapters: bool = False,
    critic: bool = False,
) -> str:
    """Stream `source`, whatever it is, to `to`, a transformers directory, or its adapters alone to
    one of PEFT's, or its `critic`; what it was. Raises ValueError, KeyError or OSError.
    """
    opened = open_source(source)
    if critic:
        opened = _critic(opened)
    if adapters:
        return peft.write(opened, to, DTYPES[dtype or "float32"])
    unknown.warn(opened.model)
    wanted = DTYPES[dtype] if dtype else stated_dtype(opened.model)
    _state(opened, "hf")
    _check_scales(opened, {}, "hf")
    hf_export.write(in_dtype(opened, wanted), to, wanted)
    return opened.title


def _critic(opened: Source) -> Source:
    if not isinstance(opened, checkpoint.RunCheckpoint):
        raise ValueError(
            f"{opened.where} is no run of dolmen's, and a critic learns in one (dolmen train ppo): "
            "leave out --critic"
        )
    return checkpoint.critic(opened)


def convert(asked: ConvertConfig, shown: bool = False) -> str:
    """Write the source in the format that is asked for; what was done, in lines. `shown`: a bar on
    stderr. Raises ValueError, KeyError or OSError for what cannot be written whole, before
    anything is, proof.Unlike where it is not what it was written of, and Failed where one of
    several processes has died.
    """
    one = Conversion(replace(asked, source=pinned(asked.source)))
    target = Path(asked.destination).resolve()  # a link cannot be replaced by a folder
    unknown.warn(one.opened.model)
    if asked.dtype is None:
        _check_one_dtype(one.opened)
    hf_export.check_target(target)
    if target.is_mount():
        raise ValueError(f"{target} is where a disk is mounted: name a folder in it")
    source, state, writing = one.source, one.state, one.writing
    scales = writing.scales
    _check_scales(source, scales, asked.to)
    size = sum(spec.nbytes for spec in source.specs.values())
    processes = division.processes(asked.processes, size, process.cores())
    with unfinished.beside(target) as (part, words), Group(processes) as group:
        writing.begin(part)
        each = [(part, units) for units in division.divided(writing.sizes, processes)]
        with _bar(f"writing {target}", writing.count, len(each), shown) as reach:
            writing.end(part, group.run(one.write, each, reach))
        writing.say(words)
        same = Proof(one, part, words)
        each = [(units,) for units in division.divided(same.sizes, processes)]
        with _bar("reading it back", len(source.specs), len(each), shown) as reach:
            group.run(same.weights, each, reach)
        logits = proof.compare_logits(source, same.written)
        told = "" if state is None else proof.compare_state(state, same.written)
        told += proof.compare_scales(scales, same.written)
        if asked.to != "hf":
            hf_export.write_beside(source, words, _dtype(source, asked))
    count = counted(len(source.specs), "parameter")
    return (
        f"read {source.title}\nwrote {target}: {count} read back, the same to the bit; "
        f"{logits}{told}"
    )


def _bar(
    title: str, count: int, processes: int, shown: bool
) -> AbstractContextManager[Callable[[int], None]]:
    """One over all processes; it says how many there are."""
    several = f", {processes} processes" if processes > 1 else ""
    return bar(f"{title}{several}", count, shown, MofNCompleteColumn())


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


def _check_scales(source: Source, written: Scales, to: str) -> None:
    """Tell in a warning what of delayed scaling stays behind."""
    try:
        known, why = len(source.scaling), f"--to {to} has no place for them"
    except ValueError as error:
        known, why = 1, str(error.args[0])
    if known and not written:
        warnings.warn(f"the scales of delayed scaling are left behind: {why}", stacklevel=3)


def _check_one_dtype(source: Source) -> None:
    """Raises ValueError where tensors are of several dtypes, as of a folder that was put together:
    which is meant is for the user to say. Those that a family keeps wide do not count.
    """
    specs, leaves = source.specs, source.tree.leaves
    kinds: dict[torch.dtype, list[str]] = {}
    for name, spec in specs.items():
        if leaves[name].trained and not leaves[name].precise:
            kinds.setdefault(spec.dtype, []).append(name)
    if len(kinds) > 1:
        each = [
            f"{len(names):,} of {str(kind).removeprefix('torch.')} (e.g. {names[0]})"
            for kind, names in kinds.items()
        ]
        raise ValueError(
            f"{source.where} has parameters of several dtypes: {', '.join(each)}: say by --dtype "
            "which is written"
        )


def _dtype(source: Source, asked: ConvertConfig) -> torch.dtype:
    return DTYPES[asked.dtype] if asked.dtype else stated_dtype(source.model)


def _hf(source: Source, state: Moments | None, asked: ConvertConfig) -> Writing:
    hf_export.check_expressible(source.model, source.tree)
    return hf_export.Writing(source, _dtype(source, asked))


def _megatron(source: Source, state: Moments | None, asked: ConvertConfig) -> Writing:
    hf_export.check_expressible(source.model, source.tree)
    ranks = export.Ranks(asked.tp, asked.pp, asked.virtual_stages, asked.ep)
    dialect = names.LEGACY
    if asked.to == "megatron-core":
        dialect = names.LOCAL if asked.spec == "local" else names.TE
    scales = source.scaling if dialect is names.TE else {}
    plan = export.Plan(source.tree, ranks, dialect, scales)
    beside.expressed(source.tree)  # or it could not be read back alone
    return export.Writing(plan, source.read, _dtype(source, asked), source.iteration)


def _torch_dist(source: Source, state: Moments | None, asked: ConvertConfig) -> Writing:
    hf_export.check_expressible(source.model, source.tree)
    plan = export.Plan(source.tree, export.Ranks(), names.TE, source.scaling)
    beside.expressed(source.tree)  # or it could not be read back alone
    return dist_export.Writing(plan, source.read, _dtype(source, asked), source.iteration, state)


WRITERS: dict[str, Callable[[Source, Moments | None, ConvertConfig], Writing]] = {
    "hf": _hf,
    "megatron": _megatron,
    "megatron-core": _megatron,
    "torch-dist": _torch_dist,
}
"""By the name of a format."""
