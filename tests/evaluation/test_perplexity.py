"""Validation loss equals that of transformers, and no layout changes it."""

import math

import pytest
import torch
from references import MODELS, VOCABULARY, reference, save

from dolmen.conversion.source import load_weights, open_source
from dolmen.core import mesh as meshes
from dolmen.core.mesh import SINGLE
from dolmen.data.batch import IGNORED, Batch
from dolmen.evaluation.validate import mean_loss
from dolmen.model import build
from dolmen.model.layout import Layout
from dolmen.serving.engine import load_decoder

LAYOUTS = [dict(dp=2, zero=z) for z in range(4)] + [
    dict(tp=2),
    dict(tp=2, sequence_parallel=True, zero=3),
]


def windows() -> torch.Tensor:
    """[8, 25]; the second half of the rows has lost most of its labels, so a mean of ranks' means
    would be another.
    """
    out = torch.randint(VOCABULARY, (8, 25), generator=torch.Generator().manual_seed(0))
    out[4:, :20] = out[4:, :1]
    return out


def batches(rows: slice = slice(None)) -> list[Batch]:
    """Of two sequences each. The first 18 labels of the second half of the rows are IGNORED."""
    made = []
    for pair, number in zip(windows().split(2), range(4), strict=True):
        batch = Batch.of_windows(pair.numpy())
        if number >= 2:
            batch.labels[:, :18] = IGNORED
        made.append(batch)
    return made[rows]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {name: save(name, root / name) for name in MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_that_of_transformers(folders, name):
    labels = windows()
    labels[4:, :19] = IGNORED
    want = reference(name)(windows(), labels=labels).loss.item()
    got = mean_loss(load_decoder(open_source(folders[name])), batches(), SINGLE)
    assert got.loss == pytest.approx(want, rel=1e-6) and got.tokens == 4 * 24 + 4 * 6
    assert got.nats == pytest.approx(got.loss * got.tokens)
    assert got.bits_per_byte(7) == pytest.approx(got.nats / math.log(2) / 7)


def test_the_model_is_left_as_it_was(folders):
    model = load_decoder(open_source(folders["llama"])).train()
    mean_loss(model, batches(), SINGLE)
    assert (
        model.training
        and torch.is_grad_enabled()
        and all(p.grad is None for p in model.parameters())
    )


def test_no_text_is_refused(folders):
    with pytest.raises(ValueError, match="no token to evaluate"):
        mean_loss(load_decoder(open_source(folders["llama"])), [], SINGLE)


def two_ranks(folder):
    out = {}
    for layout in LAYOUTS:
        options = dict(layout)
        mesh = meshes.grid(options.pop("dp", 1), options.pop("tp", 1), torch.device("cpu"))
        config = open_source(folder)
        model = build.build(config.tree, mesh, Layout(**options) if options else None)
        build.load(model, lambda write, c=config: load_weights(c, write))
        before = list(map(id, model.parameters()))
        part = slice(2 * mesh.dp.rank, 2 * mesh.dp.rank + 2) if mesh.dp.size == 2 else slice(None)
        out[str(layout)] = (
            mean_loss(model, batches(part), mesh),
            mean_loss(model, batches(part), SINGLE),
        )
        assert before == list(map(id, model.parameters()))
    return out


def test_no_layout_changes_the_loss(folders, spawn):
    want = mean_loss(load_decoder(open_source(folders["qwen3"])), batches(), SINGLE)
    got = spawn(2)(two_ranks, folders["qwen3"])
    assert len(got) == len(LAYOUTS)
    for layout, (whole, own) in got.items():
        assert whole.tokens == want.tokens and whole.loss == pytest.approx(want.loss, rel=1e-6), (
            layout
        )
        if "dp" in layout:
            assert abs(own.loss - want.loss) > 1e-3 * want.loss  # negative control: one rank alone
