"""`dolmen train grpo`: a reward grows, the layout of training and of drawing never changes what is
drawn, and a run that stopped in the middle of a phase goes on as it would have.
"""

import json
import shutil

import pytest
import tinyrun
from tinyrun import dolmen

from dolmen.rollouts.weights import Drawing

material, one_thread = tinyrun.material, tinyrun.one_thread
PROMPTS = [{"prompt": f"ab {word} ", "answer": "7"} for word in "abcdefgh"]


@pytest.fixture(scope="module")
def prompts(material, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts")
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)))
    shutil.copytree(material.model, folder / "model")
    return folder


def options(prompts, out, *more) -> list:
    return [
        *("train", "grpo", "--init", prompts / "model", "--out", out, "--train.device", "cpu"),
        *("--data.path", prompts / "prompts.jsonl", "--reward", "stub"),
        *("--train.sequence-length", 32, "--train.global-batch-size", 16, "--train.steps", 12),
        *("--rollout.samples", 8, "--rollout.max-new-tokens", 8, "--optimizer.lr", 2e-2, *more),
    ]


def rows(out) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_reward_grows_and_trainer_and_generator_agree(prompts, tmp_path):
    ended = dolmen(*options(prompts, tmp_path / "run", "--train.steps", 25))
    assert ended.code == 0 and "reward 0." in ended.out
    found = rows(tmp_path / "run")
    first, last = (
        sum(row["rollout/reward"] for row in some) / 3 for some in (found[:3], found[-3:])
    )
    assert last > 2 * first, (first, last)
    assert max(row["rollout/logprob_difference"] for row in found) < 1e-6
    assert max(row["rollout/logprob_difference_of_allowed"] for row in found) < 1


@pytest.mark.slow
def test_weights_that_are_stale_are_seen(prompts, tmp_path, monkeypatch):
    """In the log-probabilities: the model that draws is the one that the run began with."""
    refresh = Drawing.refresh

    def once(self, trained):
        if not vars(self).setdefault("filled", False):
            self.filled = True
            return refresh(self, trained)
        return self.model

    monkeypatch.setattr(Drawing, "refresh", once)
    assert dolmen(*options(prompts, tmp_path / "run", "--train.steps", 4)).code == 0
    assert rows(tmp_path / "run")[-1]["rollout/logprob_difference_of_allowed"] > 10


PHASES = ("--rollout.prompts", 4, "--rollout.epochs", 2, "--checkpoint.every", 3)


@pytest.mark.slow
def test_a_run_that_stopped_within_a_phase_goes_on_bitwise(prompts, tmp_path):
    """Phases of four updates, and the end of a first part after six: with the rewards that its file
    has, which are not asked for again.
    """
    want, got = tmp_path / "whole", tmp_path / "parts"
    more = (*PHASES, "--optimizer.schedule", "constant")
    assert dolmen(*options(prompts, want, *more, "--train.steps", 9)).code == 0
    assert dolmen(*options(prompts, got, *more, "--train.steps", 6)).code == 0
    again = options(prompts, got, *more, "--train.steps", 9, "--reward", "regex:a", "--resume")
    assert dolmen(*again).code == 0
    for a, b in zip(rows(want), rows(got), strict=True):
        if a["step"] <= 8:  # those of the phase that had begun
            assert a["loss"] == b["loss"] and a["grad_norm"] == b["grad_norm"], a["step"]


@pytest.mark.spawn
@pytest.mark.slow
def test_a_reward_that_fails_is_refused_ends_the_run_or_is_counted(prompts, tmp_path, monkeypatch):
    """A function that is not there before anything is written; one that raises with a sentence."""
    (tmp_path / "mine.py").write_text(
        "def f(prompt, answer, row):\n"
        "    if len(answer) % 2: raise RuntimeError('odd')\n"
        "    return 1.0\n"
    )
    monkeypatch.chdir(tmp_path)
    absent = dolmen(*options(prompts, tmp_path / "no", "--reward", "mine:g"))
    assert absent.code == 2 and "mine has no function g" in absent.words
    assert not (tmp_path / "no").exists()
    few = ("--train.steps", 2, "--reward", "mine:f")
    ended = dolmen(*options(prompts, tmp_path / "ended", *few))
    assert ended.code == 2 and "RuntimeError: odd (--rollout.on-failure" in ended.words
    went_on = dolmen(*options(prompts, tmp_path / "on", *few, "--rollout.on-failure", "leave-out"))
    assert went_on.code == 0, went_on.words
    assert rows(tmp_path / "on")[0]["rollout/failed_rewards"] > 0
