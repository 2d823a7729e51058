"""What is claimed of the road, as numbers that hold or do not."""

from typing import NamedTuple

from benchmarks.rlhf.measure import Measured, kept
from benchmarks.rlhf.series import series
from benchmarks.rlhf.stages import BOUND, FOLDER, STAGES

TIMES, ACCURACY, FITS = 5.0, 0.95, 0.9
TIMES_DPO = 2.0  # it is given pairs and no reward
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
        made += [
            _moved(name, found[name], found["sft"]) for name in ("dpo", *DRAWN) if name in found
        ]
    return made


def _taught(base: Measured, sft: Measured) -> Check:
    text = f"SFT: {sft.fits:.1%} of answers fit (over {FITS:.0%}; before: {base.fits:.1%})"
    return Check(text, sft.fits > FITS > base.fits)


def _moved(name: str, after: Measured, start: Measured) -> Check:
    """So many times the reward, at a KL within the bound, and still stories."""
    times = TIMES_DPO if name == "dpo" else TIMES
    text = (
        f"{name.upper()}: reward {start.reward:.3f} -> {after.reward:.3f} "
        f"({after.reward / start.reward:.1f} times, over {times:g}), KL {after.kl:.2f} nats "
        f"(bound {BOUND:g}), fits {after.fits:.1%}"
    )
    holds = after.reward > times * start.reward and after.kl < BOUND and after.fits > FITS
    return Check(text, holds)
