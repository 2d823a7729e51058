"""The layout never changes the answer of what a family brings either."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from mechanisms import CONFIGS, ROWS, adapted
from spawning import Row
from table import FAMILIES, SINGLE, Layout, batches, hold, run, start, updates
from tiny_models import with_num_layers

from dolmen.core import state


@pytest.mark.parametrize("row", [row.parameter for row in ROWS])
def test_layout_never_changes_the_answer(row, result):
    hold(result(row), row.name)


def requested_options(config):
    """What a batch must say beside tokens, for what the model has to be felt."""
    several = config.spec.streams > 1 and config.spec.embedding.types is None
    streams = config.spec.streams if several else 0
    return {"prefixes": config.spec.has_prefix_mask, "streams": streams}


def test_each_is_another_answer():
    """Rows of one model under two names would prove little."""
    losses = [
        run(config, SINGLE, Layout(), steps=1, **requested_options(config)).losses[0]
        for config in CONFIGS.values()
    ]
    assert len(set(losses)) == len(losses)


def held_apart(layers: int, layout: Layout) -> list[str]:
    """Parameters of any rank that after two updates are not at rest, of a model with adapters."""
    mesh = layout.mesh(torch.device("cpu"))
    train = start(adapted(with_num_layers(FAMILIES["llama"], layers)), mesh, layout)
    updates(train, mesh, batches(mesh)[:2])
    found = [name for name, p in train.model.named_parameters() if not state.sharded_dims(p)]
    everyone: list[list[str]] = [[]] * mesh.size
    dist.all_gather_object(everyone, found)
    return [name for each in everyone for name in each]


# a rank has the embedding alone; its last backward is of the embedding
FROZEN = [
    Row(f"{words}, {layers} layers", layout.world, partial(held_apart, layers, layout))
    for words, layers in (
        ("pp2 acc2 zero0", 1),
        ("pp2 acc2 zero1", 1),
        ("pp2 acc2 zero2", 1),
        ("pp2 acc2 zero-bubble zero1", 1),
        ("pp2 acc4 interleaved v2 zero1", 3),
    )
    for layout in (Layout.of(words),)
]


@pytest.mark.parametrize("row", [row.parameter for row in FROZEN])
def test_a_stage_where_all_is_frozen_is_at_rest_after_a_step(row, result):
    """A checkpoint takes what the model holds then: of a gathered copy this rank of tp's part."""
    assert not result(row)
