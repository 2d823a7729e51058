"""Products with several adapters beside a weight, each token with one or none, against the formula
in float64.
"""

import pytest
import torch
import torch.nn.functional as F

from dolmen.core.mesh import SINGLE
from dolmen.parallel import inference_linear, tensor
from dolmen.parallel.inference_linear import (
    AdapterAssignment,
    FusedPart,
    Int8Rows,
    IntegerLinear,
    MultiLora,
    OneDnn,
    Pair,
)
from dolmen.parallel.tensor import Linear, TensorParallel

TP = TensorParallel(SINGLE.tp)
OUT, IN = 96, 128
NAMES, COUNTS = ("b", None, "a", "b", "elsewhere"), (1, 2, 3, 2, 1)
CPU = torch.device("cpu")


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 4


PAIRS = {
    "a": Pair(random_tensor(3, IN, seed=1), random_tensor(OUT, 3, seed=2)),
    "b": Pair(
        random_tensor(7, IN, seed=3),
        random_tensor(OUT, 7, seed=4),
        random_tensor(OUT, seed=5).exp(),
    ),
    "nobody's": Pair(torch.full((2, IN), torch.nan), random_tensor(OUT, 2)),
}


def by_formula(product: torch.Tensor, bias: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Token after token."""
    of_token = [name for name, n in zip(NAMES, COUNTS, strict=True) for _ in range(n)]
    rows = []
    for name, y, own in zip(of_token, product.double(), x.double(), strict=True):
        if name in PAIRS:
            down, up, gain = PAIRS[name]
            y = y + up.double() @ (down.double() @ own)
            y = y if gain is None else y * gain.double()
        rows.append(y + bias.double())
    return torch.stack(rows)


@pytest.mark.parametrize("kind", [None, OneDnn, Int8Rows, IntegerLinear, FusedPart])
def test_each_token_has_its_own(kind):
    """Beside a weight as it lies, laid out, and in eight bits, whose own rounding is left as is."""
    weight, bias, x = (
        random_tensor(OUT, IN, seed=6),
        random_tensor(OUT, seed=7),
        random_tensor(sum(COUNTS), IN, seed=8),
    )
    if kind is FusedPart:
        laid, other = inference_linear.prepack_together([weight, weight], "stated")
    else:
        laid = other = None if kind is None else kind(weight)
    with torch.no_grad():
        product = F.linear(x, weight) if laid is None else laid(x, None)
        turn = AdapterAssignment(inference_linear.segments(NAMES, COUNTS, CPU))
        one = Linear(weight, bias, prepacked=laid, several=MultiLora(PAIRS, turn))
        got, plain = tensor.columns(x, [one, Linear(weight, bias, prepacked=other)], TP)
        (part,) = tensor.products(x, [one], TP)
    torch.testing.assert_close(got.double(), by_formula(product, bias, x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(part, got)
    torch.testing.assert_close(plain, product + bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["a", "b"])
def test_all_tokens_may_have_the_same(name):
    """Then none is gathered."""
    (only,) = inference_linear.segments([name, name], [2, 3], CPU)
    assert only == (name, None)
    y, x = random_tensor(5, OUT, seed=1), random_tensor(5, IN, seed=2)
    index = torch.arange(5)
    with torch.no_grad():
        whole = MultiLora(PAIRS, AdapterAssignment([only])).add_to(y.clone(), x)
        gathered = MultiLora(
            PAIRS, AdapterAssignment([inference_linear.Segment(name, index)])
        ).add_to(y.clone(), x)
    torch.testing.assert_close(whole, gathered, rtol=1e-6, atol=1e-6)
    assert (whole - y).abs().max() > 0.1


def test_tokens_of_a_text_are_behind_those_of_the_texts_before():
    found = inference_linear.segments(NAMES, COUNTS, CPU)
    assert {s.name: s.tokens.tolist() for s in found} == {
        "b": [0, 6, 7],
        "a": [3, 4, 5],
        "elsewhere": [8],
    }
    assert inference_linear.segments([None, None], [1, 4], CPU) == []


def test_rows_of_outputs_are_cut_alike():
    cut = MultiLora(PAIRS, AdapterAssignment()).cut(lambda p: p.narrow(0, 10, 20)).pairs["b"]
    down, up, gain = PAIRS["b"]
    assert torch.equal(cut.down, down)
    assert torch.equal(cut.up, up[10:30]) and torch.equal(cut.gain, gain[10:30])
