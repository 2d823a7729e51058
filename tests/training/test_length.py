"""How long a run and its warm-up are, in steps, tokens or epochs: one and the same."""

import re
from dataclasses import replace

import pytest
import tinyrun
from tinyrun import dolmen

from dolmen.cli.runs import parse_run
from dolmen.optim.config import OptimizerConfig, learning_rate
from dolmen.recipes.overrides import build_request
from dolmen.training.checks.run import check_agreement
from dolmen.training.config import RunConfig, TrainConfig
from dolmen.training.metrics import read_metrics
from dolmen.training.resolve import epoch_steps, fill_in_length

material, one_thread = tinyrun.material, tinyrun.one_thread
EACH = 64  # tokens of a step of the tiny run: 4 sequences of 16


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    """Recipes without --out mean runs/NAME, which `make quickstart` leaves in the checkout."""
    monkeypatch.chdir(tmp_path)


def rates(folder) -> dict[int, tuple[float, float]]:
    """Step -> tokens, learning rate."""
    rows = read_metrics(folder / "metrics.jsonl")
    return {row["step"]: (row["tokens"], row["lr"]) for row in rows if "lr" in row}


def test_tokens_are_steps_and_a_resume_keeps_them(material, tmp_path):
    """The same learning rates; and of another batch as many tokens, of the warm-up too."""
    words = ("train", material.file, "--log.validate-every", 0)
    steps = dolmen(*words, "--out", tmp_path / "steps", "--train.steps", 6)
    # six steps, the last one whole; of the file's own steps and warm-up nothing is left
    arguments = ("--train.tokens", 5 * EACH + 1, "--optimizer.warmup-tokens", 2 * EACH)
    tokens = dolmen(*words, "--out", tmp_path / "tokens", *arguments)
    assert steps.code == tokens.code == 0, steps.err + tokens.err
    assert rates(tmp_path / "steps") == rates(tmp_path / "tokens")
    for said in ("steps 0 to 6, 384 tokens, ", "(cosine, 2 (128 tokens) warm-up)"):
        assert said in " ".join(tokens.out.split())
    more = ("--train.tokens", 10 * EACH, "--optimizer.warmup-tokens", 10 * EACH)
    larger = ("--train.global-batch-size", 8)
    on = dolmen(*words, "--out", tmp_path / "tokens", "--resume", *more, *larger)
    assert on.code == 0 and "steps 6 to 8, 256 tokens, " in " ".join(on.out.split()), on.err
    found = rates(tmp_path / "tokens")
    assert [found[step][0] for step in (6, 7, 8)] == [6 * EACH, 8 * EACH, 10 * EACH]
    # 1e-2 of the way that has been gone when the step is made
    assert [found[step][1] for step in (7, 8)] == pytest.approx([0.8e-2, 1e-2])
    less = dolmen(*words, "--out", tmp_path / "tokens", "--resume", "--train.tokens", 5 * EACH)
    assert less.code == 2 and "has read 640 tokens, but --train.tokens is 320" in less.err


def test_epochs_are_passes_over_the_data(material, tmp_path):
    """And the header says all three."""
    words = ("train", material.file, "--log.validate-every", 0, "--train.sequence-length", 64)
    run = dolmen(*words, "--out", tmp_path / "run", "--train.epochs", 0.1)
    assert run.code == 0, run.err
    steps, (tokens, _) = max(rates(tmp_path / "run").items())
    (said,) = re.findall(
        r"steps 0 to (\d+), (\S+) k tokens, (\S+) epochs", " ".join(run.out.split())
    )
    assert int(said[0]) == steps and float(said[1]) == pytest.approx(tokens / 1000, rel=0.05)
    assert float(said[2]) == pytest.approx(0.1, abs=0.5 / steps * 0.1)


class Data:
    """Of 8 samples a step, of two sources with 100 and 400 samples."""

    global_batch_size, sample_offset = 8, 0
    mixture = property(lambda self: self)

    def first(self, step):
        return step * self.global_batch_size + self.sample_offset

    def epochs(self, samples):
        return {"short": samples / 2 / 100, "long": samples / 2 / 400}


def test_an_epoch_is_that_of_the_source_that_lasts_longest():
    data = Data()
    assert epoch_steps(data) == 100 and epoch_steps(data, 2.5) == 250
    data.sample_offset = 80  # ten steps' worth, of a larger batch
    assert epoch_steps(data) == 90


REFUSED = {
    "train.steps is 5, but train.tokens (400) are 7: a step has 64 tokens (4 sequences of 16)": {
        "steps": 5,
        "tokens": 400.0,
    },
    "train.epochs (2) and train.steps (5) both set the length of the run: leave one out": {
        "steps": 5,
        "epochs": 2.0,
    },
    "train.epochs (2) and train.tokens (400) both set": {
        "steps": None,
        "tokens": 400.0,
        "epochs": 2.0,
    },
}


def test_a_length_that_nobody_requested_is_an_epoch():
    """Of config.yaml, so that a resume with other data or another batch reads them once; of data
    that are read in under 20 steps it is 20 steps. A requested length stays.
    """

    class Loader:
        global_batch_size = 2

        def __init__(self, samples):
            self.mixture, self.samples = self, samples

        def first(self, step):
            return 2 * step

        def epochs(self, samples):
            return {"a": samples / self.samples}

    config = RunConfig(train=TrainConfig(steps=None))
    assert fill_in_length(config, Loader(100)).train == replace(config.train, epochs=1.0)
    assert fill_in_length(config, Loader(10)).train == replace(config.train, steps=20)
    requested = replace(config, train=replace(config.train, tokens=500))
    assert fill_in_length(requested, Loader(100)) == requested


@pytest.mark.parametrize("said", REFUSED)
def test_what_says_two_lengths_is_refused(material, said):
    run = material.config(train=REFUSED[said])
    with pytest.raises(ValueError) as raised:
        check_agreement(run)
    assert said in str(raised.value)


def test_what_says_two_warm_ups_is_refused(material):
    run = material.config(optimizer={"warmup_steps": 2, "warmup_tokens": 192.0})
    with pytest.raises(ValueError, match=r"warmup-steps is 2, but .*warmup-tokens \(192\) are 3: "):
        check_agreement(run)
    check_agreement(replace(run, optimizer=replace(run.optimizer, warmup_tokens=128.0)))
    check_agreement(material.config(train={"steps": 6, "tokens": 6.0 * EACH - 1}))


@pytest.mark.parametrize("value", (0.0, -1.0, float("inf"), float("nan")))
@pytest.mark.parametrize("name", ("tokens", "epochs"))
def test_a_length_is_over_0(material, name, value):
    with pytest.raises(ValueError, match=f"train.{name} is .*: it must be"):
        material.config(train={name: value})


def test_what_is_said_replaces_what_a_recipe_says(material):
    """In words and from Python; what is said twice is said."""
    words = ["--train.tokens", "1e6", "--optimizer.warmup_tokens=1e4"]
    there = parse_run("train", ["quickstart", *words]).config
    here = build_request(
        "quickstart", {"train": {"tokens": 1e6}, "optimizer": {"warmup_tokens": 1e4}}
    ).config
    assert there == here and there.train.steps is None and there.optimizer.warmup_steps == 0
    both = parse_run("train", ["quickstart", "--train.steps", "3", "--train.tokens", "5"]).config
    assert (both.train.steps, both.train.tokens) == (3, 5)


def test_a_warm_up_between_two_steps_never_exceeds_the_peak():
    config = OptimizerConfig(lr=2.0, schedule="constant")
    found = [learning_rate(config, step, 9, 2.5) for step in range(4)]
    assert found == pytest.approx([0.8, 1.6, 2.0, 2.0])
