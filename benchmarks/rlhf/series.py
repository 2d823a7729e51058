"""The numbers of runs, by step."""

import json
from pathlib import Path

import numpy as np


def series(run: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a number of metrics.jsonl, where it is one; empty where there is none."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [row for row in map(json.loads, lines) if row.get(name) is not None]
    return np.array([row["step"] for row in rows]), np.array([row[name] for row in rows], float)


def smooth(values: np.ndarray, width: int = 5) -> np.ndarray:
    """The mean of each value and those before it, `width` in all."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def ends(run: Path, name: str, steps: int = 10) -> tuple[float, float]:
    """The means of the first and the last few values."""
    values = series(run, name)[1]
    return float(values[:steps].mean()), float(values[-steps:].mean())


def story_kl(run: Path) -> tuple[np.ndarray, np.ndarray]:
    """By step, KL from the start in nats per answer: as PPO tells it, or the mean of tokens times
    how many an answer has.
    """
    if len((told := series(run, "rollout/kl_per_completion"))[0]):
        return told
    steps, per_token = series(run, "rollout/reference_kl")
    return steps, per_token * series(run, "rollout/completion_length")[1]


def kl_and_reward(run: Path) -> tuple[np.ndarray, np.ndarray]:
    """Of the steps that tell both: a run that goes on within a phase of GRPO does not tell the
    phase's KL again, nor how many tokens its answers had.
    """
    (at, kl), (steps, reward) = story_kl(run), series(run, "rollout/reward")
    _, first, second = np.intersect1d(at, steps, return_indices=True)
    return kl[first], reward[second]
