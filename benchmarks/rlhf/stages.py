"""The stages of the road as commands of `dolmen`, each a recipe with what two cores need of it. One
process each, so that two stages can run side by side.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.rlhf import task

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "rlhf"
DATA = FOLDER / "data"
REWARD = "benchmarks.rlhf.task:reward"
BOUND = 7.0
"""Nats of a story that a policy may be from its start; its least for a reward of 0.8 is 4.9."""

EVERY = f"""
    --train.device cpu --train.sequence-length 64 --data.cache {FOLDER / "cache"}
    --finish.export --checkpoint.keep 1 --log.to none --overwrite
"""
MODEL = """
    --model.model-type llama --model.vocab-size 512 --model.hidden-size 64
    --model.intermediate-size 192 --model.num-hidden-layers 3 --model.num-attention-heads 4
    --model.num-key-value-heads 4 --model.max-position-embeddings 64 --model.tie-word-embeddings
"""
DRAWING = f"""
    --init {FOLDER / "sft"} --data.path {DATA / "prompts.jsonl"} --reward {REWARD}
    --rollout.max-new-tokens 36 --rollout.max-num-seqs 128 --train.microbatch-size 64
    --optimizer.lr 3e-4 --optimizer.warmup-steps 10 --optimizer.schedule cosine
    --log.validate-every 0
"""


class Stage(NamedTuple):
    """One run."""

    recipe: str
    words: str
    after: str | None = None
    """The stage that it begins with."""

    def command(self, out: Path, more: Sequence[str] = ()) -> list[str]:
        words = f"train {self.recipe} {self.words} {EVERY}".split()
        return [*words, "--out", str(out), *more]


STAGES: Mapping[str, Stage] = {
    "base": Stage(
        "pretrain",
        f"""{MODEL} --data.path {DATA / "texts.jsonl"} --data.tokenizer bpe:512
        --train.global-batch-size 32 --train.steps 120 --optimizer.name muon --optimizer.lr 5e-3""",
    ),
    "sft": Stage(
        "sft",
        f"""--init {FOLDER / "base"} --data.path {DATA / "chats.jsonl"}
        --data.template {DATA / "story.jinja"} --train.global-batch-size 32 --train.steps 150
        --optimizer.name muon --optimizer.lr 3e-3""",
        after="base",
    ),
    "reward": Stage(
        "reward",
        f"""--init {FOLDER / "sft"} --data.path {DATA / "pairs.jsonl"}
        --data.validation {DATA / "held-pairs.jsonl"} --train.global-batch-size 32
        --train.steps 80 --optimizer.lr 1e-3""",
        after="sft",
    ),
    "dpo": Stage(
        "dpo",
        f"""--init {FOLDER / "sft"} --data.path {DATA / "pairs.jsonl"}
        --data.validation {DATA / "held-pairs.jsonl"} --train.global-batch-size 64
        --train.steps 100 --optimizer.lr 3e-4 --objective.rpo-alpha 2""",
        after="sft",
    ),
    "grpo": Stage(
        "grpo",
        f"""{DRAWING} --rollout.num-generations 16 --rollout.beta 0.3
        --train.global-batch-size 128 --train.steps 90""",
        after="sft",
    ),
    # at this coefficient the best policy of all, exp(reward / coefficient) times the start, has a
    # reward of 0.83 at 5.3 nats
    "ppo": Stage(
        "ppo",
        f"""{DRAWING} --critic.init {FOLDER / "reward"} --critic.lr 1e-3
        --critic.warmup-steps 10 --ppo.kl-coef 0.07
        --rollout.prompts 128 --train.global-batch-size 64 --train.steps 160""",
        after="reward",
    ),
}


def run(name: str, out: Path | None = None, more: Sequence[str] = ()) -> int:
    """The exit code of a stage; what it says goes to a file beside its folder."""
    out = out or FOLDER / name
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out.with_suffix(".log"), "w") as log:
        words = [sys.executable, "-m", "dolmen", *STAGES[name].command(out, more)]
        return subprocess.run(words, stdout=log, stderr=log, cwd=ROOT).returncode


def prepare() -> None:
    """The files that are learned from."""
    if not (DATA / "story.jinja").exists():
        task.write(DATA)
