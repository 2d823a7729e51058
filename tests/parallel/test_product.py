"""The three products of eight bits on one process: against rounding by hand, by torch's scaled
products, and with what is not finite.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

from dolmen.ops import fp8
from dolmen.ops.numerics import GRANULARITY, Fp8, Fp8Config
from dolmen.parallel.quantized_product import Delayed, Fp8Product, Operands, ProductAxes, Rounding


def made(precision, kernel="rounded", **options) -> Fp8Product:
    recipe = Fp8(precision, Fp8Config(**options))
    delayed = Delayed(recipe, None) if recipe.delayed else None
    if delayed is not None:
        delayed.allocate(torch.device("cpu"))
    return Fp8Product(Rounding(recipe, None, False, delayed), ProductAxes(), kernel)


def factors(dtype=torch.float32):
    """x [64, 160], W [96, 160], g [64, 96], over several powers of two."""
    generator = torch.Generator().manual_seed(0)

    def draw(rows, columns):
        x = torch.randn(rows, columns, generator=generator)
        return (x * 2.0 ** torch.randint(-3, 3, (rows, 1), generator=generator)).to(dtype)

    return draw(64, 160), draw(96, 160), 1e-4 * draw(64, 96)


def value(x, format, granularity, axis):
    payload, scale = fp8.quantise(x, format=format, granularity=granularity, axis=axis)
    return fp8.dequantise(payload, scale, granularity=granularity, axis=axis)


@pytest.mark.parametrize("precision", GRANULARITY)
@pytest.mark.parametrize("format", ("hybrid", "e4m3"))
def test_products_are_of_what_payloads_stand_for(precision, format):
    """A factor is rounded along the dim that the product adds up over."""
    (x, w, g), product = factors(), made(precision, format=format)
    of = "e5m2" if format == "hybrid" else "e4m3"
    shared = GRANULARITY[precision]
    weight = "128x128" if precision == "fp8-blockwise" else shared
    y = value(x, "e4m3", shared, 1) @ value(w, "e4m3", weight, 1).t()
    dx = value(g, of, shared, 1) @ value(w, "e4m3", weight, 0)
    dw = value(g, of, shared, 0).t() @ value(x, "e4m3", shared, 0)
    for got, want, true in (
        (product.output([x], [w])[0], y, x @ w.t()),
        (product.input_gradient([g], [w])[0], dx, g @ w),
        (product.weight_gradient([g], [x])[0], dw, g.t() @ x),
    ):
        assert (got - want).abs().max() <= 1e-6 * want.abs().max()
        off = (want - true).norm() / true.norm()
        assert 1e-3 < off < 0.1, off  # it is rounded, and near


def scales_here() -> bool:
    """Whether torch has scaled products for a CPU: 2.11 has none, 2.13 does."""
    one, eight = torch.ones(()), torch.ones(16, 16).to(torch.float8_e4m3fn)
    kind = ScalingType.TensorWise
    try:
        F.scaled_mm(eight, eight.t(), one, kind, one, kind, output_dtype=torch.float32)
    except NotImplementedError:
        return False
    return True


@pytest.mark.skipif(not scales_here(), reason="this torch scales products on a GPU alone")
@pytest.mark.parametrize("precision", ("fp8-tensorwise", "fp8-rowwise"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_torchs_scaled_products_are_the_same(precision, dtype):
    """As a GPU's are called, by torch's own on a CPU: rounded once, to the dtype of the result."""
    x, w, g = factors(dtype)
    ours, theirs = made(precision), made(precision, "scaled_mm")
    for name, one, other in (
        ("output", x, w),
        ("input_gradient", g, w),
        ("weight_gradient", g, x),
    ):
        (want,) = getattr(ours, name)([one], [other])
        (got,) = getattr(theirs, name)([one], [other])
        bound = 1e-5 if dtype == torch.float32 else 2.0**-7
        assert got.dtype == dtype and (got - want).abs().max() <= bound * want.abs().max()


@pytest.mark.parametrize(
    "shape, fits", [((16, 32), True), ((16, 24), False), ((8, 32), False), ((0, 32), False)]
)
def test_torch_scales_products_of_dims_of_whole_16_bytes(shape, fits):
    payloads = [torch.zeros(16, 32), torch.zeros(shape)]
    assert Operands(payloads, [], "tensor", 1).fits == fits


def test_what_does_not_fit_a_scaled_product_is_multiplied_all_the_same():
    x, w, _ = factors()
    product = made("fp8-tensorwise", "scaled_mm")
    (y,) = product.output([x[:13]], [w])
    assert torch.equal(y, made("fp8-tensorwise").output([x[:13]], [w])[0])


def test_what_is_not_rounded_is_the_plain_product():
    every = ("output", "input-gradient", "weight-gradient")
    x, w, g = factors()
    product = made("fp8-rowwise", unrounded=every)
    assert torch.equal(product.output([x], [w])[0], x @ w.t())
    assert torch.equal(product.input_gradient([g], [w])[0], g @ w)
    assert torch.equal(product.weight_gradient([g], [x])[0], g.t() @ x)


def test_the_largest_of_a_step_is_that_of_all_its_microbatches():
    """And of what is computed again."""
    x, w, g = factors()
    product = made("fp8-delayed")
    for part in (x, x / 2, x):
        product.output([part / 4], [w])
        product.output([part], [w])
        product.output([part / 8], [w])
        product.input_gradient([part[:, :96] * g], [w])
    largest = [one.abs().max() for one in (x, w, x[:, :96] * g)]
    delayed = product.rounding.delayed
    assert delayed is not None and torch.equal(delayed.now, torch.stack(largest))


@pytest.mark.parametrize("wrong", (torch.nan, torch.inf))
@pytest.mark.parametrize("precision", GRANULARITY)
def test_what_is_not_finite_is_seen_by_a_scale_that_is_known(precision, wrong):
    """Not clamped to a number that is like any other."""
    x, w, _ = factors()
    product = made(precision)
    delayed = product.rounding.delayed
    if delayed is not None:
        product.output([x], [w])
        delayed.enter(delayed.now.clone(), 0)
        assert delayed.initialized
    x[3, 5] = wrong
    (y,) = product.output([x], [w])
    assert not y[3].isfinite().any()
