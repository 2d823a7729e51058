"""Rows of new tokens learn first and alone, then all: to the bit, resumed too, and told of each
source.
"""

import json
import math
import shutil
from copy import deepcopy
from dataclasses import replace

import pytest
import tinyrun
import torch
from loading import prepare_loader
from rich.console import Console
from table import FAMILIES, OPTIMIZER, SINGLE, VOCABULARY, Layout, batches, start, updates
from tinyrun import dolmen, losses, rows, same, tensors

from dolmen.recipes import RECIPES
from dolmen.training.checks.warn import warnings
from dolmen.training.config import NewRowsConfig
from dolmen.training.evaluate import bits_per_byte
from dolmen.training.resolve import resolve
from dolmen.training.run import run_training
from dolmen.training.state import NewRows
from dolmen.vocabulary import extend

material, one_thread = tinyrun.material, tinyrun.one_thread
FIRST, UNTIL = 50, 2
DECAYING = replace(OPTIMIZER, weight_decay=0.1)


@pytest.mark.parametrize("family", ["llama", "gpt2"])  # a head of its own, and a tied one
def test_what_was_trained_stays_to_the_bit_until_all_learn(family):
    train = start(
        FAMILIES[family], SINGLE, Layout(), optimizer=DECAYING, new_rows=NewRows(FIRST, UNTIL)
    )
    tables = {n for n, param in train.model.spec.params.items() if param.shape[0] == VOCABULARY}
    assert tables == ({"embed.weight", "head.weight"} if family == "llama" else {"embed.weight"})
    before = {n: p.detach().clone() for n, p in train.model.named_parameters()}
    given = batches(SINGLE)
    reported = updates(train, SINGLE, given[:UNTIL])
    for name, p in train.model.named_parameters():
        old = p[:FIRST] if name in tables else p
        assert torch.equal(old, before[name][:FIRST] if name in tables else before[name]), name
        if name in tables:
            assert (p[FIRST:] != before[name][FIRST:]).any(), name
    for step, norm in zip(reported.gradients, reported.norms, strict=True):
        squares = sum(float(g.double().square().sum()) for g in step.values())
        assert step.keys() == tables and norm == pytest.approx(squares**0.5, rel=1e-6)
    # then an optimizer that begins, at the rate of that step
    fresh = start(FAMILIES[family], SINGLE, Layout(), optimizer=DECAYING)
    fresh.model.load_state_dict(deepcopy(train.model.state_dict()))
    fresh.step = train.step
    for one in (train, fresh):
        updates(one, SINGLE, given[UNTIL:])
    mine, theirs = (dict(one.model.named_parameters()) for one in (train, fresh))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert train.inherited == -UNTIL and (mine["embed.weight"] != before["embed.weight"]).all()


@pytest.mark.parametrize("step", [2, 4])
def test_a_run_that_goes_on_is_the_run_that_never_stopped(material, tmp_path, step):
    """From before all learn, and from after."""
    run = material.config(
        train={"new_rows": {"share": 0.5, "first": 200}}, checkpoint={"every": 2, "keep": 9}
    )
    quiet = Console(quiet=True)
    run_training(run, tmp_path / "whole", SINGLE, quiet)
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    for later in range(step + 2, 8, 2):
        shutil.rmtree(tmp_path / "half" / "checkpoints" / f"step-{later:08d}")
    run_training(run, tmp_path / "half", SINGLE, quiet, resumed=True)
    assert losses(tmp_path / "whole") == losses(tmp_path / "half")
    assert same(tensors(tmp_path / "whole", 6), tensors(tmp_path / "half", 6))
    early = tensors(tmp_path / "whole", 2)
    embedding = early["exp_avg/embed.weight"]
    assert not embedding[:200].any() and embedding[200:].any()


def test_the_recipe_tells_the_loss_of_each_language(material, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(material.model, model)
    extend.write_record(model, 200, 300, "mean")
    old, new = tmp_path / "old", tmp_path / "new"
    for number, folder in enumerate((old, new)):
        folder.mkdir()
        for file in sorted(material.docs.iterdir())[15 * number : 15 * number + 15]:
            shutil.copy(file, folder)
    words = ["--data.path", f"0.8:{new}", f"0.2:{old}", "--data.cache", tmp_path / "cache"]
    words += ["--data.validation-fraction", 0.2, "--train.steps", 4, "--train.sequence-length", 16]
    words += ["--train.global-batch-size", 4, "--log.validate-every", 2, "--train.device", "cpu"]
    words += ["--train.new-rows.share", 0.5]
    out = tmp_path / "out"
    shown = dolmen("train", "continue-language", "--init", model, *words, "--out", out)
    assert shown.code == 0, shown.err
    words_of = " ".join(shown.out.split())
    assert "only embedding rows from token id 200 on are trained until step 2" in words_of
    assert "mix in some old text" not in words_of
    reported = rows(out, "val_loss")
    assert [row["step"] for row in reported] == [0, 2, 4]
    separate = [name for name in reported[0] if name.startswith("val_loss/")]
    assert separate == [f"val_loss/{new}", f"val_loss/{old}"]
    # all of it is the two of them
    summary = json.loads((out / "summary.json").read_text())
    assert summary["val_sources"] == {n.removeprefix("val_loss/"): reported[2][n] for n in separate}
    per_byte = [
        {str(one): row[f"val_bits_per_byte/{one}"] for one in (new, old)} for row in reported
    ]
    assert summary["val_sources_per_byte"] == per_byte[2] != per_byte[0]
    assert summary["val_sources_before"] == per_byte[0]
    for one in (new, old):
        was, now = per_byte[0][str(one)], per_byte[2][str(one)]
        assert f"{now:.4f} bits per byte (before the first step {was:.4f})" in words_of
    for row in reported:
        each = sorted(row[name] for name in separate)
        assert each[0] <= row["val_loss"] <= each[1]
    assert f"on {new}" in words_of and f"on {old}" in words_of
    words[1:3] = [str(new)]
    alone = dolmen("train", "continue-language", "--init", model, *words, "--out", tmp_path / "b")
    assert alone.code == 0 and "mix in some old text" in " ".join(alone.out.split())


def test_what_cannot_wait_for_new_rows_is_refused(material, tmp_path):
    def refused(**sections):
        train = {"new_rows": {"share": 0.5, "first": 200}} | sections.pop("train", {})
        run = material.config(**{"init": str(material.model), "train": train} | sections)
        with pytest.raises(ValueError) as error:
            tinyrun.check_run(run, 1)
        return str(error.value)

    assert "needs an initial model, without which every row is new" in refused(init=None)
    assert "needs AdamW without initial state" in refused(optimizer={"name": "muon"})
    assert "exceeds the model's 300 rows" in refused(
        train={"new_rows": {"share": 0.5, "first": 300}}
    )
    unsaid = {"new_rows": {"share": 0.5}}
    assert "give --train.new-rows.first ID" in refused(train=unsaid)
    model = tmp_path / "model"
    shutil.copytree(material.model, model)
    extend.write_record(model, 250, 300, "mean")
    run = material.config(init=str(model), train=unsaid)
    assert tinyrun.check_run(run, 1).train.new_rows == NewRowsConfig(0.5, 250)
    for share in (-0.1, 1):
        with pytest.raises(ValueError, match="it must be (at least 0|less than 1)"):
            NewRowsConfig(share)
    assert RECIPES["continue-language"]().train.new_rows.share == 0.1


def test_sources_are_held_out_by_name(material, tmp_path):
    data = material.config().data
    paths = tuple(f"{weight}:{material.docs}/{part}*.txt" for weight, part in ((3, 0), (1, 1)))
    config = replace(data, path=paths, validation_fraction=0.2)
    loader = prepare_loader(config, None, None, 16, 4, 0, progress=False)
    separate = loader.validation_by_source
    assert [*separate] == [path.partition(":")[2] for path in paths]
    assert sum(held.tokens for held in separate.values()) == loader.validation_tokens
    found = bits_per_byte({name: 2.0 for name in separate}, separate)
    for held in loader.held_out:  # by the files themselves, each with the end of its text
        texts = [file.read_text() for file in held.files]
        tokens = sum(len(loader.tokenizer(text)["input_ids"]) + 1 for text in texts)
        size = sum(len(text.encode()) for text in texts)
        assert found[held.name] == pytest.approx(2 / math.log(2) * tokens / size, rel=1e-12)


def test_sources_that_are_not_told_apart_are_warned_of(material, tmp_path):
    """Where --data.validation is one text for all of them, or fewer than two have held-out text."""
    paths = tuple(f"{weight}:{material.docs}/{part}*.txt" for weight, part in ((3, 0), (1, 1)))
    run = material.config(log={"validate_sources": True})
    one, few = "is not per source: leave it out", "fewer than two sources have validation text: set"
    for more, reported in (
        ({"validation": f"{material.docs}/29.txt"}, one),
        ({"validation_fraction": 0.0}, few),
        ({}, None),
    ):
        data = replace(run.data, path=paths, **more)
        loader = prepare_loader(data, None, None, 16, 4, 0, progress=False)
        found = " ".join(warnings(resolve(replace(run, data=data), 1), loader, 0, 6))
        assert [words for words in (one, few) if words in found] == ([reported] if reported else [])
