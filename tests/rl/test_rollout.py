"""Answers as rows, and as the file that a run goes on from."""

import json
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from table import FAMILIES

from dolmen.files.gate import Refused
from dolmen.ops.loss import IGNORED
from dolmen.rl import rollout
from dolmen.rl.iteration import RolloutBatches
from dolmen.rl.rollout import Rollout, make_rollout
from dolmen.watching.run import WatchedRun

PROMPTS, ANSWERS = [[1, 2, 3], [4]], [[5, 6], [7, 8, 9]]
LOGPROBS = [[-0.5, -0.6], [-0.7, -0.8, -0.9]]


def two(**changes) -> Rollout:
    return replace(make_rollout(PROMPTS, ANSWERS, LOGPROBS, 16, 4), **changes)


def test_rows_are_prompts_with_their_answers():
    made = two()
    assert made.tokens.tolist() == [[1, 2, 3, 5], [4, 7, 8, 0]]
    assert made.labels.tolist() == [[IGNORED, IGNORED, 5, 6], [7, 8, 9, IGNORED]]
    assert made.sampled_logprobs[0].tolist() == pytest.approx([0, 0, -0.5, -0.6])
    batch = made.batch(slice(1, 2))
    assert batch.documents is not None
    assert batch.documents.starts.tolist() == [[0, 0, 0, 3]]


def test_trainer_and_generator_are_compared():
    made = two()
    assert set(replace(made, old_logprobs=made.sampled_logprobs).logprob_difference().values()) == {
        0.0
    }
    off = replace(
        made, old_logprobs=made.sampled_logprobs - 2e-4 * (made.labels != IGNORED)
    ).logprob_difference()
    assert off["rollout/logprob_difference"] == pytest.approx(2e-4, rel=1e-3)
    assert off["rollout/logprob_difference_over_tolerance"] == pytest.approx(2, rel=1e-3)


def test_a_file_is_read_as_it_was_written(tmp_path):
    made = two(rewards=torch.tensor([1.0, float("nan")]))
    rollout.save(made, tmp_path, 40, [{"answer": "half \ud800"}])
    found = rollout.load(tmp_path, 40, 2)
    assert found is not None
    for one in fields(Rollout):
        a, b = getattr(made, one.name), getattr(found, one.name)
        assert a.dtype == b.dtype and torch.equal(a.nan_to_num(9), b.nan_to_num(9)), one.name
    assert rollout.load(tmp_path, 41, 2) is None


def test_experts_are_kept_where_there_are_any(tmp_path):
    experts = torch.arange(48).view(2, 4, 6).short()
    assert two().batch(slice(0, 2)).experts is None
    rollout.save(two(experts=experts), tmp_path, 0, [])
    found = rollout.load(tmp_path, 0, 2)
    assert found is not None and torch.equal(found.experts, experts)
    assert torch.equal(found.batch(torch.tensor([1])).experts, experts[1:].long())
    rollout.save(two(experts=-experts), tmp_path, 1, [])
    with pytest.raises(Refused, match="must be expert indices"):
        rollout.load(tmp_path, 1, 2)


@pytest.mark.parametrize("damage", ["short", "other", "unlike", "whole", "empty"])
def test_a_file_that_is_not_ours_is_refused(damage, tmp_path):
    rollout.save(two(), tmp_path, 0, [])
    file = rollout.rollout_file(tmp_path, 0)
    if damage == "short":
        file.write_bytes(file.read_bytes()[:-4])
    if damage == "other":
        file.write_bytes(file.read_bytes().replace(b"advantages", b"advantagez"))
    if damage == "unlike":
        save_file({**load_file(file), "old": torch.zeros(2, 3)}, file)
    if damage == "whole":
        save_file({**load_file(file), "advantages": torch.zeros(2, 4, dtype=torch.int64)}, file)
    if damage == "empty":
        cut = {n: one if one.ndim == 1 else one[:, :0] for n, one in load_file(file).items()}
        save_file(cut, file)
    with pytest.raises(Refused):
        rollout.load(tmp_path, 0, 2)


def test_a_phase_of_another_length_is_no_file_of_this_one(tmp_path):
    """It may begin at the same step."""
    rollout.save(two(), tmp_path, 0, [])
    assert rollout.load(tmp_path, 0, 3) is None and rollout.load(tmp_path, 0, 2) is not None


@pytest.mark.parametrize("experts", [0, 8])
def test_rows_with_experts_are_as_wide_in_every_layout(experts):
    """Routers count what fills them up, and learn from it."""

    def unit(cp: int, tp: int) -> int:
        mesh = SimpleNamespace(cp=SimpleNamespace(size=cp), tp=SimpleNamespace(size=tp))
        spec = SimpleNamespace(experts=experts)
        models = SimpleNamespace(policy=SimpleNamespace(spec=spec))
        batches = SimpleNamespace(mesh=mesh, models=models, _exact=False)
        return RolloutBatches._length_multiple(batches)

    found = [unit(1, 1), unit(2, 2), unit(8, 1), unit(8, 2), unit(3, 2)]
    assert found == ([16, 16, 16, 32, 48] if experts else [2, 8, 16, 32, 12])


@pytest.mark.parametrize("name, number", [("tokens", -1), ("labels", -5), ("labels", 10**6)])
def test_tokens_are_those_of_the_model(name, number):
    made, spec = two(), FAMILIES["llama"].spec
    rollout.check_ids(Path("/x"), made, spec)
    vars(made)[name][0, 1] = number
    with pytest.raises(Refused, match=f"/x: {name} are from .*, but vocab_size is"):
        rollout.check_ids(Path("/x"), made, spec)


@pytest.mark.parametrize(
    "shape, most, why",
    [
        ((2, 4, 6), 7, None),
        ((2, 4, 6), 8, "have index 8, but the model has 8 experts"),
        ((2, 4, 4), 7, "are 4 choices per token, but the model has 6"),
    ],
)
def test_experts_are_those_of_the_model(shape, most, why):
    """Of three layers, two of eight experts to each token."""
    experts = torch.zeros(shape, dtype=torch.int16)
    experts[-1, -1, -1] = most
    with nullcontext() if why is None else pytest.raises(Refused, match=f"/x: experts {why}"):
        rollout.check_experts(Path("/x"), experts, FAMILIES["qwen3-moe"].spec)


def test_files_of_before_are_taken_away_and_nothing_else(tmp_path):
    for step in (0, 8, 16):
        rollout.save(two(), tmp_path, step, [])
    (tmp_path / "rollouts" / "notes.jsonl").write_text("mine")
    rollout.delete_rollouts(tmp_path, range(9))
    left = sorted(file.name for file in (tmp_path / "rollouts").iterdir())
    assert left == ["00000016.jsonl", "00000016.safetensors", "notes.jsonl"]


def test_a_few_completions_of_each_iteration_are_kept(tmp_path):
    """Prompts that are chats are text in the log, and a reward that failed is left out."""
    row = {"prompt": "a", "completion": "b", "reward": 0.5, "tokens": 1, "finished": True}
    chat = {**row, "prompt": [{"role": "user", "content": "c"}], "reward": None}
    for step in (0, 4):
        rollout.save(two(), tmp_path, step, [row, chat])
        rollout.log_completions(tmp_path, step, [row, chat])
    rollout.log_completions(tmp_path, 8, [])
    rollout.delete_rollouts(tmp_path, range(9))
    file = tmp_path / "rollouts" / "completions.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert [each["step"] for each in found] == [0, 0, 4, 4] and found[2] == {"step": 4, **row}
    assert found[1]["prompt"] == json.dumps(chat["prompt"]) and "reward" not in found[1]
    (tmp_path / "config.yaml").write_text("name: a\n")
    run = WatchedRun(tmp_path, "a")
    run.read()
    assert not run.refused
    first, second = run.as_dict()["samples"]
    reported = "[reward 0.5, 1 token, finished]  a \u2192 b"
    assert first == {
        "prompt": "Completion 1 of each iteration",
        "texts": [[0, reported], [4, reported]],
    }
    assert second["texts"][0][1].startswith("[no reward, 1 token, finished]  [{")
