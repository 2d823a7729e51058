"""`dolmen generate --best`: of several answers to each row the best."""

import json
import math
from types import SimpleNamespace

import pytest
import tinyrun
import torch
from reward_models import classifier, theirs
from tinyrun import dolmen
from transformers import AutoTokenizer

from dolmen.files.gate import Refused
from dolmen.rl.best_of_n import BestOfN, choose

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


def chosen(folder, lines: list[dict], *rewards: str) -> tuple[BestOfN, list[dict]]:
    """The counts, and the rows that are written."""
    (folder / "all.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = SimpleNamespace(reward=rewards, best=str(folder / "best.jsonl"))
    found = choose(SimpleNamespace(config=config, output=folder / "all.jsonl"), {})  # pyright: ignore
    return found, read(folder / "best.jsonl")


def test_counts_are_of_rows_and_of_samples(tmp_path):
    """Of equal rewards the first; a row without any reward, and a sample that one reward fails."""

    def row(texts: str, **more) -> dict:
        samples = [{"text": t, "tokens": [i], "finish_reason": "stop"} for i, t in enumerate(texts)]
        return {"prompt": "?", **more, "samples": samples}

    lines = [row("abe", id=7), row("bcd"), row("xa", answer="a")]
    found, best = chosen(tmp_path, lines, "stub")
    assert found == (3, 0, 0, pytest.approx(2 / 3), pytest.approx(3 / 8))
    assert [(one["text"], one["tokens"], one["reward"]) for one in best] == [
        ("a", [0], 1.0),
        ("b", [0], 0.0),
        ("a", [1], 1.0),
    ]
    assert best[0]["id"] == 7 and "samples" not in best[0]
    found, best = chosen(tmp_path, lines, "2:stub", "exact")
    assert found == (1, 2, 6, 3.0, 1.5) and [one["answer"] for one in best] == ["a"]
    found, best = chosen(tmp_path, lines[:1], "exact")
    assert found[:3] == (0, 1, 3) and math.isnan(found.reward + found.of_all) and not best


@pytest.mark.parametrize("samples", [None, "text", [1]])
def test_rows_without_samples_are_refused(tmp_path, samples):
    with pytest.raises(Refused, match="all.jsonl, line 1: it has no `samples`"):
        chosen(tmp_path, [{"prompt": "?", "samples": samples}], "stub")
    assert not (tmp_path / "best.jsonl").exists()
