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


def outcome(name: str, seed: int) -> Outcome:
    """Of what it has drawn: the reward of the last ten phases over that of sound runs' first, and
    their KL.
    """
    run = folder(name, seed)
    first = ends(folder("sound", seed), "rollout/reward", 3)[0]
    return Outcome(ends(run, "rollout/reward")[1] / first, float(story_kl(run)[1][-10:].mean()))


def table() -> list[tuple[str, list[Outcome]]]:
    """Of each fault the outcome of every seed; empty where not all have been run."""
    every = [folder(name, seed) / "summary.json" for name in FAULTS for seed in SEEDS]
    if not all(file.exists() for file in every):
        return []
    return [(name, [outcome(name, seed) for seed in SEEDS]) for name in FAULTS]
