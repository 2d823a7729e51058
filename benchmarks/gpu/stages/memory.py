"""Memory of a step beside the closed forms, per layer: by the difference of a model of 4 layers and
one of 2, so that the embedding, the head and what all layers share fall out.

    between steps    master and two moments in fp32: 12 bytes per parameter
    after forward    the bf16 copies, 2 bytes, and what backward needs: model/count.py
    after backward   the gradients in fp32: 4 bytes per parameter (copies are gone)
    peak             the most there was at once

Where the device's memory is not counted (a CPU) the steps run and nothing is told.
"""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu import clock, house, shapes
from benchmarks.gpu.case import Case, Context, Record
from benchmarks.gpu.shapes import Shape
from dolmen.core.mesh import Mesh
from dolmen.model.count import activation_bytes_per_layer, parameters
from dolmen.model.layout import Layout
from dolmen.parallel.schedule import Action
from dolmen.training.step import optimizer_step

# The allocator rounds each tensor up to 512 bytes, and a step keeps some numbers per token besides.
STATES, ACTIVATIONS = 0.01, 0.05
KINDS = ("none", "selective", "full")


def cases(context: Context) -> Iterator[Case]:
    shape = shapes.of(context, "llama-1b", tie_word_embeddings=False)
    for kind in KINDS:
        for zero in (1, 0):
            layout = Layout(recompute=kind, zero=zero)
            words = f"recompute {kind}, ZeRO {zero}"
            yield Case(words, 5, partial(memory, context, shape, layout, False))
    compiled = partial(memory, context, shape, Layout(), context.compiles)
    yield Case("recompute none, compiled", 20, compiled)


def memory(context: Context, shape: Shape, layout: Layout, compile: bool, record: Record) -> None:
    device = torch.device(context.place)
    counts = (4, 2)
    with house.alone(device) as mesh:
        found = [_step(mesh, shape.with_num_layers(n), layout, compile) for n in counts]
    own = (
        parameters(shape.with_num_layers(4).spec) - parameters(shape.with_num_layers(2).spec)
    ) // 2
    kept = activation_bytes_per_layer(shape.spec, 1, shape.length, recompute=layout.recompute)
    record.tell(
        parameters_per_layer=own,
        closed_activations=kept,
        layers=dict(zip(counts, found, strict=True)),
    )
    if any(value is None for value in found[0].values()):
        return
    layer = {name: (found[0][name] - found[1][name]) / 2 for name in found[0]}
    activations = layer["after forward"] - 2 * own
    record.tell(
        per_layer=layer,
        activations=activations,
        ratios={
            "states": layer["between steps"] / (12 * own),
            "activations": activations / kept,
            "gradients": layer["after backward"] / (4 * own),
        },
    )
    _hold(record, compile)


def _hold(record: Record, compile: bool) -> None:
    ratios = record.values["ratios"]
    off = abs(ratios["states"] - 1)
    record.check("states off their closed form", off, STATES, "12 bytes per parameter")
    off = ratios["activations"] - 1
    off = off if compile else abs(off)
    why = "compiled: as much or less" if compile else "model/count.py, to the byte on CPU"
    record.check("activations off their closed form", off, ACTIVATIONS, why)
    off = abs(ratios["gradients"] - 1)
    record.check("gradients off their closed form", off, STATES, "4 bytes per parameter")


def _step(mesh: Mesh, shape: Shape, layout: Layout, compile: bool) -> dict[str, int | None]:
    """Bytes between steps, and how many more after forward, after backward and at most; of the
    third step, as the first makes the moments and compiles.
    """
    clock.clean(mesh.device)
    nothing = clock.allocated(mesh.device)
    state = house.training(shape.spec, mesh, 1, layout=layout, compile=compile)
    batch = house.batch(shape.spec, 1, shape.length)
    told: dict[str, int | None] = {}

    def observe(action: Action) -> None:
        told[action.kind] = clock.allocated(mesh.device)

    for _ in range(3):
        clock.clean(mesh.device)
        before = clock.allocated(mesh.device)
        optimizer_step(state, batch, mesh, observe=observe)
    if before is None:
        return {"between steps": None}
    return {
        "between steps": before - nothing,
        "after forward": told["F"] - before,
        "after backward": told["B"] - before,
        "peak": clock.peak(mesh.device) - before,
    }
