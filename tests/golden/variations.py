"""What the rows of LAYOUTS leave alone: a sliding window, dropout, packed documents, another seed,
and validation. Each has its negative control in controls.py.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import table
import torch
from spawning import Row
from table import DROPOUT, FAMILIES, SINGLE, Layout
from tiny_models import Flat, Tiny

from dolmen.evaluation.validate import Losses, mean_loss
from dolmen.training.state import NewRows

WINDOW = replace(FAMILIES["llama"], sliding_window=3, sliding_layers=(0, 2))
EXPERTS = FAMILIES["qwen3-moe"]
OTHER_SEED = 7


def rows(config: Flat | Tiny, name: str, layouts: str, steps: int = 2, **options) -> list[Row]:
    """Return a row per line; a bar at its end makes it one of the full tier.

    Two steps show gradients before and after an update. The third, after an update with moments
    of two steps, is the optimizer's: the rows of LAYOUTS have it for all families.
    """
    lines = [line.partition("|") for line in map(str.strip, layouts.splitlines()) if line]
    return [
        table.make_row(name, Layout.of(words), config, full=bool(full), steps=steps, **options)
        for words, full, _ in lines
    ]


DROPPING = rows(
    DROPOUT,
    "gpt2",
    """
    dp2 tp2 sp zero3 acc4
    tp4                 |
    tp4 sp selective
    dp4 acc2            |
    cp2 pp2 acc4
    cp4 gather full     |
    """,
)
# two steps of new rows alone, and one of all; of 71 rows a rank of tp has old ones alone
NEW_ROWS = rows(
    FAMILIES["llama"],
    "llama",
    """
    dp2 tp2 sp zero3
    dp4 zero1        |
    """,
    steps=3,
    new_rows=NewRows(50, 2),
) + rows(FAMILIES["gpt2"], "gpt2", "pp2 acc4", steps=3, new_rows=NewRows(50, 2))
PACKED = rows(
    FAMILIES["llama"],
    "llama",
    """
    cp4
    cp2 pp2 acc4 zero1 full |
    """,
    documents=True,
) + rows(
    FAMILIES["gpt2"],
    "gpt2",
    """
    cp2 tp2 sp gather
    dp2 tp2 zero2           |
    """,
    documents=True,
)
WINDOWED = rows(
    WINDOW,
    "window",
    """
    cp2
    cp2 gather zero3 acc4
    tp2 sp zero1        |
    pp2 acc4            |
    cp4                 |
    cp4 gather          |
    cp2 pp2 acc4 zero1
    cp2 tp2 sp full     |
    """,
) + rows(WINDOW, "window, documents", "cp4\ncp2 dp2 gather zero2 |", documents=True)
SEEDED = rows(DROPOUT, "gpt2", "dp2 tp2 sp zero3 acc4 |", seed=OTHER_SEED) + rows(
    replace(EXPERTS, dropout=0.2), "experts", "pp2 dp2 ep2 acc4 zero1", seed=OTHER_SEED
)


def validated(config: Flat | Tiny, mesh, layout: Layout) -> Losses:
    """Validation over all batches, with documents; of unequal counts of tokens on the ranks."""
    train = table.start(config, mesh, layout)
    return mean_loss(train.model, table.batches(mesh, documents=True), mesh, train.schedule)


def compare_validation(
    config: Flat | Tiny, layout: Layout, damage: AbstractContextManager | None = None
) -> dict[str, tuple[float, str]]:
    """Against one process: relative, and tokens as their difference."""
    with damage or nullcontext():
        got = validated(config, layout.mesh(torch.device("cpu")), layout)
    want = validated(config, SINGLE, Layout())
    return {
        "losses": (abs(got.loss / want.loss - 1), "validation"),
        "nats": (abs(got.nats / want.nats - 1), "validation"),
        "tokens": (float(abs(got.tokens - want.tokens)), "validation"),
    }


def validation(family: str, words: str, full: bool = False) -> Row:
    config = FAMILIES.get(family, WINDOW)
    layout = Layout.of(words)
    call = partial(compare_validation, config, layout)
    return Row(f"{words}-{family}", layout.world, call, full)


VALIDATED = [
    validation("llama", "dp2 zero3"),
    validation("llama", "cp2"),
    validation("gpt2", "pp2 acc4"),
    validation("qwen3", "tp2 sp zero1"),
    validation("qwen3-moe", "dp2 ep2 zero1"),
    validation("window", "cp2 gather", full=True),
    validation("llama", "pp2 acc4 zero-bubble-v v2 zero2", full=True),
    validation("gpt2", "cp2 pp2 acc4 zero1", full=True),
    validation("qwen3-moe", "cp2 dp2 ep4 zero1", full=True),
    validation("llama", "cp4", full=True),
    validation("gpt2", "dp2 tp2 sp zero3", full=True),
    validation("qwen3-moe", "pp2 dp2 ep2 acc4 zero-bubble zero1"),
]
