"""The rewards of answers: the sum of what several judges say, each times its weight. Rules and
functions are asked by the first rank for all, reward models by all together.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dolmen.core import agree
from dolmen.core.mesh import Mesh
from dolmen.model.decoder import Decoder
from dolmen.rollouts.rewards import Answer, Judge, Judgement, NoReward
from dolmen.rollouts.scorer import Scorer


class Part(NamedTuple):
    """Of a reward."""

    name: str
    """As --reward has it."""
    weight: float
    judge: Judge | Scorer


class Rewards(NamedTuple):
    """Of answers, in their order."""

    each: Float[Tensor, " answers"]
    """NaN where there is none."""
    told: dict[str, float]


@dataclass(frozen=True, eq=False)
class Judging:
    """Judges answers; functions within `with` alone, where their processes run."""

    parts: Sequence[Part]
    on_failure: Literal["stop", "zero", "leave-out"]
    mesh: Mesh
    say: Callable[[str], None] = print

    @property
    def models(self) -> list[Decoder]:
        """Reward models among the judges."""
        return [one.judge.model for one in self.parts if isinstance(one.judge, Scorer)]

    def __enter__(self) -> "Judging":
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as ending:
            for part in self.parts:
                if isinstance(part.judge, Judge):
                    ending.push(part.judge.__exit__)

    def __call__(self, answers: Sequence[Answer]) -> Rewards:
        """Every rank calls it with the same. Raises NoReward, on every rank, for an answer whose
        reward fails where a run is to stop then.
        """
        total, failed, told = torch.zeros(len(answers)), 0, {}
        for place, part in enumerate(self.parts):
            found = self._by(part, answers)
            try:
                each = [self._settled(one) for one in found]
            except ValueError as error:  # the same on every rank
                raise NoReward(str(error)) from None
            rewards = torch.tensor(each)
            total += part.weight * rewards
            failed += sum(one.reward is None for one in found)
            if len(self.parts) > 1:
                good = rewards[~rewards.isnan()]
                told[f"rollout/reward_{place + 1}"] = float(good.mean()) if len(good) else math.nan
        return Rewards(total, {**told, "rollout/failed_rewards": float(failed)})

    def _by(self, part: Part, answers: Sequence[Answer]) -> list[Judgement]:
        """What one of the judges says, on every rank."""
        judge = part.judge
        if isinstance(judge, Scorer):
            scores = judge([one.tokens for one in answers]).tolist()
            return [
                Judgement(one) if math.isfinite(one) else Judgement(None, f"{part.name} gave {one}")
                for one in scores
            ]

        def by_the_first() -> list[Judgement]:
            found = []
            for answer in answers:
                found.append(judge(answer))
                if found[-1].reward is None and self.on_failure == "stop":
                    break  # nobody asks what the others are
            return found

        return by_the_first() if self.mesh.size == 1 else agree.once(by_the_first)

    def _settled(self, found: Judgement) -> float:
        """The reward that counts. Raises ValueError where a run is to stop."""
        if found.reward is not None:
            return found.reward
        if self.on_failure == "stop":
            raise ValueError(f"{found.why} (--rollout.on-failure zero or leave-out goes on)")
        if self.mesh.first:
            self.say(f"WARNING: {found.why}")
        return 0.0 if self.on_failure == "zero" else math.nan
