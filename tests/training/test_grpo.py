"""`dolmen train grpo`: a reward grows, the layout of training and of drawing never changes what is
drawn, and a run that stopped in the middle of a phase goes on as it would have.
"""

import json
import math
import shutil
from dataclasses import replace

import pytest
import tinyrun
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tinyrun import dolmen, rows
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from dolmen.objectives.config import ObjectiveConfig
from dolmen.ops.loss import IGNORED
from dolmen.rl import rollout
from dolmen.rl.config import RolloutConfig
from dolmen.rl.generation import GenerationModel
from dolmen.training.checks import warn
from dolmen.training.config import RunConfig, TrainConfig
from dolmen.watching.run import WatchedRun

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
        *(
            "--rollout.num-generations",
            8,
            "--rollout.max-new-tokens",
            8,
            "--optimizer.lr",
            2e-2,
            *more,
        ),
    ]


def test_completions_are_logged_and_shown_and_a_kl_that_is_off_is_not(prompts, tmp_path):
    """TensorBoard has those of each iteration at its first update, and the page begins with what
    they were like.
    """
    out, sample = tmp_path / "run", ("--rollout.log-completions", 2, "--rollout.prompts", 4)
    more = ("--train.steps", 4, "--log.every", 3, "--log.to", "tensorboard")
    ended = dolmen(*options(prompts, out, *sample, *more))
    assert ended.code == 0, ended.err
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    texts = events.Tensors("completions/text_summary")
    assert [event.step for event in texts] == [1, 3]
    assert all(event.tensor_proto.string_val[0].count(b"completion:") == 2 for event in texts)
    found = rows(out)
    assert [row["step"] for row in found] == [3, 4]
    assert not {"objective/reference_kl", "rollout/reference_kl"} & {*found[-1]}
    run = WatchedRun(out, "run")
    run.read()
    last, facts = found[-1], dict(run.as_dict()["facts"][:3])
    assert facts["mean reward"] == f"{last['rollout/reward']:.4f}"
    assert facts["finished completions"] == f"{last['rollout/finished']:.1%}"
    assert facts["completion length"] == f"{last['rollout/completion_length']:,.1f} tokens"


@pytest.mark.slow
def test_a_reward_grows_and_trainer_and_generator_agree(prompts, tmp_path):
    ended = dolmen(*options(prompts, tmp_path / "run", "--train.steps", 25))
    assert ended.code == 0 and "reward 0." in ended.out and "disagree" not in ended.out
    found = rows(tmp_path / "run")
    first, last = (
        sum(row["rollout/reward"] for row in some) / 3 for some in (found[:3], found[-3:])
    )
    assert last > 2 * first, (first, last)
    assert max(row["rollout/logprob_difference"] for row in found) < 1e-6
    assert max(row["rollout/logprob_difference_over_tolerance"] for row in found) < 1


@pytest.mark.slow
def test_weights_that_are_stale_are_seen(prompts, tmp_path, monkeypatch):
    """In the log-probabilities: the model that draws is the one that the run began with."""
    load_weights = GenerationModel.load_weights

    def once(self, policy):
        if not vars(self).setdefault("filled", False):
            self.filled = True
            return load_weights(self, policy)
        return self.model

    monkeypatch.setattr(GenerationModel, "load_weights", once)
    ended = dolmen(*options(prompts, tmp_path / "run", "--train.steps", 4))
    said = " ".join(ended.out.split())
    assert ended.code == 0 and said.count("trainer and generator disagree") == 1
    assert "stale rollout weights: compare --rollout.tp 1" in said
    assert rows(tmp_path / "run")[-1]["rollout/logprob_difference_over_tolerance"] > 10


OFF = {warn.MISMATCH: 3.0, "rollout/logprob_difference": 2e-4}
CAP = "--rollout.importance-sampling-cap 2"


@pytest.mark.parametrize(
    "name, dtype, cap, message, words",
    [
        ("grpo", "bfloat16", None, OFF, (CAP, "3 times as far", "--train.dtype float32")),
        ("grpo", "bfloat16", 3.0, OFF, ("Rounding to bfloat16 can",)),
        ("ppo", "float16", None, OFF, ("Rounding to float16 can",)),
        ("ppo", "float64", None, OFF, ("In float64 this indicates a fault",)),
        ("grpo", "bfloat16", None, {**OFF, warn.MISMATCH: math.nan}, ("not finite",)),
        ("grpo", "bfloat16", None, {**OFF, warn.MISMATCH: 1.0}, None),
        ("tokens", "bfloat16", None, {}, None),
    ],
)
def test_what_is_off_is_told_with_what_can_be_done(name, dtype, cap, message, words):
    """And with nothing that this run would be refused, or does already."""
    run = replace(
        RunConfig(),
        train=TrainConfig(dtype=dtype),
        objective=ObjectiveConfig(name),
        rollout=RolloutConfig(importance_sampling_cap=cap),
    )
    said = warn.logprob_mismatch(run, message, 3)
    assert (said is None) == (words is None)
    for word in words or ():
        assert word in said
    assert said is None or (CAP in said) == (CAP in words)


PHASES = (
    *("--rollout.prompts", 8, "--rollout.num-generations", 4, "--rollout.epochs", 2),
    *(
        "--rollout.max-resamples",
        2,
        "--rollout.overlong-buffer",
        4,
        "--rollout.importance-sampling-cap",
        2,
    ),
    *("--reward", "regex:a", "--rollout.advantage-estimator", "rloo", "--checkpoint.every", 3),
)


@pytest.mark.slow
def test_a_run_that_stopped_within_a_phase_goes_on_bitwise(prompts, tmp_path):
    """Phases of four updates, and the end of a first part after six: with the rewards that its file
    has, which are not asked for again. Groups whose rewards are all equal were drawn again.
    """
    want, got = tmp_path / "whole", tmp_path / "parts"
    more = (*PHASES, "--optimizer.schedule", "constant")
    assert dolmen(*options(prompts, want, *more, "--train.steps", 9)).code == 0
    assert dolmen(*options(prompts, got, *more, "--train.steps", 6)).code == 0
    again = options(prompts, got, *more, "--train.steps", 9, "--reward", "stub", "--resume")
    assert dolmen(*again).code == 0
    assert rows(want)[0]["rollout/resampled_groups"] > 0
    for a, b in zip(rows(want), rows(got), strict=True):
        if a["step"] <= 8:  # those of the phase that had begun
            assert a["loss"] == b["loss"] and a["grad_norm"] == b["grad_norm"], a["step"]


def test_equal_rewards_of_a_whole_run_are_warned_about(prompts, tmp_path):
    more = ("--train.steps", 2, "--rollout.prompts", 2, "--reward", "regex:@@@@")
    ended = dolmen(*options(prompts, tmp_path / "run", *more))
    assert ended.code == 0, ended.err
    assert "WARNING: all rewards of this run were equal, in the last iteration 0: " in ended.out


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
    assert ended.code == 1 and "RuntimeError: odd (--rollout.on-failure" in ended.words
    went_on = dolmen(*options(prompts, tmp_path / "on", *few, "--rollout.on-failure", "leave-out"))
    assert went_on.code == 0, went_on.words
    assert rows(tmp_path / "on")[0]["rollout/failed_rewards"] > 0


@pytest.mark.slow
def test_what_is_never_told_apart_is_drawn_again_so_often_as_is_asked(prompts, tmp_path):
    """And another prompt is asked; answers that are cut are not learned from."""
    never = ("--reward", "regex:^$", "--train.steps", 1, "--rollout.max-resamples", 2)
    found = dolmen(
        *options(prompts, tmp_path / "run", *never, "--rollout.mask-truncated-completions")
    )
    assert found.code == 0, found.err
    (row,) = rows(tmp_path / "run")
    assert (row["rollout/degenerate_groups"], row["rollout/resampled_groups"]) == (2, 4)
    made = rollout.load(tmp_path / "run", 0, 16)
    assert made is not None
    lines = (tmp_path / "run" / "rollouts" / "00000000.jsonl").read_text().splitlines()
    whole = torch.tensor([json.loads(line)["finished"] for line in lines])
    assert ((made.labels != IGNORED).any(1) == whole).all() and not whole.all()
    first = {json.loads(line)["prompt"] for line in lines}
    plain = dolmen(*options(prompts, tmp_path / "plain", *never[:4]))
    assert plain.code == 0, plain.err
    lines = (tmp_path / "plain" / "rollouts" / "00000000.jsonl").read_text().splitlines()
    assert first != {json.loads(line)["prompt"] for line in lines}


@pytest.mark.parametrize(
    "more, message",
    [
        (
            ("--rollout.epochs", 3, "--rollout.max-off-policy-steps", 1),
            "set --rollout.max-off-policy-steps 2",
        ),
        (
            ("--rollout.num-generations", 1),
            "must be at least 2: rollout.advantage-estimator grpo compares completions of a",
        ),
        (("--rollout.top-k", 5), "rollout.top-k"),
        (("--rollout.weights", "int8"), "correct for it with --rollout.importance-sampling-cap 2"),
        (("--rollout.compile", "--layout.tp", 2), "--rollout.compile compiles no sums over tp"),
        (("--reward", "0:stub"), "must be over 0"),
        (
            ("--rollout.advantage-estimator", "distillation"),
            "and no --reward: objective.reference is none",
        ),
    ],
)
def test_what_is_refused(prompts, tmp_path, more, message):
    found = dolmen(*options(prompts, tmp_path / "run", *more))
    assert found.code == 2 and message in found.words, found.words
    assert not (tmp_path / "run").exists()


def first_completions(run) -> list:
    lines = (run / "rollouts" / "00000000.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_drafts_and_int8_weights_of_rollouts(prompts, tmp_path):
    """Verified drafts leave the completions as they are; int8 weights do not, and are weighted."""
    step = ("--train.steps", 1, "--rollout.temperature", 0.5)
    drafts = ("--rollout.speculative.method", "ngram", "--rollout.speculative.prompt-lookup-min", 1)
    int8 = ("--rollout.weights", "int8", "--rollout.importance-sampling-cap", 2)
    for name, more in ("plain", ()), ("drafts", drafts), ("int8", int8):
        ended = dolmen(*options(prompts, tmp_path / name, *step, *more))
        assert ended.code == 0 and "disagree" not in ended.out, ended.err
    assert first_completions(tmp_path / "plain") == first_completions(tmp_path / "drafts")
    plain, drafted, quantized = (rows(tmp_path / name)[0] for name in ("plain", "drafts", "int8"))
    assert "rollout/draft_acceptance_rate" not in plain
    assert 0 <= drafted["rollout/draft_acceptance_rate"] <= 1
    assert plain["rollout/logprob_difference"] < 1e-6 < quantized["rollout/logprob_difference"]


@pytest.mark.slow
def test_a_teacher_is_come_closer_to(prompts, tmp_path):
    """The reverse KL from another random model, sharp enough to be told apart."""
    teacher = LlamaConfig(**tinyrun.MODEL, initializer_range=0.2)
    torch.manual_seed(3)
    LlamaForCausalLM(teacher).save_pretrained(tmp_path / "teacher")
    requested = options(prompts, tmp_path / "run", "--rollout.advantage-estimator", "distillation")
    at = requested.index("--reward")
    del requested[at : at + 2]
    requested += ["--objective.reference", tmp_path / "teacher", "--train.steps", 16]
    found = dolmen(*requested)
    assert found.code == 0, found.err
    kl = [row["rollout/reference_kl"] for row in rows(tmp_path / "run")]
    assert 0 < sum(kl[-3:]) < 0.8 * sum(kl[:3]), kl


@pytest.mark.spawn
@pytest.mark.slow
def test_trainer_and_generator_agree_across_turns(prompts, tmp_path, monkeypatch):
    """Of a model that often ends its turn, as every third token ends one."""
    shutil.copytree(prompts / "model", tmp_path / "model")
    file = tmp_path / "model" / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": list(range(0, 300, 3))}))
    (tmp_path / "tool.py").write_text(
        "def tool(prompt, turns, row):\n    return f'<{len(turns)}>' if len(turns) < 5 else None\n"
    )
    monkeypatch.chdir(tmp_path)
    requested = options(prompts, tmp_path / "run", "--environment", "tool:tool", "--train.steps", 3)
    found = dolmen(*requested, "--init", tmp_path / "model", "--rollout.max-new-tokens", 24)
    assert found.code == 0, found.err
    reported = rows(tmp_path / "run")
    assert all(row["rollout/turns"] > 0.3 for row in reported)
    assert max(row["rollout/logprob_difference"] for row in reported) < 1e-6
    assert max(row["rollout/logprob_difference_over_tolerance"] for row in reported) < 1
    (file,) = (tmp_path / "run" / "rollouts").glob("*2.jsonl")
    assert any("<3>" in json.loads(line)["completion"] for line in file.read_text().splitlines())
    absent = dolmen(*options(prompts, tmp_path / "no", "--environment", "tool:no"))
    assert absent.code == 2 and "tool has no function no" in absent.words
    assert not (tmp_path / "no").exists()
