"""--train.numerics exact --objective.name grpo: at every layout of training and of the generator
the same completions, losses and weights; log-probabilities of both are equal, and ratios are 1.
"""

import json

import pytest
import tinyrun
import torch
from tinyrun import dolmen, rows, tensors

material, one_thread = tinyrun.material, tinyrun.one_thread
PROMPTS = [{"prompt": f"ab {word} ", "answer": "7"} for word in "abcdefgh"]
LAYOUTS = {
    "tp2": ("--layout.tp", 2, "--rollout.tp", 1),
    "dp2": ("--layout.dp", 2, "--layout.zero", 3, "--rollout.tp", 2, "--train.microbatch-size", 4),
    "pp2": ("--layout.pp", 2, "--rollout.tp", 2, "--train.microbatch-size", 2),
}


@pytest.fixture(scope="module")
def train(material, tmp_path_factory):
    """Train four steps, two iterations of two updates; return the run's folder."""
    folder = tmp_path_factory.mktemp("grpo")
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)))

    def run(name: str, *more):
        out = folder / name
        ended = dolmen(
            *("train", "grpo", "--init", material.model, "--out", out, "--train.device", "cpu"),
            *("--data.path", folder / "prompts.jsonl", "--reward", "stub", "--train.steps", 4),
            *("--train.sequence-length", 32, "--train.global-batch-size", 8),
            *("--rollout.num-generations", 4, "--rollout.prompts", 4),
            *("--rollout.max-new-tokens", 12, "--optimizer.lr", 2e-2),
            *("--train.numerics", "exact", "--train.exact.tp", 2, "--train.dtype", "float32"),
            *("--layout.reduction", "fixed", *more),
        )
        assert ended.code == 0, ended.err
        return out

    return run


@pytest.fixture(scope="module")
def alone(train):
    return train("alone")


def test_log_probabilities_are_equal_and_first_ratios_are_one(alone):
    found = rows(alone)
    assert all(row["rollout/logprob_difference"] == 0 for row in found)
    assert [found[i]["objective/ratio"] for i in (0, 2)] == [1, 1]
    assert [found[i]["objective/kl_k3"] for i in (0, 2)] == [0, 0]
    # the second update of an iteration is off-policy
    assert all(found[i]["objective/ratio"] != 1 for i in (1, 3))


@pytest.mark.spawn
@pytest.mark.parametrize(
    "name", ["dp2", *(pytest.param(name, marks=pytest.mark.full) for name in ("tp2", "pp2"))]
)
def test_layouts_of_trainer_and_generator_change_no_bit(name, alone, train):
    other = train(name, *LAYOUTS[name])
    keys = ("loss", "grad_norm", "rollout/logprob_difference", "objective/ratio")
    for got, want in zip(rows(other), rows(alone), strict=True):
        assert [got[key] for key in keys] == [want[key] for key in keys]
    got, want = tensors(other, 4), tensors(alone, 4)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)


def test_a_step_within_an_iteration_is_replayed(train):
    """From what the iteration has sampled: anew, the later weights would sample other answers."""
    run = train("replayed", "--checkpoint.every", 1)
    ended = dolmen("replay", run, "--step", 4)
    assert ended.code == 0 and "step 4: the bits are those that were" in ended.out, ended.err
