"""Finds the first tensor that differs between two computations of a model, and reports it.

    A  dolmen, under any layout and dtype  \\   recordings    rows in the order    the first that
    B  dolmen under another, or transformers /   of one step   of a step            differs, and how

Each side runs by itself and leaves what its ranks have recorded (recording.py): a side of one
process runs in this one, a side of several is started by the launcher and leaves its recording in
files. So no mistake of one side can affect the other.
"""

import math
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from dolmen.comparison import compare, dolmen_side, recording, transformers_side
from dolmen.comparison.classify import Fault, classify
from dolmen.comparison.compare import Side, TensorComparison
from dolmen.comparison.config import DiffConfig, DiffWork, SideName
from dolmen.comparison.dolmen_side import DiffTask
from dolmen.comparison.recording import Recording
from dolmen.conversion.hf_export import check_expressible
from dolmen.conversion.source import ModelSource, open_source, pin_source
from dolmen.conversion.weights import check_whole
from dolmen.core import device as devices
from dolmen.core import mesh as meshes
from dolmen.core.config import to_dict
from dolmen.core.mesh import SINGLE
from dolmen.core.messages import BadInput, Failed, as_bad_input, plural
from dolmen.core.topology import Topology
from dolmen.evaluation.reference_model import fp32_products, random_tokens
from dolmen.families import compare_fields
from dolmen.launch import launcher, process
from dolmen.model.layout import Layout
from dolmen.model.spec import LMHeadSpec
from dolmen.objectives.objective import check_head
from dolmen.optim.optimizer import DTYPES, master_dtype

THEIRS, SEQUENCES, SEED, DEVICE = "transformers", 4, 0, "device"


@dataclass(frozen=True)
class FirstDifference:
    """The first difference between the two computations, with its likely cause."""

    row: TensorComparison
    operation: str
    """The operation that computes the tensor."""
    fault: Fault
    processes: dict[str, int]
    """Number of processes of side A and of side B."""

    @property
    def ranks(self) -> str:
        """Text that lists the ranks whose values differ from B's joined tensor, only of sides with
        several processes; empty where none does.
        """
        sides = {
            side: [rank for of, rank in self.row.ranks if of == side]
            for side, number in self.processes.items()
            if number > 1
        }
        return "; ".join(
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {side}"
            for side, ranks in sides.items()
            if ranks
        )


@dataclass(frozen=True)
class DiffReport:
    """Everything that was compared, in the order of a step; `first` is the first difference."""

    title: str
    rows: tuple[TensorComparison, ...]
    first: FirstDifference | None
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if nothing differs by more than is allowed."""
        return self.first is None

    def __str__(self) -> str:
        """Return lines that describe the first difference (operation, cause, size, ranks), or one
        that says that there is none.
        """
        if self.first is None:
            return f"no difference: {plural(len(self.rows), 'tensor')} compared"
        row, fault = self.first.row, self.first.fault
        lines = [
            f"first difference: {describe_row(row)}",
            f"    operation   {self.first.operation}",
            f"    cause       {fault.kind}: {fault.text}",
            f"    difference  {row.difference:.3g}, allowed {row.allowed:.3g}",
        ]
        if self.first.ranks:
            lines.append(f"    on          {self.first.ranks}")
        if fault.axis:
            lines.append(f"    axis        {fault.axis}")
        return "\n".join(lines)

    def table(self) -> Table:
        """Return a table for a rich console: the worst tensor of weights, gradients and the update,
        the residual stream of the layers, and everything inside the layer that differs first.
        """
        table = Table(
            title=self.title,
            title_justify="left",
            caption="\n".join(self.notes) or None,
            caption_justify="left",
            box=None,
            padding=(0, 2, 0, 0),
            pad_edge=False,
        )
        for name in ("stage", "tensor", "difference", "allowed", "", ""):
            table.add_column(name, overflow="fold")
        for row, note in _shown_rows(self.rows, self.first):
            verdict = "ok" if row.ok else "FIRST" if _is_first(row, self.first) else "differs"
            allowed = "" if math.isinf(row.allowed) else f"{row.allowed:.2g}"
            table.add_row(
                row.stage, row.name, f"{row.difference:.2g}", allowed, verdict, note or row.note
            )
        return table

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for --json. NaN and infinity become null."""
        first = self.first
        return {
            "title": self.title,
            "ok": self.ok,
            "notes": list(self.notes),
            "first": None
            if first is None
            else {
                **_plain(first.row),
                "operation": first.operation,
                "kind": first.fault.kind,
                "text": first.fault.text,
                "axis": first.fault.axis,
            },
            "rows": [_plain(row) for row in self.rows],
        }


@dataclass(frozen=True)
class OpenSide:
    """One side of the comparison, its source opened, ready to be run."""

    name: SideName
    source: ModelSource
    theirs: bool
    dtype: str
    layout: Layout

    @property
    def title(self) -> str:
        """Text with the side's program (dolmen or transformers), source, dtype and axes larger than
        1, for a title.
        """
        sizes = to_dict(self.layout)
        axes = [f"{n} {sizes[n]}" for n in ("pp", "dp", "cp", "tp", "ep") if sizes[n] > 1]
        where = " ".join([self.dtype, *axes])
        program = "transformers" if self.theirs else "dolmen"
        return f"{self.name}  {program} on {self.source.where}, {where}"

    @property
    def rest(self) -> torch.dtype:
        """Dtype of the stored parameters, which may be wider than that of the computation."""
        return DTYPES[self.dtype] if self.theirs else master_dtype(self.dtype)


@dataclass(frozen=True)
class SidePair:
    """Both sides, and the batch and optimizer that they run."""

    a: OpenSide
    b: OpenSide
    task: DiffTask

    @property
    def length(self) -> int:
        """Tokens of each sequence of the batch that both sides run."""
        return self.task.windows.shape[1] - 1


def diff(config: DiffConfig) -> DiffReport:
    """Run both sides of `dolmen diff`, each through one training step, and return the comparison of
    what they computed. Raises BadInput for what cannot be run, before anything is started, and
    Failed where a process of a side fails.
    """
    # started by torchrun or dolmen launch
    if process.read_launch() is not None:
        raise BadInput(
            "dolmen diff starts the processes of both sides itself: run it without torchrun or srun"
        )
    with as_bad_input():
        config = replace(config, first=_pin_side(config.first), second=_pin_side(config.second))
    both = open_sides(config)
    sides = [
        Side(_record_side(side, both, config), side.source.spec, both.length)
        for side in (both.a, both.b)
    ]
    return compare_sides(*sides, title=_title(both), notes=_notes(both))


def compare_sides(a: Side, b: Side, title: str, notes: tuple[str, ...] = ()) -> DiffReport:
    """Compare two recordings tensor by tensor, classify the first difference, if any, and return
    the report.
    """
    rows = tuple(compare.compare_recordings(a, b))
    first = compare.first_difference(rows)
    if first is None:
        return DiffReport(title, rows, None, notes)
    processes = {"A": a.recording.topology.size, "B": b.recording.topology.size}
    difference = FirstDifference(first, operation(first), classify(a, b, first), processes)
    return DiffReport(title, rows, difference, notes)


def work(request: DiffWork) -> None:
    """Record this process's rank of one side into request.folder; `diff` starts such processes for
    a side that does not run in its own (`_record_side`).
    """
    both = open_sides(request)
    side = both.a if request.side == both.a.name else both.b
    started = process.read_launch()
    device = devices.choose_device(request.device, started, DEVICE)
    with meshes.process_group_context(started, device):
        devices.refuse_shared_gpus(device, DEVICE)
        with fp32_products():
            mesh = side.layout.mesh(device)
            local_recording = dolmen_side.record(
                side.source, both.task, mesh, side.layout, side.rest, DTYPES[side.dtype]
            )
        recording.save(Path(request.folder), local_recording, mesh.rank)


def open_sides(config: DiffConfig) -> SidePair:
    """Open and check both sides, and make the random batch that both run: its number of sequences
    is a multiple of what both layouts divide. Raises BadInput.
    """
    with as_bad_input():
        a, b = _side("A", config, config.first), _side("B", config, config.second)
        layouts = [side.layout for side in (a, b)]
        # each dp rank and microbatch of a pipeline gets equally many
        sequences = _multiple(SEQUENCES, math.lcm(*((x.dp or 1) * x.pp for x in layouts)))
        # zigzag context parallelism divides a sequence into 2 cp chunks, sequence parallelism each
        # by tp
        parts = math.lcm(*(2 * x.cp * x.tp if x.cp * x.tp > 1 else 1 for x in layouts))
        # the shorter of the two models
        most = min(side.source.spec.max_position_embeddings for side in (a, b))
        length = _multiple(min(config.length, most), parts)
        length = length if length <= most else most // parts * parts
        for side in (a, b):
            check_whole(side.source)
            check_head("diff", LMHeadSpec, side.source.spec)
            try:
                side.layout.check(side.source.spec, length, sequences, 1)
            except ValueError as error:
                # each side has a layout of its own
                own = f"{side.name.lower()}.layout."
                raise ValueError(str(error).replace("layout.", own)) from None
            if side.theirs:
                check_expressible(side.source.model, side.source.spec)
            elif not process.launched_here():
                devices.require_gpus(config.device, side.layout.world, DEVICE)
    padding = [side.source.model.config.get("pad_token_id") for side in (a, b)]
    # transformers gives the pad token's embedding no gradient
    known = next((value for value in padding if value is not None), None)
    size = min(side.source.spec.vocab_size for side in (a, b))
    windows = random_tokens(size, (sequences, length + 1), known, SEED)
    return SidePair(a, b, DiffTask(windows.numpy(), config.optimizer.config, config.until))


def _side(name: SideName, config: DiffConfig, spelled: str) -> OpenSide:
    """Open side A or B, spelled on the command line as `spelled`: a source that dolmen computes,
    `transformers:SOURCE`, or `transformers` (the other side's source). Raises ValueError, KeyError
    or OSError.
    """
    options = config.a if name == "A" else config.b
    program, colon, folder = spelled.partition(":")
    # a folder named "transformers" is a folder
    theirs = program == THEIRS and (bool(colon) or not Path(spelled).exists())
    if theirs and not folder:
        other = config.second if name == "A" else config.first
        folder = other.removeprefix(f"{THEIRS}:")
        if folder == THEIRS:
            raise ValueError(
                "both sides are transformers: name a model for A, such as transformers:DIR"
            )
    if theirs and options.layout != Layout():
        raise ValueError(
            f"--{name.lower()}.layout: side {name} is transformers, which runs in one process: "
            "leave it out"
        )
    source = open_source(folder if theirs else spelled)
    return OpenSide(name, source, theirs, options.dtype, options.layout.resolve(None))


def _multiple(least: int, of: int) -> int:
    """Return the smallest multiple of `of` that is at least `least`."""
    return -(-least // of) * of


def _pin_side(spelled: str) -> str:
    """Return a side's command-line spelling with a run replaced by the path of its newest
    checkpoint, so that all processes read the same one; others are unchanged.
    """
    program, colon, folder = spelled.partition(":")
    if program == THEIRS:
        return f"{program}{colon}{pin_source(folder)}" if folder else spelled
    return pin_source(spelled)


def _record_side(side: OpenSide, both: SidePair, config: DiffConfig) -> Recording:
    """Run a side and return what it recorded: in this process if it has one rank, and is
    transformers or computes in its parameters' dtype; else in processes that the launcher starts. A
    transformers side in float64 is recorded as float32, which its norms and rope compute in.
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
    with fp32_products():
        if side.theirs:
            recorded = transformers_side.record(side.source, both.task, device, dtype)
        else:
            mesh = replace(SINGLE, device=device)
            recorded = dolmen_side.record(side.source, both.task, mesh, layout, side.rest, dtype)
    # norms and rope of transformers compute in float32 where all else is wider
    # so the tolerance is that of float32
    seen = torch.float32 if side.theirs and dtype == torch.float64 else dtype
    return Recording(side.title, sizes, seen, side.rest, recorded)


def _record_in_processes(side: OpenSide, processes: int, config: DiffConfig) -> recording.Tensors:
    """Run the side in this many new processes, wait for them, and return what they recorded
    (through a temporary folder). Raises BadInput where they refused the request, Failed where one
    failed.
    """
    with tempfile.TemporaryDirectory(prefix="dolmen-diff-") as folder:
        options = {name: vars(config)[name] for name in DiffConfig.__dataclass_fields__}
        handed = to_dict(DiffWork(**options, side=side.name, folder=folder))
        # exit code 2: refused with a message, which the child has printed
        code = launcher.launch(processes, ["diff"], handed=handed, imports=__name__)
        if code == 2:
            raise BadInput(f"side {side.name} could not run")
        if code:
            raise Failed(f"side {side.name} ended with exit code {code}")
        return recording.load(Path(folder), processes)


def _title(both: SidePair) -> str:
    """Return the report's title: both sides and the size of the batch."""
    sequences, window = both.task.windows.shape
    tokens = f"{plural(sequences, 'sequence')} of {window - 1} random tokens"
    return f"{both.a.title}\n{both.b.title}\n{tokens}"


def _notes(both: SidePair) -> tuple[str, ...]:
    """Return notes for the report: fields in which the two models differ, and sliding windows that
    the sequences are too short to test.
    """
    a, b = both.a.source, both.b.source
    fields = [f"{name} is {x} in A, {y} in B" for name, x, y in compare_fields(a.model, b.model)]
    windows = {block.mixer.window for side in (a, b) for block in side.spec.blocks}
    fields += [
        (
            f"--length {both.length} is shorter than the sliding window of {window}, so the "
            "window is not tested: use a larger --length"
        )
        for window in sorted(window for window in windows if window is not None)
        if both.length <= window < a.spec.max_position_embeddings
    ]
    return tuple(fields)


AFTER = 4  # rows that are shown behind the first that parts: what it leads to


def describe_row(row: TensorComparison) -> str:
    """Return a phrase that names the compared tensor, such as "the gradient of
    layers.0.attn.q.weight".
    """
    words = {
        "backward": "the gradient that reaches {}",
        "gradients": "the gradient of {}",
        "numbers": "the {}",
        "forward": "{}",
    }
    return words.get(row.stage, row.stage + " of {}").format(row.name)


def operation(row: TensorComparison) -> str:
    """Return a phrase that names the operation which computes the tensor of a row, by its stage and
    name.
    """
    match row.stage:
        case "weights":
            return "conversion, or loading"
        case "forward":
            return recording.operation(row.name)
        case "backward":
            return (
                f"backward of the operations after it: {recording.operation(row.name)} is "
                "right in forward"
            )
        case "gradients":
            return f"weight gradient or its sum over ranks: {row.name}"
        case "numbers":
            return "the sum over tokens, or over tensors and ranks"
        case _:
            return "the optimizer"


def _plain(row: TensorComparison) -> dict[str, Any]:
    """Return a row's fields as plain values for JSON; NaN and infinity become None."""
    plain = {**asdict(row), "ok": row.ok, "ranks": [list(rank) for rank in row.ranks]}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in plain.items()
    }


def _is_first(row: TensorComparison, parting: FirstDifference | None) -> bool:
    """Return whether the row is the first difference."""
    return parting is not None and row is parting.row


def _shown_rows(
    rows: tuple[TensorComparison, ...], parting: FirstDifference | None
) -> Iterator[tuple[TensorComparison, str]]:
    """Yield (row, note) of the rows that the table shows (see DiffReport.table), at most 4 of them
    after the first difference, `parting`.
    """
    # the layer that is shown in full
    layer = None if parting is None else recording.layer_of(parting.row.name)
    left = math.inf
    for stage in dict.fromkeys(row.stage for row in rows):
        mine = [row for row in rows if row.stage == stage]
        if stage in ("forward", "backward"):
            chosen = [(r, "") for r in mine if _is_shown(r, layer, parting)]
        elif any(_is_first(row, parting) for row in mine):
            chosen = [(row, "") for row in mine if not row.ok]
        else:
            worst = max(mine, key=lambda r: math.inf if math.isnan(r.difference) else r.difference)
            note = f"the worst of {len(mine)}" if len(mine) > 1 else ""
            chosen = [(worst, note)]
        for row, note in chosen:
            if left > 0:
                yield row, note
            left = AFTER if _is_first(row, parting) else left - 1


def _is_shown(row: TensorComparison, layer: int | None, parting: FirstDifference | None) -> bool:
    """Return whether the table shows a forward or backward row: the residual stream, tensors
    outside layers, and, in the stage of the first difference, everything of its layer.
    """
    if recording.inside(row.name) in ("", *recording.OUTSIDE):
        return True
    same = parting is not None and recording.layer_of(row.name) == layer
    return same and parting is not None and row.stage == parting.row.stage
