"""Products of eight bits: payloads and scales are those of a CPU to the bit, and torch's scaled
products those of the rounded values, as far as a tensor core adds up; and how fast they are.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu import clock, compare
from benchmarks.gpu.case import Case, Context, Record
from dolmen.ops.kernels import Hardware, choose
from dolmen.ops.numerics import GRANULARITY, Fp8, Precision
from dolmen.parallel.quantized_product import Delayed, Fp8Product, ProductAxes, Rounding

# A Hopper tensor core keeps some 14 bits of what it adds up in eight bits: "nearly 2 %" of a sum of
# 4,096 products at the most (DeepSeek-V3, 2412.19437, section 3.3.2).
SUM = 0.02
ROUNDS = 5


def cases(context: Context) -> Iterator[Case]:
    for precision in GRANULARITY:
        yield Case(precision, 3, partial(beside, context, precision))


def _product(precision: Precision, device: torch.device, scaled: bool) -> Fp8Product:
    recipe = Fp8(precision)
    delayed = Delayed(recipe, None) if recipe.delayed else None
    if delayed is not None:
        delayed.allocate(device)
    hardware = Hardware.from_device(device)
    kernel = choose(hardware, torch.bfloat16, 128, fp8=recipe).fp8 if scaled else "rounded"
    return Fp8Product(Rounding(recipe, None, False, delayed), ProductAxes(), kernel)


def beside(context: Context, precision: Precision, record: Record) -> None:
    """The three products of x [n, n], W [n, n] and g [n, n]."""
    n, device = 4096 if context.full else 256, torch.device(context.place)
    chance = torch.Generator().manual_seed(0)
    x, w, g = (
        (torch.randn(n, n, generator=chance) * scale).bfloat16() for scale in (1.0, 0.02, 1e-5)
    )
    here = [t.to(device) for t in (x, w, g)]
    cpu, gpu = (_product(precision, d, False) for d in (torch.device("cpu"), device))
    scaled = _product(precision, device, True)
    for operand, one, other in zip(("input", "weight", "gradient"), (x, w, g), here, strict=True):
        for along in (0, 1):
            want, got = cpu.quantise([one], operand, along), gpu.quantise([other], operand, along)
            what = f"{operand} along {along}"
            record.check(f"{what}, scales", _unequal(got.scales, want.scales), 0, "the same bits")
            bits = [[p.view(torch.uint8) for p in side.payloads] for side in (got, want)]
            record.check(f"{what}, payloads", _unequal(*bits), 0, "the same bits")
    for name, left, right in (
        ("output", here[0], here[1]),
        ("input_gradient", here[2], here[1]),
        ("weight_gradient", here[2], here[0]),
    ):
        (want,), (got,) = (getattr(p, name)([left], [right]) for p in (gpu, scaled))
        record.check(name, compare.relative(got, want), SUM, "what a tensor core adds up")
        call = partial(getattr(scaled, name), [left], [right])
        plain = partial(torch.mm, left, right.t())
        record.tell(
            **{
                name: clock.timed(call, device, ROUNDS, 1)["median"],
                f"{name}, bf16": clock.timed(plain, device, ROUNDS, 1)["median"],
            }
        )


def _unequal(got: list[Tensor], want: list[Tensor]) -> float:
    return compare.unequal(got[0], want[0])
