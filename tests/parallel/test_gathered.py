"""To round what is rounded gives the same, so what ZeRO gathers may be payloads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dolmen.ops import fp8
from dolmen.ops.numerics import Fp8, Fp8Config
from dolmen.parallel import quantized_product

ROUNDED = dict(format="e4m3", granularity="128x128")


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), spread=st.integers(0, 30), exponent=st.integers(-60, 60))
def test_rounding_twice_is_rounding_once(seed, spread, exponent):
    """Of 2 x 2 blocks, and a part of one, with numbers over many powers of two."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(256, 130, generator=generator)
    powers = torch.randint(-spread, 1, values.shape, generator=generator) + float(exponent)
    values = (values * torch.exp2(powers)).bfloat16()
    payload, scale = fp8.quantise(values, **ROUNDED)
    copy = quantized_product.dequantise_gathered((payload, scale))
    again = fp8.quantise(copy, **ROUNDED)
    assert torch.equal(again[0].view(torch.uint8), payload.view(torch.uint8))
    assert torch.equal(again[1], scale)
    assert not torch.equal(copy, values)


def test_numbers_that_are_not_finite_stay_so():
    values = torch.ones(128, 256).bfloat16()
    values[3, 200] = torch.inf
    copy = quantized_product.dequantise_gathered(fp8.quantise(values, **ROUNDED))
    assert torch.equal(copy[:, :128], values[:, :128]) and copy[:, 128:].isnan().all()


@pytest.mark.parametrize(
    "precision, options, takes",
    [
        ("fp8-blockwise", {}, True),
        ("fp8-blockwise", {"unrounded": ("weight-gradient",)}, True),
        ("fp8-blockwise", {"unrounded": ("input-gradient",)}, False),
        ("fp8-blockwise", {"unrounded": ("output",)}, False),
        ("fp8-rowwise", {}, False),
        ("fp8-tensorwise", {}, False),
        ("fp8-delayed", {}, False),
        ("mxfp8", {}, False),
    ],
)
def test_one_payload_is_of_blocks_that_both_products_take(precision, options, takes):
    assert quantized_product.one_payload(Fp8(precision, Fp8Config(**options))) is takes
