"""Steps of large shapes: tokens per second, MFU by both peaks and peak memory, of dolmen's training
step beside transformers and plain torch (benchmarks/sides.py, benchmarks/plain.py), and the least
time that such a step can take.

llama-1b fits three times: sides take turns. Of llama-8b as many layers as one device trains with
fp32 masters, gradients and moments, a side at a time; half as many tell what a layer takes. All of
it fits with bf16 at rest and whole layers recomputed, which is no way to train, and says how fast
the road is. MFU counts the model's FLOPs, never those of recomputation.
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

import torch

from benchmarks import sides
from benchmarks.gpu import clock, compare, house, roofline, shapes
from benchmarks.gpu.case import Case, Context, Record
from benchmarks.gpu.shapes import Shape
from benchmarks.plain import plain_side
from benchmarks.sides import Side, Work
from dolmen.core.mesh import Mesh
from dolmen.model.layout import Layout
from dolmen.training import mfu
from dolmen.training.step import optimizer_step

ROUNDS, WARM = 7, 3
LOSSES = 2**-8  # bf16 rounds what is summed in another order; three updates apart

SIDES: dict[str, Callable[[Work, Mesh, bool], Side]] = {
    "dolmen": sides.dolmen_side,
    "transformers": sides.masters_side,
    "plain torch": plain_side,
    "transformers, FSDP2": sides.fsdp_side,
}
SMALL, LARGE = "llama-1b", "llama-8b"


def cases(context: Context) -> Iterator[Case]:
    small, large = shapes.of(context, SMALL), shapes.fitting(context, LARGE)

    def given(function, *rest):
        return partial(function, context, *rest)

    yield Case(f"{SMALL}, in turns", 130, given(in_turns, small), fresh=True)
    yield Case(f"{SMALL}, floor", 3, given(floor, small))
    yield Case(f"{SMALL}, floor of 4 sequences", 3, given(floor, replace(small, sequences=(4,))))
    named = f"{LARGE}, {large.spec.layers} layers"
    yield Case(f"{named}, floor", 3, given(floor, large))
    yield _alone(context, named, large, "dolmen", 1, 25)
    for n in small.sequences[1:]:
        yield _alone(context, SMALL, small, "dolmen", n, 15)
    yield _alone(context, named, large, "plain torch", 1, 25)
    yield _alone(context, named, large, "transformers, FSDP2", 1, 30)
    half = max(1, large.spec.layers // 2)
    fewer = large.with_num_layers(half)
    yield _alone(context, f"{LARGE}, {half} layers", fewer, "dolmen", 1, 15)
    yield _alone(context, SMALL, small, "plain torch", small.sequences[-1], 20)
    yield Case(f"{SMALL}, dolmen, not compiled", 12, given(uncompiled, small), fresh=True)
    for n in large.sequences[1:2]:
        yield _alone(context, named, large, "dolmen", n, 20)
    whole = shapes.of(context, LARGE)
    yield Case(f"{LARGE}, whole, bf16 at rest", 45, given(at_rest_in_bf16, whole), fresh=True)


def _alone(
    context: Context, named: str, shape: Shape, side: str, sequences: int, seconds: float
) -> Case:
    words = f"{named}, {side}, {sequences} at once"
    return Case(words, seconds, partial(alone, context, shape, side, sequences), fresh=True)


@cache
def measured(device: torch.device) -> mfu.Peak:
    """Once per process, so that all sides of a table are divided by one number."""
    return mfu.peak(device, torch.bfloat16)


def tell(record: Record, work: Work, device: torch.device, named: str, seconds: dict) -> None:
    """Rates of a step that takes `seconds`."""
    rate = work.flops / seconds["median"]
    record.tell(
        **{
            named: {
                **seconds,
                "tokens_per_second": work.tokens / seconds["median"],
                "flops_per_second": rate,
                **measured(device).utilization(rate, 1),
            }
        }
    )


def begun(record: Record, named: str, side: Side, device: torch.device) -> list[float]:
    """The losses of the first steps of a side, which compile it."""
    losses = []
    seconds = clock.once(lambda: losses.extend(float(side()) for _ in range(WARM)), device)
    record.tell(**{f"{named}, first steps": {"losses": losses, "seconds": seconds}})
    return losses


def in_turns(context: Context, shape: Shape, record: Record) -> None:
    """Every side makes a step in every round, of one sequence."""
    device = torch.device(context.place)
    work = Work(shape.model, shape.length, 1, house.fill)
    with house.alone(device) as mesh:
        made, losses = {}, {}
        for name in ("dolmen", "transformers", "plain torch"):
            side = SIDES[name](work, mesh, context.compiles)
            losses[name] = begun(record, name, side, device)
            made[name] = side
            gc.collect()
        clock.clean(device)
        rounds = sides.turns(made, ROUNDS, device)
        for name, times in rounds.items():
            tell(record, work, device, name, clock.spread([wall for wall, _ in times]))
            ratios = [t[0] / o[0] for t, o in zip(times, rounds["dolmen"], strict=True)]
            record.tell(**{f"{name} over dolmen": clock.spread(ratios)})
        record.tell(peak=clock.peak(device))
    hold_losses(record, losses)


def hold_losses(record: Record, losses: dict[str, list[float]]) -> None:
    for name, series in losses.items():
        off = compare.apart(series, losses["dolmen"])
        record.check(f"losses of {name} and dolmen", off, LOSSES, "the same model and data")


def alone(context: Context, shape: Shape, side: str, sequences: int, record: Record) -> None:
    """One side with the device to itself; that it does not fit is an answer."""
    device = torch.device(context.place)
    work = Work(shape.model, shape.length, sequences, house.fill)
    with house.alone(device) as mesh:
        try:
            step = SIDES[side](work, mesh, context.compiles)
            begun(record, side, step, device)
            clock.clean(device)
            tell(record, work, device, side, clock.timed(step, device, ROUNDS, 0))
            record.tell(fits=True, peak=clock.peak(device))
        except torch.OutOfMemoryError as error:
            record.tell(fits=False, why=str(error)[:400])


def uncompiled(context: Context, shape: Shape, record: Record) -> None:
    device = torch.device(context.place)
    work = Work(shape.model, shape.length, 1, house.fill)
    with house.alone(device) as mesh:
        step = sides.dolmen_side(work, mesh, False)
        begun(record, "dolmen", step, device)
        clock.clean(device)
        tell(record, work, device, "dolmen", clock.timed(step, device, ROUNDS, 0))
        record.tell(peak=clock.peak(device))


def at_rest_in_bf16(context: Context, shape: Shape, record: Record) -> None:
    """8 bytes per parameter: weights, gradients and moments in bf16; whole layers recomputed."""
    device = torch.device(context.place)
    work = Work(shape.model, shape.length, 1, house.fill)
    state = house.training(
        shape.spec,
        house.single(device),
        1,
        layout=Layout(recompute="full"),
        compile=context.compiles,
        rest=torch.bfloat16,
    )
    batch = house.batch(shape.spec, 1, shape.length)

    def step() -> float:
        return optimizer_step(state, batch, house.single(device)).loss

    begun(record, "dolmen", step, device)
    clock.clean(device)
    tell(record, work, device, "dolmen", clock.timed(step, device, 5, 0))
    record.tell(peak=clock.peak(device), recompute="full")


def floor(context: Context, shape: Shape, record: Record) -> None:
    """By the rates that are measured here."""
    device = torch.device(context.place)
    flops = mfu.matmul_peak(device, torch.bfloat16, 1.0 if context.full else 0.05)
    source = torch.randn((1 << 30 if context.full else 1 << 20) // 4, device=device)
    to = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / clock.rate(lambda: to.copy_(source), device)
    found = roofline.parts(shape.spec, shape.sequences[0], shape.length, flops, bandwidth)
    record.tell(parts=found, seconds=sum(found.values()), sequences=shape.sequences[0])
    record.tell(flops_per_second=flops, bytes_per_second=bandwidth)
