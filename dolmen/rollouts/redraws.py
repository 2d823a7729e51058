"""DAPO's dynamic sampling (2503.14476, section 3.2): nothing is learned from a group whose rewards
are all equal, so others are drawn in its place.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class Rewarded(Protocol):
    @property
    def reward(self) -> float: ...


One = TypeVar("One", bound=Rewarded)


class Redrawn(NamedTuple):
    """What has come of it."""

    groups: int
    """That were drawn again, each time counted."""
    alike: int
    """That are so still."""


def with_redraws(
    draw: Callable[[Sequence[int], int], list[One]], groups: int, samples: int, most: int
) -> tuple[list[One], Redrawn]:
    """Of so many `groups` their `samples` answers, group by group. `draw(numbers, time)` draws
    those of the groups of these numbers; it is called for all with time 0, and for those that are
    alike with time 1, 2, ... `most`.
    """
    found, redrawn = draw(range(groups), 0), 0
    for again in range(1, most + 1):
        equal = _alike(found, samples)
        if not equal:
            break
        redrawn += len(equal)
        for place, one in enumerate(draw(equal, again)):
            group, sample = divmod(place, samples)
            found[equal[group] * samples + sample] = one
    return found, Redrawn(redrawn, len(_alike(found, samples)))


def _alike(found: Sequence[Rewarded], samples: int) -> list[int]:
    return alike(torch.tensor([one.reward for one in found]), samples).nonzero()[:, 0].tolist()


def alike(rewards: Float[Tensor, " answers"], samples: int) -> Bool[Tensor, " groups"]:
    """Whether the rewards of a group of so many consecutive answers are all equal, those that
    failed aside.
    """
    grouped = rewards.view(-1, samples)
    most = grouped.nan_to_num(-torch.inf).amax(1)
    least = grouped.nan_to_num(torch.inf).amin(1)
    return most <= least
