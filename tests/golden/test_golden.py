"""The layout never changes the answer: raw gradients, their norm and losses of six steps equal one process, for every row
of table.LAYOUTS and every family. One spawn a world size runs all its rows."""

from functools import cache

import pytest
import torch
from conftest import run_spawned
from controls import CONTROLS, compare_damaged
from table import FAMILIES, LAYOUTS, Layout, compare, compare_all

from dolmen.optim.optimizer import OptimizerConfig

TOLERANCE = {"gradient": 1e-5, "norms": 1e-5, "losses": 1e-6}
EXACT = Layout(dp=2, tp=2, sequence=True, zero=3, accumulation=4)


def in_world(world: int) -> dict:
    """Runs in a spawned process: all that this world size has to show."""
    out = {"layouts": compare_all(tuple(layout for layout in LAYOUTS if layout.world == world))}
    if world == 4:
        out["controls"] = compare_damaged()
        out["double"] = compare("gpt2", EXACT, dtype=torch.float64, optimizer=OptimizerConfig(lr=1e-2, schedule="constant", clip=0.25))
    return out


@cache
def results(world: int) -> dict: return run_spawned(world, in_world, world)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layout_never_changes_the_answer(layout, family):
    for kind, (difference, where) in results(layout.world)["layouts"][f"{family} {layout}"].items():
        assert difference <= TOLERANCE[kind], f"{kind} of {family} on {layout} differ by {difference:.1e} at {where}"


@pytest.mark.parametrize("control", CONTROLS)
def test_a_wrong_layout_is_seen(control):
    difference, where = results(4)["controls"][control]
    if control == "nothing is wrong": assert difference <= TOLERANCE["gradient"]
    else: assert difference >= 10 * TOLERANCE["gradient"], f"{control}: largest difference {difference:.1e} at {where}"


def test_double():
    """In fp64 and with AdamW's default eps nothing is left but rounding of fp64: what fp32 shows is rounding too."""
    difference, where = results(4)["double"]["gradient"]
    assert difference <= 1e-12, f"{difference:.1e} at {where}"
