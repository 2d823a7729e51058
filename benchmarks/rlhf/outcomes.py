"""What became of the controls: whether what is claimed of a sound run holds."""

from typing import NamedTuple

from benchmarks.rlhf.checks import TIMES
from benchmarks.rlhf.faults import FAULTS, SEEDS, folder
from benchmarks.rlhf.series import ends, story_kl
from benchmarks.rlhf.stages import BOUND


class Outcome(NamedTuple):
    """Of one run: how often its reward is that of the start, and how far it is from there."""

    times: float
    kl: float

    @property
    def passes(self) -> bool:
        """What is claimed of a sound run."""
        return self.times > TIMES and self.kl < BOUND


def outcome(recipe: str, name: str, seed: int) -> Outcome:
    """Of what it has drawn: the reward of the last ten phases over that of the sound run's first,
    and their KL.
    """
    run = folder(recipe, name, seed)
    first = ends(folder(recipe, "sound", seed), "rollout/reward", 3)[0]
    return Outcome(ends(run, "rollout/reward")[1] / first, float(story_kl(run)[1][-10:].mean()))


def ended(recipe: str, name: str, seed: int) -> bool:
    """Whether there is an outcome: of this run, and of the sound one that it is measured by."""
    return all((folder(recipe, one, seed) / "summary.json").exists() for one in (name, "sound"))


def seeds(recipe: str) -> list[int]:
    """Those of which every fault has been run."""
    return [seed for seed in SEEDS if all(ended(recipe, name, seed) for name in FAULTS)]


def table(recipe: str) -> list[tuple[str, list[Outcome]]]:
    """Of each fault the outcome of every one of `seeds`; empty where there is none."""
    run = seeds(recipe)
    return [(name, [outcome(recipe, name, seed) for seed in run]) for name in FAULTS if run]
