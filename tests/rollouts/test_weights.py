"""Weights that are trained over any layout are whole where they draw."""

from functools import partial

import pytest
import torch
from models import build, initialize
from spawning import Row
from table import FAMILIES, Layout

from dolmen.core.mesh import SINGLE
from dolmen.rollouts.weights import whole

WORDS = ("tp2 pp2 acc4 zero1", "pp2 dp2 acc4 zero3", "dp2 tp2 sp ep2 zero2")


def differences(kind: str, layout: Layout) -> float:
    """The largest from one process's: values follow from their names alone."""
    found = []
    for mesh, own in ((layout.mesh(torch.device("cpu")), layout), (SINGLE, Layout())):
        schedule = own.make_schedule(4, 1)
        model = build(FAMILIES[kind], mesh, own, schedule, dtype=torch.float64)
        initialize(model, 3)
        found.append({name: value.clone() for name, value in whole(model, mesh)})
    got, want = found
    assert got.keys() == want.keys()
    return max(float((got[name] - want[name]).abs().max()) for name in want)


ROWS = [
    Row(f"{kind}-{words}", layout.world, partial(differences, kind, layout))
    for kind, words in zip(("gpt2", "gpt2", "qwen3-moe"), WORDS, strict=True)
    for layout in (Layout.of(words),)
]


@pytest.mark.spawn
@pytest.mark.parametrize("row", [row.parameter for row in ROWS])
def test_they_are_whole_on_every_rank(row, result):
    assert result(row) == 0
