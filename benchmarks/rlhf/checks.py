"""What is claimed of the road, as numbers that hold or do not."""

import json
from statistics import fmean
from typing import NamedTuple

from benchmarks.rlhf import task
from benchmarks.rlhf.measure import Measured, kept
from benchmarks.rlhf.series import series
from benchmarks.rlhf.stages import BOUND, DATA, FOLDER, STAGES

TIMES, ACCURACY, FITS = 5.0, 0.95, 0.9
DRAWN = tuple(name for name in ("grpo", "ppo") if name in STAGES)


class Check(NamedTuple):
    text: str
    holds: bool


def checked() -> list[Check]:
    """Of all that has been run."""
    found = kept(FOLDER / "measured.json")
    made: list[Check] = []
    if "sft" in found and "base" in found:
        made.append(_taught(found["base"], found["sft"]))
    accuracy = series(FOLDER / "reward", "val_accuracy")[1]
    if len(accuracy):
        text = f"reward model: right of {accuracy[-1]:.1%} of held-out pairs (over {ACCURACY:.0%})"
        made.append(Check(text, bool(accuracy[-1] > ACCURACY)))
    if "sft" in found:
        start = found["sft"]
        of_chosen = (chosen(), "what the chosen answers have")
        most = {"dpo": of_chosen} | {
            name: (TIMES * start.reward, f"{TIMES:g} times that") for name in DRAWN
        }
        made += [
            _moved(name, found[name], start, *over) for name, over in most.items() if name in found
        ]
    return made


def chosen() -> float:
    """The mean reward of the answers that are preferred: DPO is given no reward but these, and to
    learn them alone, without those that are rejected, comes to as much.
    """
    rows = map(json.loads, (DATA / "pairs.jsonl").read_text().splitlines())
    return fmean(task.reward(row["prompt"], row["chosen"], row) for row in rows)


def _taught(base: Measured, sft: Measured) -> Check:
    text = f"SFT: {sft.fits:.1%} of answers fit (over {FITS:.0%}; before: {base.fits:.1%})"
    return Check(text, sft.fits > FITS > base.fits)


def _moved(name: str, after: Measured, start: Measured, least: float, why: str) -> Check:
    """A reward over `least`, at a KL within the bound, and still stories."""
    text = (
        f"{name.upper()}: reward {start.reward:.3f} -> {after.reward:.3f}, "
        f"{after.reward / start.reward:.1f} times (over {least:.3f}, {why}), KL {after.kl:.2f} "
        f"nats (bound {BOUND:g}), fits {after.fits:.1%} (over {FITS:.0%})"
    )
    return Check(text, after.reward > least and after.kl < BOUND and after.fits > FITS)
