"""Validation loss equals that of transformers, and no layout changes it."""

import math

import numpy as np
import pytest
import torch
from references import MODELS, VOCABULARY, reference, save

from dolmen.conversion.source import load_weights, open_source
from dolmen.core import mesh as meshes
from dolmen.core.mesh import SINGLE
from dolmen.data.batch import IGNORED, Batch
from dolmen.evaluation import perplexity
from dolmen.evaluation.perplexity import ScoringRows, score_rows
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
        batch = Batch.from_windows(pair.numpy())
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
    with pytest.raises(ValueError, match="no token with a label"):
        mean_loss(load_decoder(open_source(folders["llama"])), [], SINGLE)


def two_ranks(folder):
    out = {}
    for layout in LAYOUTS:
        options = dict(layout)
        mesh = meshes.build_mesh(options.pop("dp", 1), options.pop("tp", 1), torch.device("cpu"))
        config = open_source(folder)
        model = build.build(config.spec, mesh, Layout(**options) if options else None)
        build.load(model, lambda write, c=config: load_weights(c, write))
        before = list(map(id, model.parameters()))
        part = slice(2 * mesh.dp.rank, 2 * mesh.dp.rank + 2) if mesh.dp.size == 2 else slice(None)
        out[str(layout)] = (
            mean_loss(model, batches(part), mesh),
            mean_loss(model, batches(part), SINGLE),
        )
        assert before == list(map(id, model.parameters()))
    return out, {str(layout): of_rows(folder, **layout) for layout in OF_ROWS}


# trained ones, which ZeRO shards, and those of `dolmen evaluate`
OF_ROWS = [
    dict(dp=2, zero=3),
    dict(tp=2, sequence_parallel=True, zero=3),
    *[{axis: 2} for axis in ("tp", "cp", "pp", "dp")],
]


def of_rows(folder, **options):
    layout, source = Layout(**options), open_source(folder)
    mesh = layout.mesh(torch.device("cpu"))
    schedule = layout.make_schedule(4, 1) if layout.pp > 1 else None
    if "zero" in options:
        model = build.build(source.spec, mesh, layout, schedule)
        build.load(model, lambda write: load_weights(source, write))
    else:
        model = load_decoder(source, mesh, schedule=schedule)
    return score_rows(model, ragged(), mesh, schedule)


def ragged() -> ScoringRows:
    """Rows of 25, 25, 25, 24, 2, 17, 9 and 10 tokens, with other numbers of them counted."""
    lengths = np.array([25, 25, 25, 24, 2, 17, 9, 10])
    texts = windows().numpy()
    firsts = np.array([1, 24, 3, 1, 1, 16, 2, 1])
    return ScoringRows(lengths, firsts, lambda row: texts[row, : lengths[row]])


def rows_of_transformers(name: str) -> tuple[list[float], list[int]]:
    """The sums of each row, by itself, in float64."""
    model, rows = reference(name).double(), ragged()
    if "moe" in name or name in ("mixtral", "deepseek-v3"):
        model.set_experts_implementation("eager")  # the other has no float64
    sums, likeliest = [], []
    for i, first in enumerate(rows.firsts):
        text = torch.from_numpy(rows.read(i))
        with torch.no_grad():
            reported = model(text[None]).logits[0, :-1].log_softmax(-1)[first - 1 :]
        sums.append(reported.gather(1, text[first:, None]).sum().item())
        likeliest.append(int((reported.argmax(-1) == text[first:]).sum()))
    return sums, likeliest


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_foretold_as_transformers_does(folders, name, monkeypatch):
    """Whatever they are batched with. float32 against float64."""
    sums, likeliest = rows_of_transformers(name)
    monkeypatch.setattr(perplexity, "TOKENS_AT_ONCE", 60)
    found = score_rows(load_decoder(open_source(folders[name])), ragged(), SINGLE)
    assert found.log_likelihoods == pytest.approx(sums, rel=1e-6)
    assert found.correct.tolist() == likeliest


def test_rows_fit_a_table_of_positions(folders, monkeypatch):
    """Of 48 positions, which 5 ranks would not divide: a row of 46 is filled up to 50."""
    model = load_decoder(open_source(folders["gpt2"]))
    text = torch.randint(VOCABULARY, (47,), generator=torch.Generator().manual_seed(1)).numpy()
    row = ScoringRows(np.array([47]), np.array([1]), lambda row: text)
    want = score_rows(model, row, SINGLE)
    groups = perplexity._groups
    filled = lambda *all: (group._replace(padded=50) for group in groups(*all))  # noqa: E731
    monkeypatch.setattr(perplexity, "_groups", filled)
    found = score_rows(model, row, SINGLE)
    assert found.log_likelihoods == pytest.approx(want.log_likelihoods, rel=1e-6)


def test_no_layout_changes_the_loss(folders, spawn):
    model = load_decoder(open_source(folders["qwen3"]))
    want, separate = mean_loss(model, batches(), SINGLE), score_rows(model, ragged(), SINGLE)
    got, metrics = spawn(2)(two_ranks, folders["qwen3"])
    assert len(got) == len(LAYOUTS) and len(metrics) == len(OF_ROWS)
    for layout, found in metrics.items():
        assert found.log_likelihoods == pytest.approx(separate.log_likelihoods, rel=1e-6), layout
        assert (found.correct == separate.correct).all(), layout
    for layout, (whole, own) in got.items():
        assert whole.tokens == want.tokens and whole.loss == pytest.approx(want.loss, rel=1e-6), (
            layout
        )
        if "dp" in layout:
            assert abs(own.loss - want.loss) > 1e-3 * want.loss  # negative control: one rank alone
