"""Eight bits: every value is rounded as torch casts it, and has the scale of what shares it."""

import pytest
import torch

from dolmen.ops import fp8

FORMATS = ("e4m3", "e5m2")
GRANULARITIES = ("tensor", "row", "1x128", "128x128", "mx")
EVERY_BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def bits(x):
    return x.view(torch.uint8)


def values(*shape):
    """Over twelve powers of two, so that scales differ."""
    generator = torch.Generator().manual_seed(0)
    powers = torch.randint(-6, 6, shape, generator=generator)
    return torch.randn(shape, generator=generator) * 2.0**powers


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_every_value_of_bf16_is_rounded_as_torch_casts_it(format, granularity):
    """Beside one whose scale is 1, each in a block of its own."""
    most = torch.finfo(fp8.DTYPES[format]).max
    small = EVERY_BF16[EVERY_BF16.abs() <= most]
    if granularity == "tensor":
        x, mine = torch.cat([small, torch.tensor([most], dtype=small.dtype)]), slice(-1)
    else:
        x = torch.stack([small, torch.full_like(small, most)], -1)
        if granularity == "128x128":  # all rows share
            assert len(x) > 128
        mine = (slice(None), 0)
    payload, scale = fp8.quantise(x, format=format, granularity=granularity, axis=-1)
    assert torch.equal(scale, torch.ones_like(scale))
    want = small.float().clamp(-most, most).to(fp8.DTYPES[format])
    assert torch.equal(bits(payload[mine].contiguous()), bits(want))


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_over_the_largest_is_clamped(format):
    """By a scale that is known, as one is that comes from steps before."""
    most = torch.finfo(fp8.DTYPES[format]).max
    got = fp8.quantise_with_scale(EVERY_BF16, torch.tensor(1.0), format, "tensor", -1)
    want = EVERY_BF16.float().clamp(-most, most).to(fp8.DTYPES[format])
    assert torch.equal(bits(got), bits(want))


SCALES = {
    "tensor": ((), slice(None)),
    "row": ((200, 1), (3,)),
    "1x128": ((200, 3), (3, slice(128, 256))),
    "128x128": ((2, 3), (slice(0, 128), slice(128, 256))),
    "mx": ((200, 10), (3, slice(32, 64))),
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_scale_is_of_what_shares_it(format, granularity):
    x = values(200, 300)
    payload, scale = fp8.quantise(x, format=format, granularity=granularity, axis=-1)
    shape, where = SCALES[granularity]
    one = {"tensor": (), "row": (3, 0)}.get(granularity, (3, 1))
    one = (0, 1) if granularity == "128x128" else one
    want = x[where].abs().max() / fp8.LARGEST[format]
    if granularity == "mx":
        assert torch.equal(scale.log2(), scale.log2().round())
        assert want <= scale[one] < 2 * want
    else:
        assert scale[one] == want
    assert scale.shape == shape and scale.dtype == torch.float32
    back = fp8.dequantise(payload, scale, granularity=granularity, axis=-1)
    # half of the last bit, of numbers that are not too small for the scale they share
    last, least = {"e4m3": (2.0**-4, 2.0**-6), "e5m2": (2.0**-3, 2.0**-14)}[format]
    largest = fp8.dequantise(torch.ones_like(payload), scale, granularity=granularity, axis=-1)
    assert ((back - x).abs() <= last * torch.maximum(x.abs(), least * largest) * (1 + 1e-6)).all()


@pytest.mark.parametrize("granularity", ("row", "1x128", "mx"))
def test_the_other_axis_is_the_transpose(granularity):
    x = values(200, 300)
    down = fp8.quantise(x, format="e4m3", granularity=granularity, axis=0)
    across = fp8.quantise(x.t(), format="e4m3", granularity=granularity, axis=1)
    for a, b in zip(down, across, strict=True):
        assert torch.equal(a.float(), b.float().t())


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("wrong", (torch.nan, torch.inf, -torch.inf))
def test_what_is_not_finite_is_seen(granularity, wrong):
    x = values(200, 300)
    x[3, 130] = wrong
    payload, scale = fp8.quantise(x, format="e4m3", granularity=granularity, axis=-1)
    back = fp8.dequantise(payload, scale, granularity=granularity, axis=-1)
    assert back[3, 130].isnan()
    if granularity != "tensor":  # and what does not share its scale is as it was
        assert back[3, 130].isnan() and back[150].isfinite().all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_nothing_is_lost_where_all_is_zero_or_nearly(granularity):
    zeros = torch.zeros(40, 64)
    payload, scale = fp8.quantise(zeros, format="e4m3", granularity=granularity, axis=-1)
    assert (scale == 1).all() and (payload.float() == 0).all()
    least = torch.full((40, 64), torch.finfo(torch.float32).smallest_normal)
    for x in (least, least / 4, least * 2.0**-23):  # normal, subnormal, the smallest there is
        payload, scale = fp8.quantise(x, format="e4m3", granularity=granularity, axis=-1)
        assert payload.float().isfinite().all() and (scale >= fp8.SMALLEST_SCALE).all()
        back = fp8.dequantise(payload, scale, granularity=granularity, axis=-1)
        assert ((back - x).abs() <= 2.0**-10 * fp8.SMALLEST_SCALE).all()
    nothing = fp8.quantise(zeros[:0], format="e4m3", granularity=granularity, axis=-1)
    assert nothing[0].shape == (0, 64)


def test_powers_of_two_cut_nothing_off():
    """The largest of a block of 32 is one over a power of two times 448, and under it."""
    for factor, want in ((1.0, 1.0), (1 + 2.0**-7, 2.0), (0.5, 0.5), (0.5 + 2.0**-8, 1.0)):
        x = torch.full((1, 32), 448.0 * factor)
        payload, scale = fp8.quantise(x, format="e4m3", granularity="mx", axis=-1)
        assert scale.item() == want and payload.float().max() <= 448
