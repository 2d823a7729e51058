"""`dolmen generate --best`: of several answers to each row the best."""

import json

import pytest
import tinyrun
import torch
from reward_models import classifier, theirs
from tinyrun import dolmen
from transformers import AutoTokenizer

material, one_thread = tinyrun.material, tinyrun.one_thread
ROWS = [{"prompt": "ab cd", "answer": "7"}, {"prompt": "ef", "id": 9}, {"prompt": "hij a"}]


@pytest.fixture
def command(material, tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return [
        *("generate", material.model, "--input", tmp_path / "in.jsonl", "--dtype", "float32"),
        *("--output", tmp_path / "all.jsonl", "--temperature", 1.0, "--max-new-tokens", 6),
        *("--best", tmp_path / "best.jsonl", "--num-samples", 4),
    ]


def read(file) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def vowels(text: str) -> float:
    return sum(char in "aeiouAEIOU" for char in text) / max(1, len(text))


@pytest.mark.slow
def test_the_best_of_each_row_is_written(command, tmp_path, material):
    """By a rule, and a reward model of transformers besides, whose scores are its own."""
    model = classifier(tmp_path / "rm")
    result = dolmen(*command, "--reward", "stub", f"0.5:{tmp_path / 'rm'}")
    assert result.code == 0, result.err
    tokenizer = AutoTokenizer.from_pretrained(material.model)
    every, best = read(tmp_path / "all.jsonl"), read(tmp_path / "best.jsonl")
    for row, whole, one in zip(ROWS, every, best, strict=True):
        prompt = tokenizer(row["prompt"]).input_ids
        scores = theirs(model, [prompt + sample["tokens"] for sample in whole["samples"]])
        text = torch.tensor([vowels(sample["text"]) for sample in whole["samples"]])
        rewards = text + 0.5 * scores
        chosen = whole["samples"][int(rewards.argmax())]
        assert one == {**row, **chosen, "reward": pytest.approx(float(rewards.max()), rel=1e-4)}
        assert rewards.std() > 1e-3
    mean = sum(one["reward"] for one in best) / 3
    assert f"has the best completion of 3 rows: mean reward {mean:.4g}" in result.out


@pytest.mark.slow
def test_rows_without_a_reward_are_left_out_and_told(command, tmp_path):
    """Only one row has what the reward compares with; and what was answered is not drawn again."""
    result = dolmen(*command, "--reward", "exact")
    assert result.code == 0, result.err
    assert [row["prompt"] for row in read(tmp_path / "best.jsonl")] == ["ab cd"]
    assert "8 samples without a reward; 2 rows without any reward skipped" in result.words
    again = dolmen(*command, "--reward", "exact", "--resume")
    assert again.code == 2 and "best.jsonl exists: give another name" in again.words
    (tmp_path / "best.jsonl").unlink()
    assert dolmen(*command, "--reward", "stub", "--resume").code == 0
    assert len(read(tmp_path / "best.jsonl")) == 3


@pytest.mark.parametrize(
    "more, message",
    [
        ((), "--best and --reward need each other"),
        (("--reward", "exakt"), "reward is exakt"),
        (("--reward", "stub", "--num-samples", 1), "use --num-samples 2 or more"),
    ],
)
def test_what_is_refused(command, tmp_path, more, message):
    found = dolmen(*command, *more)
    assert found.code == 2 and message in found.words, found.words
    assert not (tmp_path / "all.jsonl").exists()
