"""Best-of-n: writes the sample with the highest reward for each row (for rejection sampling too).

    dolmen generate MODEL --input in.jsonl --output all.jsonl --num-samples 8 \\
        --reward gsm8k --best best.jsonl

Samples in all.jsonl are scored when the file is complete, as `dolmen train grpo` scores
completions.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dolmen.conversion.source import ModelSource, open_source, tokenizer_folder
from dolmen.core.filesystem import expand
from dolmen.core.mesh import SINGLE
from dolmen.files import gate, write
from dolmen.model.layout import Layout
from dolmen.rl import rewards
from dolmen.rl.rewards import (
    CombinedReward,
    RewardInput,
    RewardModel,
    WeightedReward,
    is_reward_model,
    make_reward_function,
    parse_rewards,
)
from dolmen.serving import engine
from dolmen.serving.config import GenerateConfig
from dolmen.serving.offline import Job
from dolmen.serving.output_file import OUTPUT_ROW
from dolmen.serving.prompt_file import OUTPUT_FIELDS, PromptRow, json_line, read_lines

BATCH_SIZE = 16  # texts in a forward of a reward model
TIMEOUT = 10.0  # seconds of a reward function for a sample


class BestOfN(NamedTuple):
    """Counts and mean rewards of the rows."""

    rows: int
    """Rows written."""
    without: int
    """Rows left out, as no sample of theirs has a reward."""
    failed: int
    """Samples without a reward."""
    reward: float
    """Mean over rows of the best sample's reward."""
    of_all: float
    """Mean reward of all samples."""


def check_options(config: GenerateConfig) -> None:
    """Raise ValueError for contradictory options of --best, and for an existing output file."""
    if config.best is None and not config.reward:
        return
    if config.best is None or not config.reward:
        raise ValueError("--best and --reward need each other: give both, or neither")
    if config.input is None or config.num_samples < 2:
        raise ValueError(
            "--best chooses among several samples per row, but num_samples is "
            f"{config.num_samples}: use --num-samples 2 or more"
        )
    write.check_new("--best", config.best)


def resolve_rewards(config: GenerateConfig, source: ModelSource) -> dict[str, ModelSource]:
    """Open the reward models of --reward and return them by name; start each reward function once
    and stop it again, to see that it works. Raises ValueError for rewards that do not exist or do
    not fit the model of `source`.
    """
    models: dict[str, ModelSource] = {}
    for _, name in parse_rewards(config.reward):
        if is_reward_model(name):
            models[name] = open_source(name)
            rewards.check_reward_model(name, models[name], source.spec, tokenizer_folder(source))
        else:
            with make_reward_function(name, TIMEOUT) as function:
                function.start()
    return models


def choose(job: Job, models: Mapping[str, ModelSource]) -> BestOfN:
    """Score the samples of each row of the job's output, also by the reward `models`, and write the
    one with the highest reward to --best. Return the counts. Rows without any reward are left out.
    Raises ValueError, with nothing written, for a file that is not such an output.
    """
    rows_out, best, all_rewards, failed, without = [], [], [], 0, 0
    with _combined_reward(job.config, models) as reward:
        for fields, where in _rows(job.output):
            row = PromptRow(
                where, 0, {name: fields[name] for name in fields if name not in OUTPUT_FIELDS}
            )
            prompt = _tokens(job, row)
            texts = [
                RewardInput(row.prompt, sample["text"], row.fields, [*prompt, *sample["tokens"]])
                for sample in fields["samples"]
            ]
            rewards = reward(texts).rewards.tolist()
            scored = [reward_ for reward_ in rewards if not math.isnan(reward_)]
            failed, all_rewards = failed + len(rewards) - len(scored), all_rewards + scored
            if not scored:
                without += 1
                continue
            best.append(max(scored))
            chosen = fields["samples"][rewards.index(best[-1])]
            # of equal rewards the first sample is taken
            rows_out.append(json_line({**row.fields, **chosen, "reward": best[-1]}))
    write.replace(expand(job.config.best or ""), b"".join(rows_out))
    return BestOfN(len(rows_out), without, failed, _mean(best), _mean(all_rewards))


def _tokens(job: Job, row: PromptRow) -> list[int]:
    """Return the token ids of a row's prompt; [] where no reward model needs them."""
    if not any(is_reward_model(name) for _, name in parse_rewards(job.config.reward)):
        return []
    return list(job.prompts.request(row)[0].tokens)


def _rows(file: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each row of an output file, and its location for messages. Raises Refused for a row
    without samples.
    """
    for line in read_lines(file):
        where = f"{file}, line {line.number}"
        fields = gate.parse_json(line.content, where, OUTPUT_ROW)
        samples = fields.get("samples")
        if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
            raise gate.refuse(where, "it has no `samples`, as --num-samples 2 or more writes them")
        yield fields, where


@contextmanager
def _combined_reward(
    config: GenerateConfig, models: Mapping[str, ModelSource]
) -> Iterator[CombinedReward]:
    """Context manager: yield the weighted sum of the rewards in --reward, on one process; reward
    models are loaded in fp32. A sample whose reward fails gets NaN.
    """
    parts = []
    for weight, name in parse_rewards(config.reward):
        scorer: rewards.RewardFunction | RewardModel
        if is_reward_model(name):
            model = engine.load_decoder(models[name], SINGLE, torch.float32)
            schedule = Layout().make_schedule(BATCH_SIZE, BATCH_SIZE)
            scorer = RewardModel(model, SINGLE, schedule, BATCH_SIZE)
        else:
            scorer = make_reward_function(name, TIMEOUT)
        parts.append(WeightedReward(name, weight, scorer))
    with CombinedReward(parts, "leave-out", SINGLE) as reward:
        yield reward


def _mean(numbers: list[float]) -> float:
    """Return the mean; NaN for no numbers."""
    return sum(numbers) / len(numbers) if numbers else math.nan
