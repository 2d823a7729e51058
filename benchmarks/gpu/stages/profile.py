"""Where the time of a training step goes, by kind, beside the least that it can take (the floor of
the stage `throughput`). The trace itself lies beside gpu.json, for chrome://tracing and Perfetto.
"""

import gzip
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

import torch

from benchmarks import sides
from benchmarks.gpu import house, shapes
from benchmarks.gpu.case import Case, Context, Record
from benchmarks.gpu.shapes import Shape
from benchmarks.sides import Work
from dolmen.training import profile

TRACE_BYTES = 12 << 20  # of a file that must travel


def cases(context: Context) -> Iterator[Case]:
    small, large = shapes.of(context, "llama-1b"), shapes.fitting(context, "llama-8b")
    layers = large.spec.layers
    for name, shape in (("llama-1b", small), (f"llama-8b, {layers} layers", large)):
        yield Case(name, 25, partial(step, context, shape, context.compiles), fresh=True)
    yield Case("llama-1b, not compiled", 15, partial(step, context, small, False), fresh=True)


def step(context: Context, shape: Shape, compile: bool, record: Record) -> None:
    device = torch.device(context.place)
    work = Work(shape.model, shape.length, 1, house.fill)
    with house.alone(device) as mesh:
        side = sides.dolmen_side(work, mesh, compile)
        for _ in range(3):
            side()
        with profile.record(device) as recording:
            side()
    trace = recording.trace()
    table, _ = recording.tabulate()
    record.tell(lines=table.lines(), **asdict(table))
    record.check("kinds of work", 3 - len(table.rows), 0, "products, attention, optimizer at least")
    off = abs(sum(row.seconds for row in table.rows) / table.seconds - 1)
    record.check("the kinds add up to the step", off, 1e-6, "each instant is of one kind")
    packed = gzip.compress(trace, 6)
    if context.folder is not None and context.full and len(packed) < TRACE_BYTES:
        words = f"trace-{shape.name}{'' if compile else '-not-compiled'}.json.gz"
        (context.folder / words).write_bytes(packed)
        record.tell(trace=words)
