"""Rewards of several judges, reward models among them."""

import json
import math
from typing import Literal

import pytest
import tinyrun
import torch
from reward_models import classifier, theirs
from tinyrun import dolmen
from transformers import AutoTokenizer

from dolmen.conversion.source import open_source
from dolmen.core.mesh import SINGLE
from dolmen.model.layout import Layout
from dolmen.ops.loss import IGNORED
from dolmen.rl import rollout
from dolmen.rl.rewards import (
    CombinedReward,
    RewardError,
    RewardInput,
    RewardModel,
    WeightedReward,
    make_reward_function,
)
from dolmen.serving import engine

ONE = Layout().make_schedule(2, 1)


def test_scores_are_those_of_transformers(tmp_path):
    """Of texts of unlike lengths, more than are asked at once, in fp32."""
    model = classifier(tmp_path / "rm")
    ours = engine.load_decoder(open_source(str(tmp_path / "rm")), SINGLE, torch.float32)
    texts = [[5, 6, 7], [9], [8, 3, 2, 1, 250, 7, 7], [4, 4], [1, 2, 3]]
    found = RewardModel(ours, SINGLE, ONE, 2)(texts)
    want = theirs(model, texts)
    assert want.std() > 0.1
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


class Fixed(RewardModel):
    """Scores that are what they are."""

    def __call__(self, texts):
        return torch.tensor([float(text[-1]) for text in texts])


Failure = Literal["stop", "zero", "leave-out"]
ANSWERS = [RewardInput("?", "aab", {}, [1, 2]), RewardInput("?", "bbb", {}, [1, 9])]


def judging(*parts, on_failure: Failure = "stop"):
    fixed = Fixed(None, SINGLE, ONE, 2)  # pyright: ignore[reportArgumentType]
    made = [
        WeightedReward(n, w, fixed if n == "model" else make_reward_function(n, 1.0))
        for w, n in parts
    ]
    return CombinedReward(made, on_failure, SINGLE, lambda line: None)


def test_several_are_added_up_each_times_its_weight():
    found = judging((0.5, "model"), (3.0, "regex:^a"), (1.0, "stub"))(ANSWERS)
    assert found.rewards.tolist() == pytest.approx([0.5 * 2 + 3 + 2 / 3, 0.5 * 9])
    assert found.metrics == {
        "rollout/reward_1": 5.5,
        "rollout/reward_2": 0.5,
        "rollout/reward_3": pytest.approx(1 / 3),
        "rollout/failed_rewards": 0,
    }


@pytest.mark.parametrize("on_failure, want", [("zero", [2.0, 0.0]), ("leave-out", [2.0, math.nan])])
def test_a_score_that_is_no_number_has_failed(on_failure, want):
    answers = [ANSWERS[0], ANSWERS[1]._replace(tokens=[1, math.inf])]
    found = judging((1.0, "model"), on_failure=on_failure)(answers)
    assert found.rewards.tolist() == pytest.approx(want, nan_ok=True)
    assert found.metrics == {"rollout/failed_rewards": 1}
    with pytest.raises(RewardError, match="model gave inf .--rollout.on-failure"):
        judging((1.0, "model"))(answers)


material, one_thread = tinyrun.material, tinyrun.one_thread


@pytest.fixture
def command(material, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "ab "}\n{"prompt": "cd "}\n')
    return [
        *("train", "grpo", "--init", material.model, "--train.device", "cpu"),
        *("--data.path", tmp_path / "prompts.jsonl", "--out", tmp_path / "run"),
        *("--train.sequence-length", 32, "--train.global-batch-size", 8, "--train.steps", 1),
        *("--rollout.num-generations", 4, "--rollout.max-new-tokens", 6),
    ]


def test_a_reward_model_of_another_vocabulary_is_refused(command, tmp_path):
    for name, changes in (
        ("wide", {"vocab_size": 310}),
        ("short", {"max_position_embeddings": 32}),
    ):
        classifier(tmp_path / name, **changes)
    wide = dolmen(*command, "--reward", tmp_path / "wide")
    assert wide.code == 2 and "has a vocab_size of 310, but the model has 300" in wide.words
    short = dolmen(*command, "--reward", tmp_path / "short")
    assert short.code == 2 and "set --train.sequence-length 31 or less" in short.words
    predicts = dolmen(*command, "--reward", command[3])
    assert predicts.code == 2 and "has an LM head: give a model" in predicts.words
    assert not (tmp_path / "run").exists()


def test_other_ids_are_refused(command, tmp_path, material):
    folder = tmp_path / "rm"
    classifier(folder)
    tokenizer = AutoTokenizer.from_pretrained(material.model)
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer.json"
    said = json.loads(file.read_text())
    vocab = said["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(said))
    found = dolmen(*command, "--reward", folder)
    assert found.code == 2 and "2 of 300 tokens, as 'a', have other ids" in found.words, found.words


@pytest.mark.slow
def test_a_run_is_rewarded_by_what_transformers_says(command, tmp_path):
    model = classifier(tmp_path / "rm")
    found = dolmen(*command, "--reward", tmp_path / "rm", "0.5:stub")
    assert found.code == 0, found.err
    made = rollout.load(tmp_path / "run", 0, 8)
    assert made is not None
    lines = (tmp_path / "run" / "rollouts" / "00000000.jsonl").read_text().splitlines()
    for tokens, labels, reward, line in zip(
        made.tokens, made.labels, made.rewards, lines, strict=True
    ):
        real = labels != IGNORED
        text = [*tokens[: int(real.nonzero()[-1]) + 1].tolist(), int(labels[real][-1])]
        row = json.loads(line)
        vowels = sum(char in "aeiouAEIOU" for char in row["completion"]) / max(
            1, len(row["completion"])
        )
        want = float(theirs(model, [text])) + 0.5 * vowels
        assert row["reward"] == pytest.approx(want, rel=1e-4, abs=1e-4)
        assert float(reward) == row["reward"]
