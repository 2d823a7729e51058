"""The layout never changes the answer: raw gradients, their norm and losses of three steps equal
one process, for every row of table.LAYOUTS and every family. One spawn per world size runs all of
its rows that were asked for, and no other.
"""

from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest
import torch
from controls import CONTROLS, compare_damaged
from spawning import Row
from table import (
    FAMILIES,
    LAYOUTS,
    OPTIMIZER,
    SEED,
    SINGLE,
    STEPS,
    TOLERANCE,
    VOCABULARY,
    Layout,
    batches,
    hold,
    make_row,
    run,
)

from dolmen.core.mesh import Axis
from dolmen.optim.optimizer import OptimizerConfig

EXACT = Layout.of("dp2 tp2 sp zero3 acc4")
ROWS = [
    make_row(family, layout, full=family not in layout.short)
    for layout in LAYOUTS
    for family in layout.families
]


@pytest.mark.parametrize("row", [row.parameter for row in ROWS])
def test_layout_never_changes_the_answer(row, result):
    hold(result(row), row.name)


def test_short_tier_has_every_mechanism():
    """Each word of the table, each pair of axes and each axis with each family is in a short
    row.
    """

    def covered(layout: Layout, families) -> set:
        axes = [axis for axis in ("tp", "cp", "pp", "dp", "ep") if getattr(layout, axis) > 1]
        axes += ["zero"] * (layout.zero > 0)
        return (
            set(layout.words.split())
            | {*combinations(axes, 2)}
            | {(family, axis) for family in families for axis in axes}
        )

    everything = set().union(*(covered(layout, layout.families) for layout in LAYOUTS))
    short = [covered(layout, layout.short) for layout in LAYOUTS if layout.short]
    assert sorted(map(str, everything - set().union(*short))) == []
    assert all(set(layout.short) <= set(layout.families) for layout in LAYOUTS)


# one of each axis; the others, which test this table and no code of dolmen, are of the full tier
SHORT_CONTROLS = {
    "nothing is wrong",
    "copy left out of a block",
    "reduce-scatter left out of a block",
    "a message of another microbatch",
    "keys and values not passed on",
    "experts unweighted",
    "dropout without the seed",
}


@pytest.mark.parametrize(
    "row",
    [
        Row(
            name, layout.world, partial(compare_damaged, name), name not in SHORT_CONTROLS
        ).parameter
        for name, (_, layout, *_) in CONTROLS.items()
    ],
)
def test_a_wrong_layout_is_seen(row, result):
    found = result(row)
    if row.name == "nothing is wrong":
        assert all(found[kind][0] <= TOLERANCE[kind] for kind in found)
    else:
        worst = max(found[kind][0] / TOLERANCE[kind] for kind in found)
        assert worst >= 10, f"{row.name}: {found}"


DOUBLE = make_row(
    "gpt2",
    EXACT,
    dtype=torch.float64,
    optimizer=OptimizerConfig(lr=1e-2, schedule="constant", clip=0.25),
)


@pytest.mark.parametrize("row", [DOUBLE.parameter])
def test_double(row, result):
    """In fp64 and with AdamW's default eps nothing is left but rounding of fp64: what fp32 shows is
    rounding too.
    """
    difference, where = result(row)["gradient"]
    assert difference <= 1e-12, f"{difference:.1e} at {where}"


def test_data_order_comes_from_the_seed_alone():
    """The rows of all ranks, one after the other, are the batches of one process, in number and
    order; another seed's are not.
    """

    def rank(r: int, of: int):
        return batches(replace(SINGLE, dp=Axis("dp", of, r)))

    whole = batches(SINGLE)
    for dp in (2, 4, 8):
        for step, parts in enumerate(zip(*(rank(r, dp) for r in range(dp)), strict=True)):
            assert torch.equal(torch.cat([b.tokens for b in parts]), whole[step].tokens)
            assert torch.equal(torch.cat([b.labels for b in parts]), whole[step].labels)
    assert not torch.equal(batches(SINGLE, SEED + 1)[0].tokens, whole[0].tokens)
    assert (
        len({b.real_tokens for b in rank(0, 4) + rank(3, 4)}) > 1
        and batches(SINGLE)[0].split(16)[10].real_tokens < 2
    )


def test_clipping_and_schedule_are_active():
    """The table would prove little if the norm were below the clip or the loss did not move."""
    one = run(FAMILIES["llama"], SINGLE, Layout())
    assert min(one.norms) > 2 * OPTIMIZER.clip and len(one.gradients) == len(one.losses) == STEPS
    rows = [int(t) for t in batches(SINGLE)[0].tokens.flatten()]
    assert 0 <= min(rows) and max(rows) < VOCABULARY
