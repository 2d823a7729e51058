"""Weights of eight bits against float64: what is stored, what it stands for, and its products."""

import pytest
import torch

from dolmen.ops import int8


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of unlike size: a scale for each."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (made * torch.logspace(-3, 3, shape[-2], dtype=torch.float64)[:, None]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5, 7), (3, 5, 7), (0, 5, 7)])
def test_a_weight_is_off_by_half_a_step(shape, dtype):
    w = weight(*shape, dtype=dtype)
    payload, scale = int8.quantise(w)
    assert payload.dtype == torch.int8 and payload.shape == w.shape
    assert scale.dtype == torch.float32 and scale.shape == w.shape[:-1]
    back = int8.dequantise(payload, scale, torch.float64)
    # half a step, and what fp32 rounds of the scale and of the quotient, 127 times 2^-23
    assert ((back - w.double()).abs() <= scale[..., None].double() * (0.5 + 127 * 2**-23)).all()
    assert torch.equal(payload.abs().amax(-1), torch.full_like(scale, 127, dtype=torch.int8))
    again, same = int8.quantise(back)
    assert torch.equal(again, payload)
    torch.testing.assert_close(same, scale, rtol=2**-22, atol=0)


def test_zeros_ties_and_what_is_not_finite():
    w = torch.tensor(
        [[0.0, 0.0, 0.0], [127.0, 0.5, -1.5], [1.0, torch.nan, 0.0], [1.0, torch.inf, 0.0]]
        + [[1e-40, 0.0, -1e-40]]
    )
    payload, scale = int8.quantise(w)
    assert payload[:2].tolist() == [[0, 0, 0], [127, 0, -2]]
    assert scale[:2].tolist() == [1.0, 1.0]
    back = int8.dequantise(payload, scale)
    assert torch.equal(back[0], w[0]) and back[2:4].isnan().all()
    assert back[4].isfinite().all() and (back[4] - w[4]).abs().max() <= 2.0**-127


@pytest.mark.parametrize("dtype, off", [(torch.bfloat16, 2e-2), (torch.float32, 1e-6)])
def test_products_are_those_of_the_restored_weight(dtype, off):
    """In units of the largest of each output: of bf16 two roundings, of fp32 sums of 64."""
    payload, scale = int8.quantise(weight(48, 64))
    whole = int8.dequantise(payload, scale, torch.float64)
    x, g = (torch.randn(9, n, generator=torch.Generator().manual_seed(n)) for n in (64, 48))
    x, g = x.to(dtype), g.to(dtype)
    y, dx = int8.output(x, payload, scale), int8.input_gradient(g, payload, scale)
    assert y.dtype == dx.dtype == dtype
    want_y, want_dx = x.double() @ whole.T, g.double() @ whole
    assert ((y - want_y).abs().amax(0) <= off * want_y.abs().amax(0)).all()
    assert (dx - want_dx).abs().max() <= off * want_dx.abs().max()
