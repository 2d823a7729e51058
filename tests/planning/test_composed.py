"""What is put together of a few layers beside the whole step, row by row; what is kept."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from test_dryrun import GPT, LENGTH, LLAMA, run_of

from dolmen.model.layout import Layout
from dolmen.ops.kernels import H100
from dolmen.planning import pieces as subject
from dolmen.planning.composed import composed
from dolmen.planning.dryrun import dryrun
from dolmen.training.config import RunConfig

LAYERS = {"gpt2": "n_layer", "llama": "num_hidden_layers"}


def drawn(seed: int) -> RunConfig:
    """A run with a layout at random, of stages that have more layers than are run."""
    chance = random.Random(seed)
    while True:
        model = chance.choice((LLAMA, GPT))
        tp, pp, cp, dp = (
            chance.choice(sizes) for sizes in ((1, 2), (1, 2, 3, 5), (1, 1, 2), (1, 2))
        )
        schedules = ("1f1b", "1f1b", "interleaved", "gpipe")
        schedule = chance.choice(schedules) if pp > 1 else "1f1b"
        chunks = 2 if schedule == "interleaved" else 1
        recompute = chance.choice(("none", "selective", "full"))
        layout = Layout(
            tp=tp,
            pp=pp,
            cp=cp,
            dp=dp,
            zero=chance.choice((0, 1, 2) if pp > 1 else (0, 1, 2, 3)) if dp * cp > 1 else 1,
            schedule=schedule,
            virtual_stages=chunks,
            recompute=recompute,
            recompute_layers=chance.choice((None, 1)) if recompute != "none" else None,
            sequence_parallel=tp > 1 and chance.random() < 0.5,
        )
        layers = pp * chunks * chance.choice((4, 5)) + chance.choice((0, 1))
        changes = {"dtype": chance.choice(("bfloat16", "float32"))}
        named = {**model, LAYERS[model["model_type"]]: layers}
        micros = 2 * pp if schedule == "interleaved" else pp + 1
        run = run_of(named, layout, global_batch_size=dp * micros, **changes)
        try:
            layout.check(run.tree, LENGTH, run.train.global_batch_size, 1)
            layout.make_schedule(run.train.global_batch_size, 1)
        except ValueError:
            continue
        return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pieces")


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[pytest.mark.full] * (n > 2)) for n in range(20)]
)
def test_the_sum_of_pieces_is_the_whole_step(seed, folder):
    """At rest, every row with what is held after it and while it runs, and the peak by kind."""
    run = drawn(seed)
    rank = random.Random(seed).randrange(run.layout.world)
    assert composed(run, rank, folder=folder, hardware=H100) == dryrun(run, rank, hardware=H100)


def small(layers: int = 4) -> RunConfig:
    return run_of({**LLAMA, "num_hidden_layers": layers}, Layout(dp=1), global_batch_size=1)


def test_pieces_serve_other_depths_and_are_kept(tmp_path, monkeypatch):
    """A deeper model runs nothing anew; another length does."""
    ran = []
    real = subject.traced
    monkeypatch.setattr(subject, "traced", lambda *a, **k: ran.append(a) or real(*a, **k))
    four = composed(small(4), 0, folder=tmp_path)
    assert len(ran) == 2 == len(list(tmp_path.iterdir()))
    assert composed(small(4), 0, folder=tmp_path) == four
    six = composed(small(6), 0, folder=tmp_path)
    assert len(ran) == 2 and six == dryrun(small(6), 0, hardware=H100)
    shorter = small(4)
    shorter = replace(shorter, train=replace(shorter.train, sequence_length=LENGTH // 2))
    assert composed(shorter, 0, folder=tmp_path).flops < four.flops
    assert len(ran) == 4


@pytest.mark.parametrize("damage", ("cut", "empty", "another"))
def test_a_piece_that_is_not_one_is_made_anew(damage, tmp_path):
    whole = composed(small(3), 0, folder=tmp_path)
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    parts = json.loads(text)
    parts["parts"] = {"optimizer": parts["parts"]["optimizer"]}
    file.write_text({"cut": text[:-100], "empty": "", "another": json.dumps(parts)}[damage])
    assert composed(small(3), 0, folder=tmp_path) == whole
    assert file.read_text() == text


def test_a_step_that_would_crash_is_told_as_the_whole_one_tells_it(tmp_path, monkeypatch):
    """By the numbers of the real model's layers, and of the real rank."""

    def crash(*given, **options):
        raise ValueError("the step of rank 0 would crash")

    monkeypatch.setattr(subject, "traced", crash)
    assert composed(small(2), 0, folder=tmp_path) == dryrun(small(2), 0, hardware=H100)
