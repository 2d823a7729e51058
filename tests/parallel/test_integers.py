"""Products of u8 tokens and s8 weights, to the bit: against sums in int64, in batches of any size,
and cut over tp.
"""

from functools import partial

import numpy as np
import pytest
import torch
from spawning import Row

from dolmen.core.mesh import SINGLE, build_mesh
from dolmen.core.torch_private import compute
from dolmen.parallel import inference_linear, tensor
from dolmen.parallel.inference_linear import Int8Rows, IntegerLinear, SplitIntegerLinear, prepack
from dolmen.parallel.tensor import Linear, TensorParallel

OUT, TOKENS = 72, 16
LARGEST_SUM = 1 << 24  # fp32 holds every smaller whole number


def factors(inputs: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """x [16, inputs], W [72, inputs], b [72]; some rows of each have the largest payload
    everywhere, of either sign, with an odd sum, and one of x is zero.
    """
    chance = torch.Generator().manual_seed(inputs)
    x, weight = (torch.randn(n, inputs, generator=chance) for n in (TOKENS, OUT))
    x *= torch.logspace(-4, 4, TOKENS)[:, None]
    x[0], x[1], x[2], x[3, 1:] = 3.0, -3.0, 0.0, 3.0
    weight[0], weight[1], weight[2, 1:] = 0.5, -0.5, 0.5
    return [one.to(dtype) for one in (x, weight, torch.randn(OUT, generator=chance))]


def rounded(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(int64 payload, fp32 scale of each row)."""
    rows = rows.astype(np.float32)
    amax = np.abs(rows).max(1, keepdims=True)
    scale = np.where(amax > 0, amax / np.float32(127), np.float32(1))
    return np.rint(rows / scale).astype(np.int64), scale


def by_integers(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x W^T + b: sums in int64, rounded once to fp32, times the scale of the output, then of the
    token.
    """
    (left, of_token), (right, of_output) = (
        rounded(x.float().numpy()),
        rounded(weight.float().numpy()),
    )
    sums = np.zeros((len(left), len(right)), np.int64)
    for i in range(left.shape[1]):
        sums += left[:, i, None] * right[None, :, i]
    return torch.from_numpy(sums.astype(np.float32) * of_output[:, 0] * of_token) + bias.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [5, 72, 1040, 2400])
def test_a_product_is_that_of_the_integers(inputs, dtype):
    x, weight, bias = factors(inputs, dtype)
    product = prepack(weight, "int8")
    assert isinstance(product, IntegerLinear)
    want = by_integers(x, weight, bias)
    assert torch.equal(product(x, bias), want.to(dtype))
    bare = by_integers(x, weight, torch.zeros(OUT))
    assert torch.equal(product(x, None), bare.to(dtype))
    # rounding of both factors: half of 1 / 127 of the largest of 5 or more numbers
    exact = x.double() @ weight.double().t() + bias.double()
    assert (want - exact).norm(dim=1).div(exact.norm(dim=1).clamp(min=1e-9))[4:].max() < 0.03


@pytest.mark.parametrize("inputs", [72, 2400])
def test_a_row_has_the_same_bits_in_any_batch(inputs):
    x, weight, bias = factors(inputs)
    product = prepack(weight, "int8")
    assert product is not None
    together = product(x, bias)
    for sizes in ([1] * 16, [3, 5, 8], [15, 1]):
        assert torch.equal(torch.cat([product(rows, bias) for rows in x.split(sizes)]), together)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_spoils_its_own_row_alone(value):
    x, weight, bias = factors(72)
    product = prepack(weight, "int8")
    assert product is not None
    spoiled = x.clone()
    spoiled[4, 7] = value
    got, want = product(spoiled, bias), product(x, bias)
    assert not got[4].isfinite().any()
    others = [i for i in range(TOKENS) if i != 4]
    assert torch.equal(got[others], want[others])


def cut(inputs: int, sequence: bool) -> dict[str, bool | str]:
    """Row-parallel products over tp of 2 and of 4 against one process: kind, dtype of the sums that
    are sent, and whether the bits are the same.
    """
    x, weight, bias = factors(inputs)
    whole = tensor.rows(
        [x, x.flip(1)], [one_linear(weight, bias, SINGLE.tp)] * 2, TensorParallel(SINGLE.tp)
    )
    found: dict[str, bool | str] = {}
    for size in (2, 4):
        axis = build_mesh(4 // size, size, torch.device("cpu")).tp
        tp = TensorParallel(axis, sequence)
        own = slice(axis.rank * inputs // size, (axis.rank + 1) * inputs // size)
        linear = one_linear(weight[:, own], bias, axis)
        product = linear.prepacked
        assert isinstance(product, SplitIntegerLinear)
        got = tensor.rows([x[:, own], x.flip(1)[:, own]], [linear] * 2, tp)
        want = tensor.local_tokens(whole, tp)
        found[f"{size} sums"] = str(product.sums(x[:, own], product.token_scales(x[:, own])).dtype)
        found[f"{size}"] = torch.equal(got, want)
        # by the scales of its own part: the control
        found[f"{size} own scales"] = torch.equal(
            got, tensor.local_tokens(product_of_part(x, weight, own), tp)
        )
    return found


def one_linear(weight: torch.Tensor, bias: torch.Tensor, axis) -> Linear:
    return Linear(weight, bias, prepacked=prepack(weight, "int8", axis))


def product_of_part(x: torch.Tensor, weight: torch.Tensor, own: slice) -> torch.Tensor:
    """The product of one part of the inputs."""
    return IntegerLinear(weight[:, own])(x[:, own], None)


CUTS = [
    Row(f"{inputs} inputs{' sequence' * sequence}", 4, partial(cut, inputs, sequence))
    for inputs, sequence in ((1040, False), (1044, False), (4400, False), (1040, True))
]


@pytest.mark.parametrize("row", [row.parameter for row in CUTS])
def test_a_cut_product_has_the_bits_of_a_whole_one(row, result):
    """Of 4,400 inputs a rank has 2,200 or 1,100: sums of more than fp32 holds, in blocks."""
    found = result(row)
    sums = "torch.float32" if "1040" in row.name else "torch.int32"
    for size in (2, 4):
        assert found[f"{size} sums"] == sums
        assert found[f"{size}"] is True and found[f"{size} own scales"] is False


def test_sums_are_as_large_as_fp32_cannot_hold():
    """The largest of 1,040 inputs is below 2^24, and of 1,041 above."""
    assert (
        inference_linear.MAX_FLOAT_INPUTS * 127**2
        < LARGEST_SUM
        <= (inference_linear.MAX_FLOAT_INPUTS + 1) * 127**2
    )


def test_sums_that_may_leave_int32_are_not_of_integers():
    """133,144 products of the largest payloads fit in int32; the sum of one more is negative."""
    most = inference_linear.MAX_INT32_INPUTS
    assert most * 127**2 < 1 << 31 <= (most + 1) * 127**2
    weight = torch.ones(1, most + 1)
    fits, beyond = prepack(weight[:, :most], "int8"), prepack(weight, "int8")
    assert isinstance(fits, IntegerLinear) and isinstance(beyond, Int8Rows)
    assert fits(weight[:, :most], None).item() == pytest.approx(most, rel=1e-6)


def spoil(where: int) -> list[bool]:
    """Whether a token, and an output, are not finite whose activation or weight on rank `where` is
    NaN.
    """
    axis, found = build_mesh(1, 2, torch.device("cpu")).tp, []
    own = slice(axis.rank * 36, (axis.rank + 1) * 36)
    for spoiled in (0, 1):
        x, weight, _ = factors(72)
        (x, weight)[spoiled][4, 36 * where] = torch.nan
        linear = one_linear(weight[:, own], None, axis)
        y = tensor.rows([x[:, own]], [linear], TensorParallel(axis))
        found.append(not (y[4] if spoiled == 0 else y[:, 4]).isfinite().any())
    return found


SPOILED = [Row(f"NaN on rank {where}", 2, partial(spoil, where)) for where in (0, 1)]


@pytest.mark.parametrize("row", [row.parameter for row in SPOILED])
def test_nan_of_one_rank_is_hidden_by_no_other(row, result):
    assert result(row) == [True, True]


@pytest.fixture
def checked_again():
    """The check of this CPU is made in the test, and again behind it."""
    inference_linear.multiplies_integers.cache_clear()
    yield
    inference_linear.multiplies_integers.cache_clear()


def saturating(x, weight, scale, zeros, zero_point):
    """As AVX2 without VNNI: pairs of products are added in int16."""
    payload = torch.full((64, 64), 127, dtype=torch.int32)  # that of the check
    products = x.int()[:, None, :] * payload
    pairs = products.unflatten(-1, (32, 2)).sum(-1).clamp(-(1 << 15), (1 << 15) - 1)
    return (pairs.sum(-1) - zero_point * payload.sum(1)).float() * scale


def test_products_that_saturate_are_not_used(monkeypatch, checked_again):
    weight = factors(72)[1]
    monkeypatch.setattr(compute, "multiply_integers", saturating)
    with pytest.warns(UserWarning, match="no VNNI.*saturate.*in bf16 by int8 weights"):
        product = prepack(weight, "int8")
    assert isinstance(product, Int8Rows)
    # once per process
    assert isinstance(prepack(weight, "int8"), Int8Rows)


def test_where_torch_has_no_product_of_integers(monkeypatch, checked_again):
    monkeypatch.setattr(compute, "has_integer_product", lambda: False)
    with pytest.warns(UserWarning, match="this torch has no product of u8 and s8"):
        assert isinstance(prepack(factors(72)[1], "int8"), Int8Rows)
