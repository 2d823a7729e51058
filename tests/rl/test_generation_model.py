"""Weights of the generation model over layouts, and scores of reward models as on one process."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from spawning import Row
from table import FAMILIES, Layout
from tiny_models import Flat, Tiny, build, initialize

from dolmen.core.mesh import SINGLE
from dolmen.model.layers import ParameterModule
from dolmen.model.spec import ScalarHeadSpec
from dolmen.rl.generation import GenerationModel, full_parameters
from dolmen.rl.rewards import RewardModel
from dolmen.serving.engine import generate

WORDS = ("tp2 pp2 acc4 zero1", "pp2 dp2 acc4 zero3", "dp2 tp2 sp ep2 zero2")


def differences(kind: str, layout: Layout) -> float:
    """The largest from one process's: values follow from their names alone."""
    found = []
    for mesh, own in ((layout.mesh(torch.device("cpu")), layout), (SINGLE, Layout())):
        schedule = own.make_schedule(4, 1)
        model = build(FAMILIES[kind], mesh, own, schedule, dtype=torch.float64)
        initialize(model, 3)
        found.append({name: value.clone() for name, value in full_parameters(model, mesh)})
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


TEXTS = [list(range(first, first + length)) for first, length in ((3, 9), (5, 2), (8, 12), (1, 7))]


def scored(mesh, layout: Layout) -> torch.Tensor:
    """Of five texts, four at once."""
    config = FAMILIES["llama"]
    schedule = layout.make_schedule(4, 1)
    spec = Tiny(replace(config.spec, head=ScalarHeadSpec()), config.training)
    model = build(spec, mesh, layout, schedule, dtype=torch.float64)
    initialize(model, 3)
    return RewardModel(model, mesh, schedule, 4)([*TEXTS, [9]])


def scores_apart(layout: Layout) -> float:
    """The largest difference from one process's, of numbers of about 1."""
    got, want = scored(layout.mesh(torch.device("cpu")), layout), scored(SINGLE, Layout())
    assert want.std() > 1e-3
    return float((got - want).abs().max())


SCORED = [
    Row(f"scores-{words}", layout.world, partial(scores_apart, layout))
    for words in ("cp2 pp2 acc4", "tp2 dp2 sp zero3")
    for layout in (Layout.of(words),)
]


@pytest.mark.spawn
@pytest.mark.parametrize("row", [row.parameter for row in SCORED])
def test_a_reward_model_scores_as_on_one_process(row, result):
    assert result(row) < 1e-6  # they are told in fp32


WIDE = Flat(vocab_size=96, hidden_size=128, intermediate_size=160, num_hidden_layers=1)


def answers(drawing: GenerationModel, trained) -> list[int]:
    """What is drawn with the weights that `trained` has now."""
    drawing.load_weights(trained)
    return generate(drawing.model, [[5, 6, 7]], 8)[0]


def behind(layout: Layout) -> tuple[bool, bool]:
    """Whether what is drawn after an update is of the weights that were: whether it is what other
    weights draw, and what was drawn before. Of matrices large enough to be laid out.
    """
    mesh = layout.mesh(torch.device("cpu"))
    trained = build(WIDE, mesh, layout, None)
    initialize(trained, 3)
    held, other = (
        GenerationModel(WIDE.spec, WIDE.training, mesh, 1, torch.float32) for _ in range(2)
    )
    before = answers(held, trained)
    initialize(trained, 4)
    after = answers(held, trained)
    return after == answers(other, trained), after == before


def test_what_rests_keeps_nothing_of_the_weights_that_were():
    """Memory of matrices laid out for products goes too: the next weights may lie where the last
    did.
    """
    trained = build(WIDE, SINGLE, Layout(), None)
    initialize(trained, 3)
    held, other = (
        GenerationModel(WIDE.spec, WIDE.training, SINGLE, 1, torch.float32, released=True)
        for _ in range(2)
    )
    assert all(p.is_meta for p in held.model.parameters())
    answers(held, trained)
    made = [
        m
        for m in held.model.modules()
        if isinstance(m, ParameterModule) and m._prepacked is not None
    ]
    held.release()
    assert made and not any(m._prepacked for m in made)
    assert all(p.is_meta for p in held.model.parameters())
    initialize(trained, 4)
    assert answers(held, trained) == answers(other, trained)


REFRESHED = Row("refreshed-dp2 zero1", 2, partial(behind, Layout.of("dp2 zero1")))


@pytest.mark.spawn
@pytest.mark.parametrize("row", [REFRESHED.parameter])
def test_what_is_drawn_is_of_the_weights_that_are_trained_now(row, result):
    assert result(row) == (True, False)
