"""The layout never changes the answer: raw gradients, their norm and losses of three steps equal
one process, for every row of table.LAYOUTS and every family. One spawn a world size runs all its
rows.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from controls import CONTROLS, compare_damaged
from spawning import run_spawned
from table import (
    DROPOUT,
    FAMILIES,
    LAYOUTS,
    OPTIMIZER,
    SEED,
    SINGLE,
    STEPS,
    VOCABULARY,
    Layout,
    batches,
    compare,
    compare_all,
    run,
)

from dolmen.core.mesh import Axis
from dolmen.optim.optimizer import OptimizerConfig

TOLERANCE = {"gradient": 1e-5, "norms": 1e-5, "losses": 1e-6}
EXACT = Layout.of("dp2 tp2 sp zero3 acc4")
DROPPING = [
    Layout.of(words)
    for words in (
        "dp2 tp2 sp zero3 acc4",
        "tp4",
        "tp4 sp selective",
        "dp4 acc2",
        "cp2 pp2 acc4",
        "cp4 gather full",
    )
]
PACKED = [
    Layout.of(words)
    for words in ("cp4", "cp2 tp2 sp gather", "cp2 pp2 acc4 zero1 full", "dp2 tp2 zero2")
]


def in_world(world: int) -> dict:
    """Runs in a spawned process: all that this world size has to show."""
    out = {"layouts": compare_all(tuple(layout for layout in LAYOUTS if layout.world == world))}
    if world == 4:
        out["controls"] = compare_damaged()
        out["double"] = compare(
            FAMILIES["gpt2"],
            EXACT,
            dtype=torch.float64,
            optimizer=OptimizerConfig(lr=1e-2, schedule="constant", clip=0.25),
        )
        out["documents"] = {
            f"{family}: {layout}": compare(FAMILIES[family], layout, steps=2, documents=True)
            for family, layout in zip(("llama", "gpt2") * 2, PACKED, strict=True)
        }
        out["dropout"] = {str(layout): compare(DROPOUT, layout, steps=3) for layout in DROPPING}
    return out


@cache
def results(world: int) -> dict:
    return run_spawned(world, in_world, world)


@pytest.mark.parametrize(
    ("layout", "family"),
    [(layout, family) for layout in LAYOUTS for family in layout.families],
    ids=str,
)
def test_layout_never_changes_the_answer(layout, family):
    for kind, (difference, where) in results(layout.world)["layouts"][
        f"{family}: {layout}"
    ].items():
        assert difference <= TOLERANCE[kind], (
            f"{kind} of {family} on {layout} differ by {difference:.1e} at {where}"
        )


@pytest.mark.parametrize("control", CONTROLS)
def test_a_wrong_layout_is_seen(control):
    found = results(4)["controls"][control]
    if control == "nothing is wrong":
        assert all(found[kind][0] <= TOLERANCE[kind] for kind in found)
    else:
        assert max(found[kind][0] / TOLERANCE[kind] for kind in found) >= 10, f"{control}: {found}"


def test_double():
    """In fp64 and with AdamW's default eps nothing is left but rounding of fp64: what fp32 shows is
    rounding too.
    """
    difference, where = results(4)["double"]["gradient"]
    assert difference <= 1e-12, f"{difference:.1e} at {where}"


def test_documents():
    """Attention that stays inside documents, also where a document lies on several ranks of cp; and
    it is another loss.
    """
    free = run(FAMILIES["llama"], SINGLE, Layout(), steps=2)
    assert (
        abs(
            run(FAMILIES["llama"], SINGLE, Layout(), steps=2, documents=True).losses[0]
            / free.losses[0]
            - 1
        )
        > 1e-3
    )
    for layout, differences in results(4)["documents"].items():
        for kind, (difference, where) in differences.items():
            assert difference <= TOLERANCE[kind], (
                f"{kind} with documents on {layout} differ by {difference:.1e} at {where}"
            )


def test_dropout():
    """With dropout too: what falls out is a matter of seed, step and place in the logical
    tensor.
    """
    for layout, differences in results(4)["dropout"].items():
        for kind, (difference, where) in differences.items():
            assert difference <= TOLERANCE[kind], (
                f"{kind} with dropout on {layout} differ by {difference:.1e} at {where}"
            )


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
