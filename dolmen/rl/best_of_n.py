"""Of several answers to each row the best (best-of-n, and what rejection sampling learns from):

    dolmen generate MODEL --input in.jsonl --output all.jsonl --num-samples 8 \\
        --reward gsm8k --best best.jsonl

judges what lies in all.jsonl when all of it is there, as `dolmen train grpo` does.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dolmen.conversion.source import open_source, tokenizer_folder
from dolmen.core.mesh import SINGLE
from dolmen.core.paths import expand
from dolmen.files import gate, write
from dolmen.model.layout import Layout
from dolmen.rl import rewards, scoring
from dolmen.rl.rewards import Answer, is_model, judge_of, weighted
from dolmen.rl.scoring import Judging, Part, Scorer
from dolmen.serving import engine
from dolmen.serving.answers import ANSWER as LINE
from dolmen.serving.config import GenerateConfig
from dolmen.serving.offline import Job
from dolmen.serving.rows import ANSWER, Row, line_of, lines

AT_ONCE = 16  # texts of a reward model
LIMIT = 10.0  # seconds of a reward's function for an answer


class Best(NamedTuple):
    """What is told."""

    rows: int
    """That are written."""
    without: int
    """Rows of which no sample has a reward, which are left out."""
    failed: int
    """Samples without a reward."""
    reward: float
    """The mean over rows of the best sample's."""
    of_all: float
    """The mean over all samples."""


def check(config: GenerateConfig) -> None:
    """Raises ValueError, before anything is read or written, for a best that cannot be found."""
    if config.best is None and not config.reward:
        return
    if config.best is None or not config.reward:
        raise ValueError("--best FILE and --reward belong together: give both, or none")
    if config.input is None or config.num_samples < 2:
        raise ValueError(
            f"--best is of several answers to each row of --input: num_samples is "
            f"{config.num_samples}, use --num-samples 2 or more"
        )
    write.check_new("--best", config.best)
    for _, name in weighted(config.reward):
        if is_model(name):
            own = open_source(config.folder)
            scoring.check(name, own.model.tree.vocab_size, tokenizer_folder(own))
        else:
            with judge_of(name, LIMIT) as judge:
                judge.begin()


def choose(job: Job) -> Best:
    """Write the best answer of each row that `job` has answered. Raises ValueError for a file that
    is none of those, with nothing written.
    """
    made, best, every, failed, without = [], [], [], 0, 0
    with _judging(job.config) as judging:
        for fields, where in _rows(job.output):
            row = Row(where, 0, {name: fields[name] for name in fields if name not in ANSWER})
            prompt = _tokens(job, row)
            answers = [
                Answer(row.prompt, one["text"], row.fields, [*prompt, *one["tokens"]])
                for one in fields["samples"]
            ]
            found = judging(answers).each.tolist()
            good = [one for one in found if not math.isnan(one)]
            failed, every = failed + len(found) - len(good), every + good
            if not good:
                without += 1
                continue
            best.append(max(good))
            chosen = fields["samples"][found.index(best[-1])]
            made.append(line_of({**row.fields, **chosen, "reward": best[-1]}))
    write.replace(expand(job.config.best or ""), b"".join(made))
    return Best(len(made), without, failed, _mean(best), _mean(every))


def _tokens(job: Job, row: Row) -> list[int]:
    """Of the prompt, where a reward model reads them."""
    if not any(is_model(name) for _, name in weighted(job.config.reward)):
        return []
    return list(job.prompts.request(row)[0].tokens)


def _rows(file: Path) -> Iterator[tuple[dict[str, Any], str]]:
    for line in lines(file):
        where = f"{file}, line {line.number}"
        fields = gate.parse_json(line.content, where, LINE)
        samples = fields.get("samples")
        if not isinstance(samples, list) or not all(isinstance(one, dict) for one in samples):
            raise gate.refuse(where, "it has no `samples`, as --num-samples 2 or more writes them")
        yield fields, where


@contextmanager
def _judging(config: GenerateConfig) -> Iterator[Judging]:
    parts = []
    for weight, name in weighted(config.reward):
        judge: rewards.Judge | Scorer
        if is_model(name):
            model = engine.load_decoder(open_source(name), SINGLE, torch.float32)
            schedule = Layout().make_schedule(AT_ONCE, AT_ONCE)
            judge = Scorer(model, SINGLE, schedule, AT_ONCE)
        else:
            judge = judge_of(name, LIMIT)
        parts.append(Part(name, weight, judge))
    with Judging(parts, "leave-out", SINGLE) as judging:
        yield judging


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else math.nan
