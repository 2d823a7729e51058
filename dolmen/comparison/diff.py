"""Finds the first tensor in which two programs of one model differ.

    A  dolmen, under any layout and dtype  \\   recordings    rows in the order    the first that
    B  dolmen under another, or transformers /   of one step   of a step            parts, and how

Each side runs by itself, one of a single process in this one, and leaves what its ranks have seen
(recording.py); a side of several processes is started by the launcher, and leaves it in files. So
no mistake of one can be that of the other.
"""

import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dolmen.comparison import compare, ours, recording, theirs
from dolmen.comparison.classify import classify
from dolmen.comparison.compare import Side
from dolmen.comparison.config import DiffConfig, DiffWork, SideName
from dolmen.comparison.ours import DiffTask
from dolmen.comparison.recording import Recording
from dolmen.comparison.report import FirstDifference, Report, operation
from dolmen.conversion.hf_export import check_expressible
from dolmen.conversion.moments import check_whole
from dolmen.conversion.source import Source, open_source, pin_source
from dolmen.core import device as devices
from dolmen.core import mesh as meshes
from dolmen.core.config import to_dict
from dolmen.core.mesh import SINGLE
from dolmen.core.messages import BadInput, Failed, message, plural
from dolmen.core.topology import Topology
from dolmen.evaluation.theirs import draw, precise
from dolmen.families import compare_fields
from dolmen.launch import launcher, process
from dolmen.model.layout import Layout
from dolmen.model.spec import LMHeadSpec
from dolmen.objectives.objective import check_head
from dolmen.optim.optimizer import DTYPES, master_dtype

THEIRS, SEQUENCES, SEED, DEVICE = "transformers", 4, 0, "device"


@dataclass(frozen=True)
class OpenSide:
    """One side, that can be run."""

    name: SideName
    source: Source
    theirs: bool
    dtype: str
    layout: Layout

    @property
    def title(self) -> str:
        sizes = to_dict(self.layout)
        axes = [f"{n} {sizes[n]}" for n in ("pp", "dp", "cp", "tp", "ep") if sizes[n] > 1]
        where = " ".join([self.dtype, *axes])
        program = "transformers" if self.theirs else "dolmen"
        return f"{self.name}  {program} on {self.source.where}, {where}"

    @property
    def rest(self) -> torch.dtype:
        """Dtype of the stored parameters."""
        return DTYPES[self.dtype] if self.theirs else master_dtype(self.dtype)


@dataclass(frozen=True)
class SidePair:
    """Two sides, and what they do."""

    a: OpenSide
    b: OpenSide
    task: DiffTask

    @property
    def length(self) -> int:
        return self.task.windows.shape[1] - 1


def diff(config: DiffConfig) -> Report:
    """Run both sides and compare. Raises BadInput for what cannot be run, before anything is
    started, and Failed where a side of several processes fails.
    """
    if process.read_launch() is not None:
        raise BadInput("diff starts the processes of each side by itself: run it in one process")
    both = open_sides(config)
    config = replace(config, first=_pin_side(config.first), second=_pin_side(config.second))
    sides = [
        Side(_record_side(one, both, config), one.source.tree, both.length)
        for one in (both.a, both.b)
    ]
    return compare_sides(*sides, title=_title(both), notes=_notes(both))


def compare_sides(a: Side, b: Side, title: str, notes: tuple[str, ...] = ()) -> Report:
    """Compare two recordings."""
    rows = tuple(compare.compare_recordings(a, b))
    first = compare.first_difference(rows)
    if first is None:
        return Report(title, rows, None, notes)
    processes = {"A": a.recording.topology.size, "B": b.recording.topology.size}
    found = FirstDifference(first, operation(first), classify(a, b, first), processes)
    return Report(title, rows, found, notes)


def work(request: DiffWork) -> None:
    """Record one side, in a process that `diff` has started, with the side's other ranks."""
    both = open_sides(request)
    side = both.a if request.side == both.a.name else both.b
    started = process.read_launch()
    device = devices.choose_device(request.device, started, DEVICE)
    with meshes.process_group_context(started, device):
        devices.refuse_shared_gpus(device, DEVICE)
        with precise():
            mesh = side.layout.mesh(device)
            made = ours.record(
                side.source, both.task, mesh, side.layout, side.rest, DTYPES[side.dtype]
            )
        recording.save(Path(request.folder), made, mesh.rank)


def open_sides(config: DiffConfig) -> SidePair:
    """Both sides, read and checked. Raises BadInput."""
    try:
        a, b = _side("A", config, config.first), _side("B", config, config.second)
        layouts = [side.layout for side in (a, b)]
        sequences = _multiple(SEQUENCES, math.lcm(*((x.dp or 1) * x.pp for x in layouts)))
        parts = math.lcm(*(2 * x.cp * x.tp if x.cp * x.tp > 1 else 1 for x in layouts))
        most = min(side.source.tree.max_position_embeddings for side in (a, b))
        length = _multiple(min(config.length, most), parts)
        length = length if length <= most else most // parts * parts
        for side in (a, b):
            check_whole(side.source)
            check_head("diff", LMHeadSpec, side.source.tree)
            side.layout.check(side.source.tree, length, sequences, 1)
            if side.theirs:
                check_expressible(side.source.model, side.source.tree)
            elif not process.launched_here():
                devices.require_gpus(config.device, side.layout.world, DEVICE)
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(message(error)) from None
    padding = [side.source.model.config.get("pad_token_id") for side in (a, b)]
    known = next((one for one in padding if one is not None), None)
    size = min(side.source.tree.vocab_size for side in (a, b))
    windows = draw(size, (sequences, length + 1), known, SEED)
    return SidePair(a, b, DiffTask(windows.numpy(), config.optimizer.config, config.until))


def _side(name: SideName, config: DiffConfig, spelled: str) -> OpenSide:
    """Raises ValueError, KeyError or OSError."""
    said = config.a if name == "A" else config.b
    program, colon, folder = spelled.partition(":")
    theirs = program == THEIRS and (bool(colon) or not Path(spelled).exists())
    if theirs and not folder:
        other = config.second if name == "A" else config.first
        folder = other.removeprefix(f"{THEIRS}:")
        if folder == THEIRS:
            raise ValueError("transformers is beside transformers: name a model, transformers:DIR")
    if theirs and said.layout != Layout():
        raise ValueError(
            f"--{name.lower()}.layout: side {name} is transformers, which is one process here: "
            "leave it out"
        )
    source = open_source(folder if theirs else spelled)
    return OpenSide(name, source, theirs, said.dtype, said.layout.resolve(None))


def _multiple(least: int, of: int) -> int:
    return -(-least // of) * of


def _pin_side(spelled: str) -> str:
    """Pin a run to its newest checkpoint: all processes must read the same one."""
    program, colon, folder = spelled.partition(":")
    if program == THEIRS:
        return f"{program}{colon}{pin_source(folder)}" if folder else spelled
    return pin_source(spelled)


def _record_side(side: OpenSide, both: SidePair, config: DiffConfig) -> Recording:
    """Record a side, in this process if one is enough for it and it computes in its parameters'
    dtype.
    """
    layout, dtype = side.layout, DTYPES[side.dtype]
    sizes = Topology(dp=layout.dp or 1, tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=layout.ep)
    # copies in another dtype than that of rest are made by what shares parameters over processes
    copies = not side.theirs and dtype != side.rest
    if sizes.size > 1 or copies:
        return Recording(
            side.title, sizes, dtype, side.rest, _record_in_processes(side, sizes.size, config)
        )
    device = devices.choose_device(config.device, None, DEVICE)
    with precise():
        if side.theirs:
            made = theirs.record(side.source, both.task, device, dtype)
        else:
            mesh = replace(SINGLE, device=device)
            made = ours.record(side.source, both.task, mesh, layout, side.rest, dtype)
    # norms and rope of transformers compute in float32 where all else is wider
    seen = torch.float32 if side.theirs and dtype == torch.float64 else dtype
    return Recording(side.title, sizes, seen, side.rest, made)


def _record_in_processes(side: OpenSide, processes: int, config: DiffConfig) -> recording.Tensors:
    with tempfile.TemporaryDirectory(prefix="dolmen-diff-") as folder:
        options = {name: vars(config)[name] for name in DiffConfig.__dataclass_fields__}
        handed = to_dict(DiffWork(**options, side=side.name, folder=folder))
        code = launcher.launch(processes, ["diff"], handed=handed)
        if code == 2:
            raise BadInput(f"side {side.name} was refused")
        if code:
            raise Failed(f"side {side.name} ended with exit code {code}")
        return recording.load(Path(folder), processes)


def _title(both: SidePair) -> str:
    sequences, window = both.task.windows.shape
    tokens = f"{plural(sequences, 'sequence')} of {window - 1} random tokens"
    return f"{both.a.title}\n{both.b.title}\n{tokens}"


def _notes(both: SidePair) -> tuple[str, ...]:
    """List what differs before anything is computed, and what is not covered."""
    a, b = both.a.source, both.b.source
    fields = [f"{name} is {x} in A, {y} in B" for name, x, y in compare_fields(a.model, b.model)]
    windows = {block.mixer.window for side in (a, b) for block in side.tree.blocks}
    fields += [
        f"{both.length} tokens do not fill the sliding window of {window}: use a larger --length"
        for window in sorted(one for one in windows if one is not None)
        if both.length <= window < a.tree.max_position_embeddings
    ]
    return tuple(fields)
