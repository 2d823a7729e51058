"""What torch.compile gives and costs, mechanism by mechanism: the time of a step without and with
it, what it takes to compile, how many programs and graph breaks there are, and memory. Two updates
are held to those that were not compiled.
"""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch._dynamo.utils import counters

from benchmarks.gpu import clock, compare, house, shapes
from benchmarks.gpu.case import Case, Context, Record
from benchmarks.gpu.shapes import Shape
from dolmen.core.mesh import Mesh
from dolmen.model.layout import Layout
from dolmen.training.step import optimizer_step

UPDATES, ROUNDS = 3, 5
LOSSES = 2**-8  # bf16: a compiled program rounds in fewer places
LAYERS = (
    10  # more than the programs that torch.compile makes of one function before it gives up (8)
)


@dataclass(frozen=True)
class Kind:
    """A mechanism that a program depends on."""

    shape: Shape
    length: int
    documents: int = 1
    layout: Layout = Layout()


def kinds(context: Context) -> dict[str, Kind]:
    def of(recipe: str, **changes) -> Shape:
        return shapes.of(context, recipe, **changes).with_num_layers(LAYERS if context.full else 2)

    n = 4096 if context.full else 32
    dense = of("llama-1b")
    narrow = {"vocab_size": 32000, "num_hidden_layers": LAYERS, "hidden_size": 1024}
    mixtral = {"num_attention_heads": 16, "intermediate_size": 2816, "head_dim": 64} | narrow
    qwen = {"num_attention_heads": 16, "num_experts": 32, "moe_intermediate_size": 512} | narrow
    return {
        "dense": Kind(dense, n),
        "documents": Kind(dense, n, documents=4),
        "experts as mixtral": Kind(of("mixtral-8x7b", **mixtral), n),
        "experts as qwen3-moe": Kind(of("qwen3-30b-a3b", **qwen), n),
        "dropout": Kind(of("llama-1b", dropout=0.1), n // 4),
        "selective recomputation": Kind(dense, n, layout=Layout(recompute="selective")),
        "full recomputation": Kind(dense, n, layout=Layout(recompute="full")),
    }


def cases(context: Context) -> Iterator[Case]:
    for name, kind in kinds(context).items():
        yield Case(name, 25, partial(both, context, kind))


class _Recompilations(logging.Handler):
    """Keeps torch's own messages of programs that are made once more."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.reasons: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "Recompiling function" in text:
            self.reasons.append(text[:500])


@contextmanager
def recompilations() -> Iterator[list[str]]:
    """Within, why programs of torch.compile are made once more, a text each."""
    seen, logger = _Recompilations(), logging.getLogger("torch._dynamo")
    torch._logging.set_logs(recompiles=True)
    logger.addHandler(seen)
    try:
        yield seen.reasons
    finally:
        logger.removeHandler(seen)
        torch._logging.set_logs()


def both(context: Context, kind: Kind, record: Record) -> None:
    device = torch.device(context.place)
    losses = {}
    with house.alone(device) as mesh:
        for name, compile in (("eager", False), ("compiled", True)):
            losses[name] = _one(mesh, kind, name, compile and context.compiles, record)
            gc.collect()
            clock.clean(device)
    off = compare.apart(losses["compiled"], losses["eager"])
    record.check("losses, compiled and not", off, LOSSES, "the same model, rounded elsewhere")


def _one(mesh: Mesh, kind: Kind, name: str, compile: bool, record: Record) -> list[float]:
    """Losses of the first updates."""
    torch._dynamo.reset()
    counters.clear()
    spec, knobs = kind.shape.spec, kind.shape.training
    state = house.training(spec, mesh, 1, knobs=knobs, layout=kind.layout, compile=compile)
    batch = house.batch(spec, 1, kind.length, kind.documents)
    losses: list[float] = []

    def step() -> float:
        return optimizer_step(state, batch, mesh).loss

    with recompilations() as reasons:
        first = clock.once(lambda: losses.append(step()), mesh.device)
        losses += [step() for _ in range(UPDATES - 1)]
        clock.clean(mesh.device)
        seconds = clock.timed(step, mesh.device, ROUNDS, 0)
    record.tell(
        **{
            name: {
                **seconds,
                "first_step": first,
                "tokens_per_second": kind.length / seconds["median"],
                "peak": clock.peak(mesh.device),
                "programs": counters["stats"].get("unique_graphs", 0),
                "graph_breaks": {k: v for k, v in counters["graph_break"].items()},
                "recompilations": reasons,
                "losses": losses,
            }
        }
    )
    return losses
